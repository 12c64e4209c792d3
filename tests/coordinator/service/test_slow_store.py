"""A store that is elsewhere: the coordinator decides at once, and promises nothing before it is
stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import Plan, read_status
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.storage import find_storage
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_coordinator.storage.ledger import ReportAccepted, Row, TaskGiven
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import Accepted, CheckIn, Grant, Heartbeat, Welcome
from memory_storage import SLOW_SCHEME, MemoryLedger, MemoryStorage, slow_storage
from peers import Peer, fleet, plan_text, report_of, update_of

SETTINGS = {"stop__rounds": 2, "round__gather": 30.0, "round__minimum": 2}


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStorage]:
    monkeypatch.setitem(find_storage.STORES, SLOW_SCHEME, slow_storage)
    monkeypatch.setattr("memory_storage.STORED", {})
    found = slow_storage(f"{SLOW_SCHEME}://run")
    found.latency = 0.05
    yield found
    found.may_write.set()


def plan_of(bundle: Path, **settings: Any) -> Plan:
    return Plan.parse(
        plan_text(bundle, f"{SLOW_SCHEME}://run", **(SETTINGS | settings)), bundle.parent
    )


async def silent(peer: Peer) -> None:
    """The coordinator has read all that the device said, and has told it nothing."""
    pong = await peer.connection.ping()
    async with asyncio.timeout(10):
        await pong
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await peer.connection.recv()


async def until(holds: Any) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def reports_in(rows: list[Row]) -> int:
    return sum(isinstance(row, ReportAccepted) for row in rows)


def test_no_task_is_sent_before_it_is_stored(bundle_path: Path, storage: MemoryStorage) -> None:
    async def run() -> None:
        coordinator: RunServer
        async with fleet(plan_of(bundle_path)) as (coordinator, join):
            first, second = await join("a"), await join("b", check_in=False)
            await until(lambda: coordinator.run.store.is_safe)
            storage.may_write.clear()
            await second.send(CheckIn(1, "b", 10))
            await until(lambda: len(coordinator.engine.leases) == 2)
            await second.expect(Welcome)  # it promises nothing, and nothing was decided before
            for peer in (first, second):
                await peer.send(Heartbeat())
                await silent(peer)
            stored = [type(row) for rows in storage.batches for row in rows]
            assert TaskGiven not in stored
            storage.may_write.set()
            assert [(await peer.task()).round for peer in (first, second)] == [1, 1]

    asyncio.run(run())


def test_no_update_is_acknowledged_before_it_is_stored(
    bundle_path: Path, storage: MemoryStorage
) -> None:
    """It counts at once all the same, and so do those of others: all of them are one batch or
    two."""

    async def run() -> None:
        coordinator: RunServer
        plan = plan_of(bundle_path, round__goal=7, round__minimum=7)
        async with fleet(plan) as (coordinator, join):
            peers = [await join(f"device-{number}") for number in range(7)]
            tasks = [await peer.task() for peer in peers]
            for peer, task in zip(peers[:6], tasks, strict=False):
                await peer.send(report_of(task, update_of(1.0)))
            grants = [await peer.expect(Grant) for peer in peers[:6]]
            before = len(storage.batches)
            storage.may_write.clear()
            for peer, grant in zip(peers, grants, strict=False):
                await peer.send_update(grant, update_of(1.0))
            await until(lambda: len(coordinator.engine.accepted) == 6)
            for peer in peers:
                await silent(peer)
            assert sum(map(reports_in, storage.batches)) == 0
            storage.may_write.set()
            for peer in peers[:6]:
                await peer.expect(Accepted)
            written = [rows for rows in storage.batches[before:] if reports_in(rows)]
            assert sum(map(reports_in, written)) == 6
            assert len(written) <= 2, "one is being written when the others come"
            assert isinstance(await peers[6].upload(tasks[6], update_of(1.0)), Accepted)

    asyncio.run(run())


def test_rounds_go_on_in_a_slow_store(bundle_path: Path, storage: MemoryStorage) -> None:
    async def work(peer: Peer) -> None:
        for _ in range(2):
            await peer.do_round(update_of(1.0))

    async def run() -> None:
        async with fleet(plan_of(bundle_path)) as (coordinator, join):
            await asyncio.gather(*[work(await join(name)) for name in "ab"])
            async with asyncio.timeout(20):
                await coordinator.done

    asyncio.run(run())
    status = read_status(Path(f"{SLOW_SCHEME}://run"))
    assert [row.summary["reports"] for row in status.rounds] == [2, 2]
    assert (status.version, status.running) == (2, False)
    assert status.finished is not None


def test_a_store_that_cannot_be_written_ends_the_run(
    bundle_path: Path, storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was decided is told nobody."""

    def fails(ledger: MemoryLedger, tables: object, row: Row) -> None:
        raise StoreUnavailableError(Code.BUSY, "the database cannot be reached")

    async def run() -> None:
        async with fleet(plan_of(bundle_path)) as (coordinator, join):
            first, second = await join("a"), await join("b", check_in=False)
            monkeypatch.setattr(MemoryLedger, "_write", fails)
            await second.send(CheckIn(1, "b", 10))
            async with asyncio.timeout(10):
                await asyncio.wait({coordinator.done})
            with pytest.raises(StoreUnavailableError, match="cannot be reached"):
                coordinator.done.result()
            await silent(first)

    asyncio.run(run())
