"""A large model's updates are added, saved and committed in another thread, while the event loop
answers devices."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import (
    Plan,
    RoundUpdates,
    StoreError,
    read_model,
    read_status,
    register,
)
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.storage import store
from fleetlearn_coordinator.storage.blobs import Tensors
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import Accepted, Content, Fetch, Grant, Refused, Task
from fleetlearn_protocol.vector import Vector
from full_disk import largest_file
from peers import SIZE, Peer, PlanMaker, fleet, plan_text, report_of, update_of, write_test_bundle


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models count as large."""
    monkeypatch.setattr(server, "LARGE_MODEL", 0)


@contextmanager
def held_up(
    patch: pytest.MonkeyPatch, begun: threading.Event | None = None
) -> Iterator[threading.Event]:
    """The writing of a model's file waits for the event, which is set at the end at the latest.
    ``begun`` is set when it waits."""
    go_on, save = threading.Event(), FileBlobs.save_model

    def save_later(blobs: FileBlobs, version: int, tensors: Tensors) -> None:
        if version > 0 and begun is not None:
            begun.set()
        assert version == 0 or go_on.wait(20), "nobody let the commit go on"
        save(blobs, version, tensors)

    with patch.context() as within:
        within.setattr(FileBlobs, "save_model", save_later)
        try:
            yield go_on
        finally:
            go_on.set()


