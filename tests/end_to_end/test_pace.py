"""Pace steering with sixty devices, few of whom may be connected, while their coordinator's process
is killed.

Two of them are processes of the SDK. The others are connections of the test that train nothing, and
obey like the SDK.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    Accepted,
    Cancel,
    ComeBack,
    Grant,
    Held,
    Refused,
    Task,
    decode_from_coordinator,
)
from peers import BUFFERED, Peer, plan_text, report_of
from processes import Processes, free_port, service_file, status_of
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

LIGHT, REAL = 58, 2
CONNECTED = 10
PACE: dict[str, Any] = {
    "pace__connected": CONNECTED,
    "pace__longest": 10.0,
    "pace__check_ins": 10.0,
}
SYNCHRONOUS: dict[str, Any] = {"round__goal": 4, "round__minimum": 4, "round__over_selection": 1.25}
ASYNCHRONOUS: dict[str, Any] = BUFFERED | {"round__goal": 4, "round__concurrency": 5}


class LightDevice:
    """A device that sends zeros for each task. It keeps its update over the coordinator's
    deaths."""

    def __init__(self, name: str, url: str, size: int) -> None:
        self.name, self.url, self.update = name, url, np.zeros(size, np.float32)
        self.task: Task | None = None
        self.tasks = self.accepted = self.sent_away = 0

    async def live(self) -> None:
        """Connect again and again, when it was told to."""
        while True:
            try:
                after = await self.converse()
            except (OSError, WebSocketException):
                after = 0.5
            await asyncio.sleep(random.uniform(0.5, 1.5) * after)

    async def converse(self) -> float:
        """Talk until the coordinator says when to come back."""
        options: Any = {"subprotocols": [Subprotocol(PROTOCOL_NAME)], "compression": None}
        async with connect(self.url, **options) as connection:
            peer = Peer(self.name, connection)
            await peer.check_in(
                None if self.task is None else Held(self.task.task, self.task.round)
            )
            if self.task is not None:
                await peer.send(report_of(self.task, self.update))
            while True:
                match decode_from_coordinator(await connection.recv()):
                    case Task() as task:
                        if self.task is None or task.task != self.task.task:
                            self.task, self.tasks = task, self.tasks + 1
                            await peer.send(report_of(task, self.update))
                    case Grant() as grant:
                        await peer.send_update(grant, self.update)
                    case Accepted():
                        self.task, self.accepted = None, self.accepted + 1
                    case Cancel() | Refused():
                        self.task = None
                    case ComeBack(after=after):
                        assert self.task is None, "sent away with an update"
                        self.sent_away += 1
                        return after


@pytest.mark.slow
@pytest.mark.parametrize("more", [SYNCHRONOUS, ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_all_take_part_though_few_are_connected(
    run: Processes, bundle_path: Path, shards: list[Path], more: dict[str, Any]
) -> None:
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    settings = PACE | {"round__grace": 30.0, "local__lr": 0.1, "stop__rounds": 100_000}
    plan.write_text(plan_text(bundle_path, data_dir, **(settings | more)))
    service_file(plan, port)
    url, size = f"ws://127.0.0.1:{port}", open_bundle(bundle_path).manifest.size
    light = [LightDevice(f"light-{number}", url, size) for number in range(LIGHT)]
    real = [f"real-{number}" for number in range(REAL)]

    def all_took_part() -> bool:
        """Whether the updates of the SDK's devices count depends on how quick the light ones
        are."""
        logs = map(run.log, real)
        return all(device.tasks for device in light) and all(
            ": training" in log and "(no-task)" in log for log in logs
        )

    async def play() -> None:
        living = [asyncio.ensure_future(device.live()) for device in light]
        kill_at = [3, 8]  # twice in the middle of things
        async with asyncio.timeout(300):
            while kill_at or not all_took_part():
                await asyncio.sleep(0.1)
                for task in living:
                    assert not task.done(), task.exception()
                found = status_of(data_dir)
                if found is not None and kill_at and found.version >= kill_at[0]:
                    del kill_at[0]
                    run.kill("coordinator")
                    run.coordinator(plan)
        for task in living:
            task.cancel()
        await asyncio.gather(*living, return_exceptions=True)

    run.coordinator(plan)
    for name, shard in zip(real, shards, strict=False):
        run.device(name, url, shard)
    asyncio.run(play())
    found = status_of(data_dir)
    assert found is not None
    assert {row.summary["reports"] for row in found.rounds if row.outcome == "committed"} == {4}
    assert sum(device.sent_away for device in light) > LIGHT
    counted = 4 * len(found.rounds) + found.live["accepted"]
    acknowledged = sum(device.accepted for device in light) + sum(
        run.log(name).count(": update accepted") for name in real
    )
    assert acknowledged <= counted + 4, (
        "what was acknowledged counts, at the latest in the open round"
    )
