"""The coordinator of an asynchronous run is killed at 200 random instants: what was acknowledged counts, once.

Real processes and sockets; the devices are connections of the test, which send an update that follows from the task's
name. So the model can be worked out from what the ledger says was accepted.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.aggregation.commit import next_model
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE, ROUNDS_KEPT
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import PROTOCOL_NAME, Accepted, Cancel, Grant, Held, Refused, Task
from fleetlearn_protocol.vector import Vector
from peers import BUFFERED, Peer, plan_text, report_of, update_of, write_test_bundle
from processes import Processes, free_port, service_file
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

RUNS, KILLS = 20, 10
"""Runs, and kills in each of them. Most of the time goes into starting the coordinator eleven times a run."""
LONGEST = 0.25
"""Seconds from the first sign of life of a coordinator until it is killed, at most."""
DEVICES = 4
GOAL = 100
"""Updates that make a model: so many that a run of ROUNDS_KEPT models, whose reports the ledger keeps, outlasts its
kills."""


def update_for(task: str) -> Vector:
    return update_of(crc32(task.encode()) % 1000 / 1000)


class Devices:
    """Devices that take part until they are told to stop, through whatever deaths of their coordinator."""

    def __init__(self, url: str) -> None:
        self.url, self.over = url, False
        self.acknowledged: list[str] = []
        self.alive = asyncio.Event()
        """Set by whatever comes from the coordinator."""

    async def take_part(self, name: str) -> None:
        held: Task | None = None
        while not self.over:
            with suppress(OSError, WebSocketException, TimeoutError, AssertionError):
                async with connect(
                    self.url, subprotocols=[Subprotocol(PROTOCOL_NAME)], compression=None, max_size=None
                ) as connection:
                    peer = Peer(name, connection)
                    await peer.check_in(None if held is None else Held(held.task, held.round))
                    if held is not None:
                        await peer.send(report_of(held, update_for(held.task)))
                    while not self.over:
                        held = await self.go_on(peer, held)
            await asyncio.sleep(0.02)

    async def go_on(self, peer: Peer, held: Task | None) -> Task | None:
        """Answer the next message. Returns the task whose update is not acknowledged."""
        message = await peer.receive()
        self.alive.set()
        match message:
            case Task():
                await peer.send(report_of(message, update_for(message.task)))
                return message
            case Grant(task):
                await peer.send_update(message, update_for(task))
            case Accepted(task):
                self.acknowledged.append(task)
                return None
            case Refused() | Cancel():
                return None
        return held


def by_hand(plan: Plan, rows: list[tuple[str, int, int]], rounds: int) -> Vector:
    """Return the model that these accepted updates make: (task, round, staleness)."""
    bundle = open_bundle(plan.bundle)
    aggregator, optimizer = plan.aggregator(), plan.optimizer(bundle.manifest)
    model = bundle.parameters()[: bundle.manifest.size].copy()
    state = optimizer.init(model)
    for number in range(1, rounds + 1):
        total = aggregator.init(len(model))
        for task, _, staleness in sorted(row for row in rows if row[1] == number):
            update = update_for(task)
            aggregator.add(total, (update,), 1, float(np.abs(update).max()), plan.staleness_factor(staleness))
        model, state, _ = next_model(aggregator, total, optimizer, state, model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_the_coordinator_killed_at_random_instants(run: Processes, tmp_path: Path, seed: int) -> None:
    luck, port = random.Random(seed), free_port()
    bundle = write_test_bundle(tmp_path / "test.bundle")
    settings = {"round__goal": GOAL, "round__concurrency": DEVICES, "round__grace": 30.0, "stop__rounds": ROUNDS_KEPT}
    optimizer = {"server__optimizer": "adam", "server__lr": 0.05}
    file = tmp_path / "plan.toml"
    file.write_text(plan_text(bundle, tmp_path / "run", **(BUFFERED | settings | optimizer)))
    service_file(file, port)
    killed = 0

    async def play() -> list[str]:
        nonlocal killed
        devices = Devices(f"ws://127.0.0.1:{port}")
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            for number in range(DEVICES):
                group.create_task(devices.take_part(f"device-{number}"))
            for kill in range(KILLS + 1):
                process = run.coordinator(file)
                devices.alive.clear()
                if kill == KILLS or luck.random() < 0.8:  # the others are killed before they have said anything
                    while not devices.alive.is_set() and process.poll() is None:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(luck.uniform(0, LONGEST))
                if process.poll() is None:
                    killed += kill < KILLS
                    process.send_signal(signal.SIGKILL if kill < KILLS else signal.SIGTERM)
                await asyncio.to_thread(process.wait)
                assert process.returncode in (0, -signal.SIGKILL), run.log("coordinator")
                if process.returncode == 0:
                    break
            devices.over = True
        return devices.acknowledged

    acknowledged = asyncio.run(play())
    version, model = read_model(tmp_path / "run")
    rounds = [row.summary for row in read_status(tmp_path / "run").rounds if row.summary]
    with sqlite3.connect(tmp_path / "run" / DATABASE) as ledger:
        found = ledger.execute("SELECT task, round, staleness FROM tasks WHERE state='accepted'").fetchall()
    print(f"seed {seed}: {killed} kills, {version} models, {len(acknowledged)} updates acknowledged")
    assert killed == KILLS or version == ROUNDS_KEPT
    assert version >= 1
    assert {*acknowledged} <= {task for task, _, _ in found}, "an acknowledged update was lost"
    assert len(acknowledged) == len({*acknowledged}), "an update was acknowledged twice"
    assert [row["reports"] for row in rounds] == [GOAL] * version
    counted = [number for _, number, _ in found if number <= version]
    assert [counted.count(number) for number in range(1, version + 1)] == [GOAL] * version, "or counted twice"
    assert by_hand(Plan.load(file), found, version).tobytes() == model.tobytes()
