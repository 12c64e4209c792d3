"""A host with several runs whose stores are slow, stand still or fail: what the devices of the
others notice of it, which is nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.service import several_runs
from fleetlearn_coordinator.storage import find_storage
from fleetlearn_coordinator.storage.errors import StoreAwayError, StoreUnavailableError
from fleetlearn_coordinator.storage.ledger import ReportAccepted, Row
from fleetlearn_coordinator.storage.runs import Population
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import Accepted, Grant, Heartbeat, Task
from memory_storage import SLOW_SCHEME, MemoryLedger, MemoryStorage, slow_storage
from peers import Peer, report_of
from several import UPDATE, nothing_comes, run_async, settled, several

ROUNDS = 4


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(find_storage.STORES, SLOW_SCHEME, slow_storage)
    kept: dict[str, MemoryStorage] = {}
    monkeypatch.setattr("memory_storage.STORED", kept)
    yield
    for each in kept.values():
        each.may_write.set()


def place_of(name: str) -> str:
    return f"{SLOW_SCHEME}://{name}"


def only(tier: str) -> Population:
    """The devices of one tier."""
    return Population(tiers=(tier,))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def send_update(peer: Peer, task: Task) -> None:
    """Upload, and do not wait for the answer."""
    await peer.send(report_of(task, UPDATE))
    await peer.send_update(await peer.expect(Grant), UPDATE)


@asynccontextmanager
async def one_stands_still(folder: Path) -> AsyncIterator[tuple[Any, MemoryStorage, Peer, Peer]]:
    """A host, the store that stands still, and devices ``a`` and ``b``. The run ``still`` has just
    made a model that its store does not write; ``a`` serves it, and ``b`` the run ``goes``."""
    async with several(folder) as host:
        storage = slow_storage(place_of("still"))
        still = await host.add("still", only("a"), place=place_of("still"))
        await host.add("goes", only("b"))
        a, b = await host.join("a", tier="a"), await host.join("b", tier="b")
        task = await a.task()
        await until(lambda: still.run.store.is_safe)
        storage.may_write.clear()
        await send_update(a, task)
        await until(lambda: still.engine.version == 1)
        yield host, storage, a, b


async def work(peer: Peer) -> None:
    while True:
        await peer.do_round(UPDATE)


@run_async
async def test_a_store_that_stands_still_keeps_its_own_devices_waiting_alone(folder: Path) -> None:
    async with one_stands_still(folder) as (host, storage, a, b):
        for _ in range(ROUNDS):
            await b.do_round(UPDATE)
        newcomer = await host.join("c", tier="b")
        await host.hosted.look()
        await a.send(Heartbeat())
        await nothing_comes(a)
        storage.may_write.set()
        await a.expect(Accepted)
        assert (await a.task()).round == 2
        await settled(newcomer)
        assert host.server("goes").engine.version == ROUNDS


@run_async
async def test_a_device_hears_what_it_was_told_in_order(folder: Path) -> None:
    """It reported to the run whose store stands still, and has the next task from another."""
    async with several(folder) as host:
        storage = slow_storage(place_of("still"))
        still = await host.add("still", place=place_of("still"))
        a = await host.join("a")
        task = await a.task()
        goes = await host.add("goes")
        await until(lambda: still.run.store.is_safe)
        storage.may_write.clear()
        await send_update(a, task)
        await until(lambda: "a" in goes.engine.leases)
        await nothing_comes(a)
        storage.may_write.set()
        await a.expect(Accepted)
        assert host.of(await a.task()) == "goes"


@run_async
async def test_all_runs_go_on_in_slow_stores(folder: Path) -> None:
    """Each of 50 ms for a batch. Each run writes its own, and no more of them than its rounds
    need."""
    async with several(folder) as host:
        names = ("one", "other")
        for name in names:
            slow_storage(place_of(name)).latency = 0.05
            await host.add(
                name, only(name), place=place_of(name), stop__rounds=ROUNDS, round__goal=2,
                round__minimum=2, round__gather=30.0,
            )  # fmt: skip

        async def serve(device: str, tier: str) -> None:
            peer = await host.join(device, tier=tier)
            for _ in range(ROUNDS):
                await peer.do_round(UPDATE)

        await asyncio.gather(
            *[serve(f"{name}-{number}", name) for name in names for number in "12"]
        )
        for name in names:
            await until(lambda name=name: host.server(name).done.done())  # type: ignore[misc]
        # A round's rows: two tasks, two reports, its end and the next one's begin.
        most = dict.fromkeys(names, 6 * ROUNDS + 10)
        for name in names:
            assert len(slow_storage(place_of(name)).batches) <= most[name]
    for name in names:
        status = read_status(Path(place_of(name)))
        assert [row.summary["reports"] for row in status.rounds] == [2] * ROUNDS


@run_async
async def test_a_store_that_fails_ends_its_run_alone(folder: Path) -> None:
    """A device that waits for its answer has to connect again: nothing may be promised, and another
    run's words would wait behind it for ever."""
    with pytest.MonkeyPatch.context() as patch:
        async with several(folder) as host:
            storage = slow_storage(place_of("fails"))
            fails = await host.add("fails", place=place_of("fails"))
            a = await host.join("a")
            task = await a.task()
            await host.add("goes")
            b = await host.join("b")
            while host.of(other := await b.task()) != "goes":
                await b.upload(other, UPDATE)
            await until(lambda: fails.run.store.is_safe)

            write = MemoryLedger._write

            def refuses(ledger: MemoryLedger, tables: object, row: Row) -> None:
                if isinstance(row, ReportAccepted):
                    raise StoreUnavailableError(Code.BUSY, "the database cannot be reached")
                write(ledger, tables, row)  # type: ignore[arg-type]

            patch.setattr(MemoryLedger, "_write", refuses)
            storage.may_write.clear()
            await send_update(a, task)
            await until(lambda: fails.engine.version == 1)
            storage.may_write.set()
            await a.closed()
            assert isinstance(await b.upload(other, UPDATE), Accepted)
            await host.hosted.look()
            assert "cannot be reached" in host.row("fails").failed
            again = await host.join("a")
            neighbour = asyncio.create_task(work(b))
            assert host.of(await again.do_round(UPDATE)) == "goes"
            neighbour.cancel()


