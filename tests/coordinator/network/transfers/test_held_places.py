"""Peers that take a place of a transfer and hardly use it, over real sockets: everybody else goes
on."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.network.driver import ConnectionDriver
from fleetlearn_coordinator.network.transfers.contents import FramedContent as Served
from fleetlearn_coordinator.network.transfers.contents import SelectedContent
from fleetlearn_coordinator.network.transfers.downloads import Download
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol import Code
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk, pack_chunks, unpack_chunk
from fleetlearn_protocol.manifest import PARAMETERS
from fleetlearn_protocol.messages import (
    MAX_REFUSALS,
    Accepted,
    Cancel,
    Content,
    ContentSelection,
    Failed,
    Fetch,
    Grant,
    Held,
    Piece,
    Refused,
    Task,
    Uploaded,
    Waiting,
    decode_from_coordinator,
)
from fleetlearn_protocol.sparse_rows import rows_of
from peers import SIZE, Peer, PlanMaker, fleet, plan_text, report_of, update_of, write_test_bundle

WINDOW = 0.2
"""Seconds, here. The devices of this machine move much more than the least rate within it."""


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlearn_coordinator.conversation.places.WINDOW", WINDOW)
    monkeypatch.setattr("fleetlearn_coordinator.service.serve.SWEEP", 0.02)


LARGE = 4 * 2**20
"""Elements of a model that the kernel does not swallow whole: 16 MiB."""


@pytest.fixture(scope="session")
def large_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_test_bundle(tmp_path_factory.mktemp("large") / "large.bundle", LARGE)


@pytest.fixture
def make_large_plan(tmp_path: Path, large_bundle: Path) -> PlanMaker:
    return lambda **settings: Plan.parse(
        plan_text(large_bundle, tmp_path / "run", **settings), tmp_path
    )


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own. Its argument says with which model."""
    large = "make_large_plan" in inspect.signature(test).parameters

    def run_small(make_plan: PlanMaker) -> None:
        asyncio.run(bounded(make_plan))

    def run_large(make_large_plan: PlanMaker) -> None:
        asyncio.run(bounded(make_large_plan))

    async def bounded(make: PlanMaker) -> None:
        async with asyncio.timeout(30):
            await test(make)

    run = run_large if large else run_small
    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def granted(peer: Peer, value: float = 1.0) -> tuple[Task, Grant]:
    task = await peer.task()
    await peer.send(report_of(task, update_of(value)))
    return task, await peer.expect(Grant)


@run_async
async def test_a_silent_grant_goes_to_the_next_and_is_given_again(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(), uploads=1) as (coordinator, join):
        a, b = await join("a"), await join("b")
        task, first = await granted(a)
        before = coordinator.run.models.newest.model.copy()
        await b.do_round(update_of(3.0))
        assert await a.expect(Waiting) == Waiting(task=task.task)
        await a.send(report_of(task, update_of(1.0)))
        again = await a.expect(Grant)
        assert (again.offset, again.transfer != first.transfer) == (0, True)
        await a.send_update(again, update_of(1.0))
        await a.expect(Accepted)
        np.testing.assert_array_equal(coordinator.run.models.newest.model, before + np.float32(2.0))


@run_async
async def test_a_crawling_upload_goes_on_from_where_it_was_with_what_was_on_its_way(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(), uploads=1) as (coordinator, join):
        a, b = await join("a"), await join("b")
        task, first = await granted(a)
        update = update_of(1.0).tobytes()
        await a.send(pack_chunk(first.transfer, 0, update[:4]))
        await b.do_round(update_of(3.0))
        await a.expect(Waiting)
        await a.send(pack_chunk(first.transfer, 4, update[4:1004]))  # was on its way
        # breaks the rules: not heard, and not answered
        await a.send(pack_chunk(first.transfer, 8, update[8:12]))
        await a.send(report_of(task, update_of(1.0)))
        again = await a.expect(Grant)
        assert again.offset == 1004
        await a.send_update(again, update_of(1.0))
        await a.expect(Accepted)
        assert coordinator.engine.version == 1


@run_async
async def test_an_upload_that_was_complete_when_it_lost_its_place_is_accepted(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(), uploads=1) as (coordinator, join):
        a, b = await join("a"), await join("b")
        task, grant = await granted(a)
        await a.send(pack_chunk(grant.transfer, 0, update_of(1.0).tobytes()[:4]))
        await b.do_round(update_of(3.0))
        await until(lambda: not coordinator.host.uploads.active)
        for chunk in pack_chunks(grant.transfer, update_of(1.0).tobytes(), 4):
            await a.send(chunk)
        await a.send(Uploaded(task.task))
        await a.send(report_of(task, update_of(1.0)))  # it heard of the waiting only now
        assert [type(await a.receive()) for _ in range(2)] == [Waiting, Accepted]
        assert coordinator.engine.version == 1