@contextmanager
def additions_held_up(patch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is added to the sum before the event, which is set at the end at the latest."""
    go_on, read = threading.Event(), FileBlobs.read_spool_file

    def read_later(
        blobs: FileBlobs, number: int, size: int, begin: int = 0, **part: int
    ) -> Iterator[memoryview]:
        assert go_on.wait(20), "nobody let the addition go on"
        yield from read(blobs, number, size, begin, **part)

    with patch.context() as within:
        within.setattr(FileBlobs, "read_spool_file", read_later)
        try:
            yield go_on
        finally:
            go_on.set()


async def close_the_round(coordinator: RunServer, device: Peer) -> Task:
    """The device's update is the last that its round needs; returns its task."""
    task = await device.do_round(update_of(1.0))
    assert coordinator.engine.phase is Phase.COMMITTING
    return task


async def committed(coordinator: RunServer) -> None:
    async with asyncio.timeout(10):
        await coordinator.wait_for_thread()


def test_devices_are_answered_while_a_commit_is_under_way(
    make_plan: PlanMaker, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with fleet(make_plan(round__goal=2, round__over_selection=1.5)) as (
            coordinator,
            join,
        ):
            a, b, c = [await join(name) for name in "abc"]
            before = coordinator.run.models.newest.model.copy()
            late = await c.task()
            with held_up(monkeypatch) as go_on:
                await a.do_round(update_of(1.0))
                task = await close_the_round(coordinator, b)
                assert (await c.receive()).task == late.task  # type: ignore[union-attr]  # it is cancelled
                # The model of the round that is over goes on being served.
                assert await c.fetch(task.vector("model").sha256) == before.tobytes()
                await c.send(report_of(late, update_of(1.0)))
                assert (await c.expect(Refused)).code is Code.NOT_WANTED
                await b.send(report_of(task, update_of(1.0)))
                await b.expect(Accepted)  # once more: it counts already
                # Who checks in now waits for the next round, and so does a device that comes back.
                await join("d")
                again = await join("a")
                assert read_status(coordinator.run.plan.data_dir).version == 0
                assert coordinator.engine.phase is Phase.COMMITTING
                assert sorted(coordinator.engine.selection.idle) == ["d"]
                go_on.set()
                await committed(coordinator)
            assert coordinator.engine.version == 1
            np.testing.assert_array_equal(
                coordinator.run.models.newest.model, before + np.float32(1.0)
            )
            task = await again.task()
            assert task.round == 2
            assert (
                await again.fetch(task.vector("model").sha256)
                == coordinator.run.models.newest.model.tobytes()
            )
            engine = coordinator.engine
            assert len(engine.leases) == 3
            assert sorted([*engine.leases, *engine.selection.idle]) == ["a", "b", "c", "d"], (
                "each is there once"
            )

    asyncio.run(test())


def test_a_stop_waits_for_the_commit(
    make_plan: PlanMaker, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, begun = make_plan(round__goal=1), threading.Event()

    async def test() -> None:
        with held_up(monkeypatch, begun) as go_on:
            async with fleet(plan) as (coordinator, join):
                await close_the_round(coordinator, await join("a"))
                assert await asyncio.to_thread(begun.wait, 10)
                asyncio.get_running_loop().call_later(0.05, go_on.set)
                await coordinator.stop("stopped by the test")

    asyncio.run(test())
    assert read_status(plan.data_dir).version == read_model(plan.data_dir)[0] == 1


def test_an_error_of_the_thread_ends_the_coordinator(
    make_plan: PlanMaker, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start repeats the commit: the reports are safe."""
    plan = make_plan(round__goal=1)

    def fail(blobs: FileBlobs, version: int, tensors: Tensors) -> None:
        raise StoreError(Code.BUSY, "the disk is full")

    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            a = await join("a")
            with monkeypatch.context() as patch:
                patch.setattr(FileBlobs, "save_model", fail)
                await a.do_round(update_of(1.0))
                with pytest.raises(StoreError, match="the disk is full"):
                    await coordinator.done
            assert coordinator.ended
            assert coordinator.engine.phase is Phase.COMMITTING
        assert read_status(plan.data_dir).version == 0
        async with fleet(plan) as (coordinator, _):
            assert coordinator.engine.version == 1

    asyncio.run(test())
    assert read_model(plan.data_dir)[0] == 1


def test_updates_are_accepted_while_others_are_added_and_the_commit_waits_for_all(
    make_plan: PlanMaker, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with fleet(make_plan(round__goal=3, stop__rounds=1)) as (coordinator, join):
            devices = [await join(name) for name in "abc"]
            before = coordinator.run.models.newest.model.copy()
            with additions_held_up(monkeypatch) as go_on:
                for number, device in enumerate(devices):
                    await device.do_round(update_of(float(number)))
                assert coordinator.engine.phase is Phase.COMMITTING
                assert coordinator.run.reports.round.sums.states["update"].count == 0
                assert read_status(coordinator.run.plan.data_dir).version == 0
                go_on.set()
                await committed(coordinator)
            assert coordinator.engine.version == 1
            np.testing.assert_array_equal(
                coordinator.run.models.newest.model, before + np.float32(1.0)
            )

    asyncio.run(test())


def test_an_upload_waits_while_all_spool_files_are_in_use(
    make_plan: PlanMaker, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One update is held before the sum is saved, one upload has a place, one may wait with some
    of its bytes, and one may be of a device that is away: there are four files."""
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 1)

    async def test() -> None:
        plan = make_plan(round__goal=5, stop__rounds=1)
        async with fleet(plan, uploads=1) as (coordinator, join):
            devices = [await join(name) for name in "abcde"]
            before = coordinator.run.models.newest.model.copy()
            with additions_held_up(monkeypatch) as go_on:
                for device in devices[:4]:
                    await device.do_round(update_of(1.0))
                last = devices[4]
                task, other = (
                    await last.task(),
                    coordinator.run.bundle.manifest.files["graphs/eval.onnx"].sha256,
                )
                await last.send(report_of(task, update_of(1.0)))
                await last.send(Fetch(other))
                await last.expect(Content)  # which shows that no grant came before
                assert len(coordinator.host.uploads.waiting) == 1
                go_on.set()
                grant = await last.expect(Grant)
            await last.send_update(grant, update_of(1.0))
            await last.expect(Accepted)
            await committed(coordinator)
            assert len(list((plan.data_dir / "uploads").iterdir())) == 4
            np.testing.assert_array_equal(
                coordinator.run.models.newest.model, before + np.float32(1.0)
            )

    asyncio.run(test())


def test_a_stop_leaves_what_was_not_added_to_the_next_start(
    make_plan: PlanMaker, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(round__goal=2, stop__rounds=1)

    async def test() -> None:
        with additions_held_up(monkeypatch) as go_on:
            async with fleet(plan) as (coordinator, join):
                for device in [await join(name) for name in "ab"]:
                    await device.do_round(update_of(1.0))
                asyncio.get_running_loop().call_later(0.05, go_on.set)
                await coordinator.stop("stopped by the test")
        assert read_status(plan.data_dir).version == 0
        async with fleet(plan) as (coordinator, _):
            assert coordinator.engine.version == 1

    asyncio.run(test())
    assert read_status(plan.data_dir).rounds[0].summary["reports"] == 2


def test_a_full_disk_ends_the_coordinator_when_the_sum_is_saved(
    make_plan: PlanMaker, large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates are safe in their spool files: the next start saves the sum."""
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 2)
    plan = make_plan(round__goal=3)

    async def test() -> None:
        async with fleet(plan) as (coordinator, join):
            devices = [await join(name) for name in "abc"]
            with largest_file(5 * SIZE):  # less than the sum, more than an update
                for device in devices[:2]:
                    await device.do_round(update_of(1.0))
                with pytest.raises(OSError, match="File too large"):
                    await coordinator.done
            assert coordinator.ended
            assert coordinator.run.store.ledger.get("sum") is None
        async with fleet(plan) as (coordinator, join):
            assert coordinator.run.store.ledger.get("sum") is not None
            assert (
                len(coordinator.engine.accepted)
                == coordinator.run.reports.round.sums.states["update"].count
                == 2
            )

    asyncio.run(test())


@pytest.mark.slow
def test_a_commit_of_100_mb_does_not_stop_the_loop(tmp_path: Path) -> None:
    """Many fetches of a small content are answered between the close of the round and the new
    model."""
    size = 25_000_000
    bundle = write_test_bundle(tmp_path / "large.bundle", size)
    text = plan_text(
        bundle, tmp_path / "run", "fedadam", round__goal=1, round__deadline=600.0, stop__rounds=2
    )

    async def test() -> int:
        answered = 0
        async with fleet(Plan.parse(text, tmp_path)) as (coordinator, join):
            a = await join("a")
            small = coordinator.run.bundle.manifest.files["graphs/eval.onnx"].sha256
            other = await join("b")
            await a.do_round(update_of(1e-3, size))
            while coordinator.engine.phase is Phase.COMMITTING:
                await other.send(Fetch(small))
                # the last answer may come after a task
                answered += isinstance(await other.receive(), Content)
            assert coordinator.engine.version == 1
        return answered

    assert asyncio.run(test()) > 20


def test_devices_are_answered_while_an_own_aggregator_takes_its_time(
    make_plan: PlanMaker,
) -> None:
    """Of a small model too, whose updates are combined between two messages otherwise."""
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Callable[[RoundUpdates], Vector]:
        def combine(updates: RoundUpdates) -> Vector:
            begun.set()
            assert go_on.wait(20), "nobody let it go on"
            return updates.combination(np.full(len(updates), 1 / len(updates)))

        return combine

    register("aggregator", "slow-mean", slow)

    async def test() -> None:
        plan = make_plan(
            round__goal=2, round__over_selection=1, aggregation__aggregator="slow-mean"
        )
        async with fleet(plan) as (coordinator, join):
            a, b = await join("a"), await join("b")
            try:
                await a.do_round(update_of(1.0))
                await close_the_round(coordinator, b)
                assert await asyncio.to_thread(begun.wait, 20)
                await join("c")  # is answered
                assert coordinator.engine.version == 0
            finally:
                go_on.set()
            await committed(coordinator)
            assert coordinator.engine.version == 1

    asyncio.run(test())