@run_async
async def test_a_run_whose_store_is_away_is_tried_again(folder: Path) -> None:
    """A database that is restarted: nobody has to resume the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(several_runs, "AGAIN", 0.0)
        async with several(folder) as host:
            await host.add("away", place=place_of("away"))
            a = await host.join("a")
            task = await a.task()
            write = MemoryLedger._write
            patch.setattr(MemoryLedger, "_write", refuses_rows)
            await send_update(a, task)
            await a.closed()
            await host.hosted.look()
            assert not host.row("away").failed
            patch.setattr(MemoryLedger, "_write", write)

            async def served_again() -> bool:
                await host.hosted.look()
                return any(name == "away" for name in host.hosted._names.values())

            while not await served_again():
                await asyncio.sleep(0.005)
            again = await host.join("a")
            assert host.of(await again.do_round(UPDATE)) == "away"


def refuses_rows(ledger: MemoryLedger, tables: object, row: Row) -> None:
    raise StoreAwayError(Code.BUSY, "the database cannot be reached")


@run_async
async def test_a_run_is_stopped_while_its_store_stands_still(folder: Path) -> None:
    """The others are looked at meanwhile, and it can be started once it is closed."""
    async with one_stands_still(folder) as (host, storage, a, b):
        await host.want("still", "stopped")
        await host.want("still", "running")  # not before it is closed
        assert [name for name, _ in host.hosted.servers()] == ["goes"]
        await b.do_round(UPDATE)
        storage.may_write.set()
        await a.expect(Accepted)
        await until(lambda: not storage.is_locked())
        await host.hosted.look()
        assert host.server("still").engine.version == 1
        assert (await a.task()).round == 2