@run_async
async def test_a_crawling_upload_is_let_be_while_nobody_waits(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1), uploads=1) as (coordinator, join):
        a = await join("a")
        task, grant = await granted(a)
        upload = coordinator.host.uploads.active[task.task]
        await until(lambda: upload.slow)
        await a.send_update(grant, update_of(1.0))
        await a.expect(Accepted)


@run_async
async def test_part_of_a_chunk_is_progress(make_plan: PlanMaker) -> None:
    """On a slow link a full chunk takes longer than any window."""
    async with fleet(make_plan(), uploads=1, least_rate=2e4) as (coordinator, join):
        a, b = await join("a"), await join("b")
        task, grant = await granted(a)
        await b.send(report_of(await b.task(), update_of(3.0)))
        upload = coordinator.host.uploads.active[task.task]
        chunk = pack_chunk(grant.transfer, 0, update_of(1.0).tobytes()[:CHUNK_BYTES])
        frame = b"\x82\xff" + len(chunk).to_bytes(8) + bytes(4) + chunk  # masked with zeros
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for place in range(0, len(frame) - 1, 8000):
            a.connection.transport.write(frame[place : min(place + 8000, len(frame) - 1)])
            await asyncio.sleep(WINDOW / 4)  # 160 kB/s
        assert loop.time() - begin > 3 * WINDOW
        assert (upload.offset, upload.slow) == (0, False)
        assert upload in coordinator.host.uploads.places.held


