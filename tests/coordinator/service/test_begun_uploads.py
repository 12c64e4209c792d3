"""Uploads that go on after the coordinator was started again, and those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.storage import find_storage
from fleetlearn_coordinator.storage.runs import Population
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import Accepted, Grant, Held, Report, Task, Uploaded
from masked_peers import CAN_MASK, SECURE, masked_upload
from memory_storage import SLOW_SCHEME, slow_storage
from peers import SIZE, Peer, fleet, plan_text, report_of, update_of
from several import SIZE as SEVERAL_SIZE
from several import run_async, several

UPDATE = np.arange(SIZE, dtype=np.float32) / SIZE
CHUNK = 120_000
"""Bytes: whole words of masked updates too."""


@pytest.fixture(autouse=True)
def slow_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(find_storage.STORES, SLOW_SCHEME, slow_storage)
    monkeypatch.setattr("memory_storage.STORED", {})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def begin(peer: Peer, report: Report, content: bytes, server: Any) -> None:
    """Send the first chunk of an update, and lose the connection."""
    await peer.send(report)
    grant = await peer.expect(Grant)
    assert grant.offset == 0
    await peer.send(pack_chunk(grant.transfer, 0, content[:CHUNK]))
    await until(lambda: bool(server.host.uploads.active[report.task].offset))
    peer.connection.transport.abort()
    await until(lambda: peer.name not in server.host.devices)


async def go_on(peer: Peer, report: Report, content: bytes) -> int:
    """Send what is missing of the update until it is accepted. Returns the bytes that were here."""
    await peer.send(report)
    grant = await peer.expect(Grant)
    for place in range(grant.offset, len(content), CHUNK):
        await peer.send(pack_chunk(grant.transfer, place, content[place : place + CHUNK]))
    await peer.send(Uploaded(grant.task))
    await peer.expect(Accepted)
    return int(grant.offset)


def plan_of(folder: Path, bundle: Path, kind: str) -> Plan:
    place = f"{SLOW_SCHEME}://run" if kind == "slow store" else str(folder / "run")
    settings: dict[str, Any] = SECURE if kind == "masked" else {}
    if kind == "power":
        settings = {"round__goal": 2}
    text = plan_text(bundle, place, **(settings | {"round__grace": 60.0}))
    if kind == "power":
        text = f'durable = "power"\n{text}'
    return Plan.parse(text, folder)


@pytest.mark.parametrize("kind", ["files", "power", "slow store", "masked"])
def test_an_upload_goes_on_after_a_restart(tmp_path: Path, bundle_path: Path, kind: str) -> None:
    plan = plan_of(tmp_path, bundle_path, kind)

    async def join(join_: Any, name: str, held: Held | None = None) -> Peer:
        peer: Peer = await join_(name, check_in=False)
        await peer.check_in(held=held, **({"privacy": CAN_MASK} if kind == "masked" else {}))
        return peer

    async def run() -> None:
        async with fleet(plan) as (server, join_):
            a, _ = await join(join_, "a"), await join(join_, "b")
            task = await a.task()
            report, content = report_of(task, UPDATE), UPDATE.tobytes()
            if kind == "masked":
                upload = masked_upload(task, "a", np.ones(SIZE, np.float32))
                report, content = upload.report, bytes(upload.content)
            await begin(a, report, content, server)
            assert server.run.begun.bytes_kept == CHUNK
        async with fleet(plan) as (server, join_):
            assert server.run.begun.bytes_kept == CHUNK
            a = await join(join_, "a", Held(task.task, task.round))
            assert await go_on(a, report, content) == CHUNK
            assert not server.run.begun.bytes_kept
            assert server.engine.accepted == {task.task: "a"}

    asyncio.run(run())


def test_what_is_here_of_an_upload_goes_with_its_round(tmp_path: Path, bundle_path: Path) -> None:
    async def run() -> None:
        text = plan_text(bundle_path, tmp_path / "run", round__goal=1, round__over_selection=2)
        async with fleet(Plan.parse(text, tmp_path)) as (server, join):
            a, b = await join("a"), await join("b")
            task, other = await a.task(), await b.task()
            await begin(a, report_of(task, UPDATE), UPDATE.tobytes(), server)
            assert server.run.begun.bytes_kept == CHUNK
            assert len(server.run.store.blobs.checkpoints()) == 1
            assert isinstance(await b.upload(other, update_of(1.0)), Accepted)
            assert server.run.begun.bytes_kept == 0
            assert server.run.store.blobs.checkpoints() == {}

    asyncio.run(run())


def test_an_upload_whose_lease_ended_meanwhile_begins_again_after_a_restart(
    tmp_path: Path, bundle_path: Path
) -> None:
    text = plan_text(bundle_path, tmp_path / "run", round__grace=0.1, round__minimum=2)
    plan = Plan.parse(text, tmp_path)

    async def run() -> None:
        async with fleet(plan) as (server, join):
            a, _ = await join("a"), await join("b")
            task = await a.task()
            await begin(a, report_of(task, UPDATE), UPDATE.tobytes(), server)
            await until(lambda: task.task not in server.engine.leases.values())
            assert server.run.begun.bytes_kept == CHUNK
        async with fleet(plan) as (server, join):
            assert server.run.begun.bytes_kept == 0
            assert server.run.store.blobs.checkpoints() == {}

    asyncio.run(run())


@run_async
async def test_each_of_several_runs_keeps_its_own(folder: Path) -> None:
    update = update_of(1.0, SEVERAL_SIZE)
    content, half = update.tobytes(), SEVERAL_SIZE * 2
    leases: dict[str, Task] = {}
    for restarted in (False, True):
        async with several(folder) as host:
            if not restarted:
                for name in ("one", "two"):
                    only = Population(tiers=(name,))
                    await host.add(name, only, round__goal=2, round__cohort=None)
            await host.hosted.look()
            for name in ("one", "two"):
                server = host.server(name)
                held = None
                if restarted:
                    assert server.run.begun.bytes_kept == half
                    held = Held(leases[name].task, leases[name].round)
                peer = await host.join(name, tier=name, held=held)
                if not restarted:
                    await host.join(f"{name}-too", tier=name)
                    leases[name] = await peer.task()
                await peer.send(report_of(leases[name], update))
                grant = await peer.expect(Grant)
                assert grant.offset == (half if restarted else 0)
                if not restarted:
                    await peer.send(pack_chunk(grant.transfer, 0, content[:half]))
                    active = host.hosted.host.uploads.active
                    await until(lambda: bool(active[leases[name].task].offset))  # noqa: B023
                    peer.connection.transport.abort()
                    await until(lambda: bool(server.run.begun.bytes_kept))  # noqa: B023
                    assert server.run.begun.bytes_kept == half
                else:
                    await peer.send_update(grant, update)
                    await peer.expect(Accepted)