@run_async
async def test_made_up_names_do_not_hold_up_a_device_that_proved_itself(
    make_plan: PlanMaker,
) -> None:
    """The rates do not matter: no window passes here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetlearn_coordinator.conversation.places.WINDOW", 1000.0)
        plan = make_plan(round__goal=1, round__over_selection=40)
        async with fleet(plan, uploads=2) as (coordinator, join):
            honest = await join("honest")
            await honest.do_round(update_of(1.0))
            ghosts = [await join(f"ghost{number}") for number in range(8)]
            for _ in range(3):
                tasks = [await ghost.task() for ghost in ghosts]
                for ghost, task in zip(ghosts, tasks, strict=True):
                    await ghost.send(report_of(task, update_of(1.0)))
                await until(lambda: len(coordinator.host.uploads.active) == 2)
                await honest.do_round(update_of(1.0))
                for ghost in ghosts:
                    while (await ghost.receive()).__class__.__name__ != "Cancel":
                        pass
            assert coordinator.engine.version == 4


@run_async
async def test_a_slow_device_among_crawlers_brings_its_update_in_the_end(
    make_plan: PlanMaker,
) -> None:
    """It is asked to wait again and again, and each grant brings it a chunk further."""
    plan = make_plan(round__goal=1, round__over_selection=10)
    async with fleet(plan, uploads=1) as (_, join):
        names = ["slow", "x", "y"]
        peers = {name: await join(name) for name in names}

        async def crawl(peer: Peer) -> None:
            task, grant = await granted(peer)
            while True:
                await peer.send(pack_chunk(grant.transfer, grant.offset, bytes(4)))
                await peer.expect(Waiting)
                await peer.send(report_of(task, update_of(1.0)))
                grant = await peer.expect(Grant)

        crawlers = [asyncio.create_task(crawl(peers[name])) for name in "xy"]
        slow, update = peers["slow"], update_of(2.0)
        task, grant = await granted(slow, 2.0)
        asked = 0
        chunks = list(pack_chunks(grant.transfer, update.tobytes()))
        for number in range(len(chunks)):
            (*_, chunk) = list(
                pack_chunks(grant.transfer, update.tobytes()[: (number + 1) * CHUNK_BYTES])
            )
            await slow.send(chunk)
            if number == len(chunks) - 1:
                break
            await slow.expect(Waiting)
            asked += 1
            await slow.send(report_of(task, update))
            grant = await slow.expect(Grant)
            assert grant.offset == (number + 1) * CHUNK_BYTES
        await slow.send(Uploaded(task.task))
        await slow.expect(Accepted)
        assert asked == 2
        for crawler in crawlers:
            crawler.cancel()


async def stop_reading(
    coordinator: RunServer, peer: Peer, sha256: str, selection: ContentSelection | None = None
) -> Download:
    """Fetch and read nothing, until the coordinator can write no more; the download that is
    stuck."""
    peer.connection.transport.pause_reading()
    await peer.send(Fetch(sha256, selection=selection))
    driver = coordinator.host.devices[peer.name]
    await until(lambda: driver.blocked is not None and driver.download is not None)
    assert driver.download is not None
    return driver.download


async def fetch(peer: Peer, sha256: str) -> bytes:
    """Fetch and read everything, however often it is told to wait."""
    await peer.send(Fetch(sha256))
    return await read_content(peer)


async def read_content(peer: Peer) -> bytes:
    size, received = None, bytearray()
    async with asyncio.timeout(10):
        while size is None or len(received) < size:
            message = await peer.connection.recv()
            if isinstance(message, bytes):
                chunk = unpack_chunk(message)
                assert chunk.offset == len(received)
                received += chunk.payload
            elif isinstance(content := decode_from_coordinator(message), Content):
                assert size is None
                size = content.size
            else:
                assert isinstance(content, Waiting)
    return bytes(received)


@run_async
async def test_downloads_that_are_not_read_give_their_place_to_the_next(
    make_large_plan: PlanMaker,
) -> None:
    plan = make_large_plan(round__minimum=2, round__goal=3)
    async with fleet(plan, downloads=2) as (coordinator, join):
        sha256 = coordinator.run.bundle.manifest.files[PARAMETERS].sha256
        readers = [await join(name) for name in ("x", "y")]
        for reader in readers:
            await reader.task()
        stuck = [await stop_reading(coordinator, reader, sha256) for reader in readers]
        assert all(download in coordinator.host.downloads.places.held for download in stuck)
        c = await join("c")
        model = (await c.task()).vector("model").sha256
        await c.send(Fetch(model))
        assert await c.expect(Waiting) == Waiting(sha256=model)
        assert await read_content(c) == coordinator.run.models.newest.model.tobytes()


@run_async
async def test_a_download_that_lost_its_place_goes_on_where_it_was(
    make_large_plan: PlanMaker,
) -> None:
    plan = make_large_plan()
    async with fleet(plan, downloads=1) as (coordinator, join):
        a, b = await join("a"), await join("b")
        tasks = [await a.task(), await b.task()]
        stuck = await stop_reading(coordinator, a, tasks[0].vector("model").sha256)
        assert len(await fetch(b, tasks[1].vector("model").sha256)) == 4 * LARGE
        assert not stuck.turn.is_set()
        a.connection.transport.resume_reading()
        assert await read_content(a) == coordinator.run.models.newest.model.tobytes()


@run_async
async def test_the_pieces_of_a_download_without_a_place_are_in_no_memory(
    make_large_plan: PlanMaker,
) -> None:
    """Devices that read slowly would fill it: each may have selected other pieces."""
    plan = make_large_plan()
    async with fleet(plan, downloads=1) as (coordinator, join):
        a, b = await join("a"), await join("b")
        tasks = [await a.task(), await b.task()]
        odd = ContentSelection((Piece(0, CHUNK_BYTES, True),), (0, 1, *[0] * 125))
        model = coordinator.run.models.newest.model.tobytes()
        sha256 = tasks[0].vector("model").sha256
        stuck = await stop_reading(coordinator, a, sha256, odd)
        assert stuck.turn.is_set()
        assert len(await fetch(b, sha256)) == 4 * LARGE
        (selected,) = (each for each in gc.get_objects() if type(each) is SelectedContent)
        await until(lambda: selected._pieces == b"")
        a.connection.transport.resume_reading()
        assert await read_content(a) == b"".join(
            model[CHUNK_BYTES * row : CHUNK_BYTES * (row + 1)] for row in rows_of(odd)
        )


@run_async
async def test_a_device_without_a_task_waits_for_those_with_one(make_large_plan: PlanMaker) -> None:
    plan = make_large_plan(round__goal=1, round__over_selection=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetlearn_coordinator.conversation.places.WINDOW", 1000.0)
        async with fleet(plan, downloads=1) as (coordinator, join):
            a = await join("a")
            task = await a.task()
            b = await join("b")
            stuck = await stop_reading(coordinator, b, task.vector("model").sha256)
            assert stuck in coordinator.host.downloads.places.held
            assert len(await fetch(a, task.vector("model").sha256)) == 4 * LARGE


@run_async
async def test_a_fetch_that_waits_is_told_so_again_and_again(make_plan: PlanMaker) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetlearn_coordinator.network.driver.WAITING_INTERVAL", 0.05)
        async with fleet(make_plan(), downloads=1, least_rate=0) as (coordinator, join):
            a = await join("a")
            other = Download("nobody", "0" * 64, asyncio.WriteTransport())
            coordinator.host.downloads.places.held[other] = None
            sha256 = coordinator.run.models.newest.digest
            await a.send(Fetch(sha256))
            for _ in range(4):
                assert await a.expect(Waiting) == Waiting(sha256=sha256)
            coordinator.host.downloads.leave(other)
            coordinator.host.downloads.go_on(coordinator.loop.time())
            while isinstance(message := await a.receive(), Waiting):
                pass
            assert isinstance(message, Content)


class Nobody(asyncio.WriteTransport):
    """A transport without bytes."""

    def get_write_buffer_size(self) -> int:
        return 0


@run_async
async def test_a_download_that_loses_its_place_before_it_wakes_up_waits_for_another(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(), downloads=1) as (coordinator, join):
        a, downloads = await join("a"), coordinator.host.downloads
        other, proven = (Download(name, "0" * 64, Nobody()) for name in ("other", "proven"))
        downloads.places.held[other] = None
        await a.send(Fetch(coordinator.run.models.newest.digest))
        await a.expect(Waiting)
        now = coordinator.loop.time()
        downloads.leave(other)
        downloads.go_on(now)  # gives its place to a, which has not heard of it when the next comes
        downloads.places.proven.add("proven")
        downloads.ask(proven, idle=False)
        downloads.go_on(now)
        assert [*downloads.places.held] == [proven]
        await a.expect(Waiting)
        downloads.leave(proven)
        downloads.go_on(coordinator.loop.time())
        assert isinstance(await a.receive(), Content)


@run_async
async def test_a_device_has_one_download_over_all_its_connections(
    make_large_plan: PlanMaker,
) -> None:
    async with fleet(make_large_plan()) as (coordinator, join):
        for _ in range(5):
            a = await join("a")
            for _ in range(3):
                await stop_reading(coordinator, a, coordinator.run.models.newest.digest)
        await until(lambda: len(coordinator.host.downloads.places.held) == 1)
        assert not list(coordinator.host.downloads.places.waiting)


@run_async
async def test_a_model_that_is_no_longer_served_is_not_kept_for_who_reads_slowly(
    make_large_plan: PlanMaker,
) -> None:
    """Otherwise each round could leave another model in memory."""
    plan = make_large_plan(round__goal=1, round__over_selection=2)
    async with fleet(plan) as (coordinator, join):
        a, x = await join("a"), await join("x")
        task = await x.task()
        stuck = await stop_reading(coordinator, x, task.vector("model").sha256)
        await a.do_round(update_of(1.0, LARGE))
        await until(lambda: coordinator.host.devices["x"].download is None)
        await until(lambda: stuck not in coordinator.host.downloads.places)
        x.connection.transport.resume_reading()
        await x.expect(Content)
        await x.expect(Cancel)
        refused = await x.expect(Refused)
        assert (refused.code, refused.sha256) == (Code.UNKNOWN_CONTENT, task.vector("model").sha256)
        assert (await x.task()).round == 2


@run_async
async def test_what_belongs_to_a_download_is_freed_when_it_is_ended(
    make_large_plan: PlanMaker,
) -> None:
    """By the end of its connection or of its round, while it waits for its device to read or for a
    place. The garbage collector runs rarely: each such download would keep a model of its own."""
    plan = make_large_plan(round__goal=1, round__over_selection=5)
    with pytest.MonkeyPatch.context() as patch:
        # nobody loses a place
        patch.setattr("fleetlearn_coordinator.conversation.places.WINDOW", 1000.0)
        async with fleet(plan, downloads=2) as (coordinator, join):
            host, model = coordinator.host, coordinator.run.models.newest.digest
            gc.collect()
            gc.disable()
            try:
                x, y, z, w, a = [await join(name) for name in "xyzwa"]
                for peer in (x, y):
                    await stop_reading(coordinator, peer, model)
                for peer in (z, w):
                    await peer.task()
                    await peer.send(Fetch(model))
                    await peer.expect(Waiting)
                w.connection.transport.abort()
                await until(lambda: "w" not in host.devices)
                await a.do_round(update_of(1.0, LARGE))
                # the others' downloads are of an old model now
                await until(lambda: coordinator.engine.version == 1)
                await stop_reading(coordinator, a, coordinator.run.models.newest.digest)
                a.connection.transport.abort()
                await until(lambda: "a" not in host.devices)
                await asyncio.sleep(0)  # the transport's last call
                there = gc.get_objects()
                assert [each for each in there if type(each) is Download] == []
                assert {
                    each for each in there if type(each) is ConnectionDriver
                } == host.connections
                assert (
                    len([each for each in there if type(each) is Served and each.size == 4 * LARGE])
                    == 1
                )
            finally:
                gc.enable()


@run_async
async def test_a_device_that_is_told_to_wait_and_does_not_report_again_is_ended(
    make_plan: PlanMaker,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetlearn_coordinator.conversation.conversation.UPLOAD_TIMEOUT", 2.0)
        async with fleet(make_plan(), uploads=1) as (_, join):
            a, b = await join("a"), await join("b")
            await granted(a)
            await b.send(report_of(await b.task(), update_of(3.0)))
            await b.send_update(await b.expect(Grant), update_of(3.0))
            await a.expect(Waiting)
            assert await a.closed() == 1006


# What PROTOCOL.md says of the corner cases


@run_async
async def test_a_held_update_of_another_task_than_the_lease_is_refused_and_the_task_given_again(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(round__goal=1)) as (_, join):
        a = await join("a")
        old = await a.do_round(update_of(1.0))
        task = await a.task()
        a.connection.transport.abort()
        a = await join("a", held=Held(old.task, old.round))
        assert (await a.task()).task == task.task
        await a.send(report_of(old, update_of(1.0)))
        refused = await a.expect(Refused)
        assert (refused.code, refused.task) == (Code.STALE_ROUND, old.task)
        assert isinstance(await a.upload(task, update_of(1.0)), Accepted)


@run_async
async def test_a_report_that_the_check_in_did_not_name_is_taken(make_plan: PlanMaker) -> None:
    """The device finished between its check-in and the task that is given again."""
    async with fleet(make_plan(round__goal=1)) as (_, join):
        a = await join("a")
        task = await a.task()
        a.connection.transport.abort()
        a = await join("a")
        assert (await a.task()).task == task.task
        assert isinstance(await a.upload(task, update_of(1.0)), Accepted)


@run_async
async def test_uploaded_after_a_gap_is_not_heard(make_plan: PlanMaker) -> None:
    """The device sent it before it knew of the gap; the new grant says where to go on."""
    async with fleet(make_plan(round__goal=1)) as (_, join):
        a = await join("a")
        task, grant = await granted(a)
        update = update_of(1.0)
        first, _, last = pack_chunks(grant.transfer, update.tobytes())
        for chunk in (first, last):
            await a.send(chunk)
        await a.send(Uploaded(task.task))
        assert (await a.expect(Refused)).code is Code.WRONG_OFFSET
        again = await a.expect(Grant)
        assert again.offset == CHUNK_BYTES
        await a.send_update(again, update)
        await a.expect(Accepted)


@run_async
async def test_a_wrong_size_ends_the_task_and_what_follows_is_not_wanted(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan()) as (_, join):
        a = await join("a")
        task = await a.task()
        wrong = report_of(task, update_of(1.0), size=4 * SIZE - 4)
        await a.send(wrong)
        assert (await a.expect(Refused)).code is Code.WRONG_LENGTH
        await a.send(wrong)  # as a device does that was refused so
        assert (await a.expect(Refused)).code is Code.NOT_WANTED


@run_async
async def test_a_second_wrong_checksum_ends_the_task(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a = await join("a")
        task = await a.task()
        for _ in range(2):
            assert (await a.upload(task, update_of(1.0), crc32=7)).code is Code.WRONG_HASH
        assert coordinator.engine.causes() == {"rejected: wrong-hash": 1}


@run_async
async def test_nothing_is_handled_after_the_refusal_that_closes(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1)) as (coordinator, join):
        a = await join("a")
        task = await a.task()
        for _ in range(MAX_REFUSALS + 1):
            await a.send("{}")
        await a.send(Failed(task.task, "diverged"))
        for _ in range(MAX_REFUSALS + 1):
            await a.expect(Refused)
        assert await a.closed() == 1008
        await until(lambda: not coordinator.host.connections)
        assert coordinator.engine.causes() == {}
