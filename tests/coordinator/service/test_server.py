"""The server against a device that speaks the protocol by hand, over real sockets on 127.0.0.1."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.network.driver import ConnectionDriver
from fleetlearn_coordinator.network.transfers.downloads import Download
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol import Code
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk, pack_chunks, unpack_chunk
from fleetlearn_protocol.manifest import TRAIN, File
from fleetlearn_protocol.messages import (
    MAX_REFUSALS,
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Content,
    Failed,
    Fetch,
    Grant,
    Heartbeat,
    Held,
    Refused,
    StepSchedule,
    Task,
    Uploaded,
    Waiting,
    Welcome,
    encode,
)
from fleetlearn_protocol.vector import digest
from peers import SIZE, Peer, PlanMaker, fleet, report_of, update_of, write_buffered_bundle


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own; pytest sees a plain function with the same
    fixtures."""

    def run(make_plan: PlanMaker) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await test(make_plan)

        asyncio.run(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def fetch_until_blocked(
    coordinator: RunServer, peer: ConnectionDriver, device: Peer, entry: File
) -> int:
    """Have a device that does not read fetch until the coordinator waits for it; how often it
    fetched.

    The kernel takes some megabytes before that.
    """
    for asked in range(1, 200):
        before = coordinator.run.bytes_down
        await device.send(Fetch(entry.sha256))
        await until(
            lambda before=before: peer.blocked or coordinator.run.bytes_down >= before + entry.size
        )  # type: ignore[misc]
        if peer.blocked:
            return asked
    raise AssertionError("the kernel took everything")


def take_the_place(coordinator: RunServer) -> Download:
    """A download to nobody, which has the only place."""
    other = Download("nobody", "0" * 64, asyncio.WriteTransport())
    coordinator.host.downloads.places.held[other] = None
    return other


def end_download(coordinator: RunServer, download: Download) -> None:
    coordinator.host.downloads.leave(download)
    coordinator.host.downloads.go_on(coordinator.loop.time())


@run_async
async def test_a_round_makes_the_weighted_mean(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        before = coordinator.run.models.newest.model.copy()
        a, b = await join("a"), await join("b")
        task = await a.do_round(update_of(1.0), examples=10)
        await b.do_round(update_of(2.0), examples=30)
        assert (
            await a.fetch((await a.task()).vector("model").sha256)
            == coordinator.run.models.newest.model.tobytes()
        )
        assert task.round == 1
        np.testing.assert_array_equal(
            coordinator.run.models.newest.model, before + np.float32(1.75)
        )
    status = read_status(coordinator.run.plan.data_dir)
    assert status.version == 1
    assert not status.running
    (round_,) = status.rounds
    assert round_.summary["reports"] == 2
    assert round_.summary["evaluation"] == {"loss": 0.7, "accuracy": 0.5}
    assert round_.summary["change"] == pytest.approx(1.75 * SIZE**0.5)
    np.testing.assert_array_equal(
        read_model(coordinator.run.plan.data_dir)[1], coordinator.run.models.newest.model
    )


@run_async
async def test_everything_of_the_bundle_can_be_fetched_from_any_byte(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__minimum=2)) as (coordinator, join):
        a = await join("a")
        manifest = coordinator.run.bundle.manifest
        whole = await a.fetch(manifest.files[TRAIN].sha256)
        assert digest(whole) == manifest.files[TRAIN].sha256
        for offset in (1, CHUNK_BYTES, CHUNK_BYTES + 3, len(whole) - 1, len(whole)):
            assert await a.fetch(manifest.files[TRAIN].sha256, offset) == whole[offset:]
        assert digest(await a.fetch(coordinator.run.bundle.sha256)) == coordinator.run.bundle.sha256


@run_async
async def test_a_file_that_cannot_be_read_any_more_ends_its_download_alone(
    make_plan: PlanMaker,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetlearn_coordinator.network.transfers.contents.LARGE", 200_000)
        async with fleet(make_plan(round__minimum=2)) as (coordinator, join):
            a = await join("a")
            entry, folder = (
                coordinator.run.bundle.manifest.files[TRAIN],
                coordinator.run.bundle.path,
            )
            # opens it, as another device's fetch does
            coordinator._served.contents.find(entry.sha256, 0)
            whole = (folder / TRAIN).read_bytes()
            (folder / TRAIN).write_bytes(whole[:CHUNK_BYTES])
            await a.send(Fetch(entry.sha256))
            await a.expect(Content)
            refused = await a.expect(Refused)
            (folder / TRAIN).write_bytes(whole)
            assert (refused.code, refused.sha256) == (Code.UNKNOWN_CONTENT, entry.sha256)
            assert [len(chunk.payload) for chunk in a.chunks] == [CHUNK_BYTES]
            assert len(await a.fetch(coordinator.run.models.newest.digest)) == 4 * SIZE


@run_async
async def test_fetches_that_are_refused(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__minimum=2)) as (coordinator, join):  # no task comes between
        a = await join("a")
        await a.send(Fetch("0" * 64))
        refused = await a.expect(Refused)
        assert (refused.code, refused.sha256) == (Code.UNKNOWN_CONTENT, "0" * 64)
        await a.send(Fetch(coordinator.run.models.newest.digest, 4 * SIZE + 1))
        assert (await a.expect(Refused)).code is Code.WRONG_OFFSET
        manifest = coordinator.run.bundle.manifest
        await a.send(Fetch(manifest.files[TRAIN].sha256, manifest.files[TRAIN].size + 1))
        assert (await a.expect(Refused)).code is Code.WRONG_OFFSET


@run_async
async def test_a_later_fetch_replaces_an_earlier_one(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__minimum=2)) as (coordinator, join):
        a = await join("a", check_in=False)
        # so that the first cannot be sent before the second comes
        a.connection.transport.pause_reading()
        await a.send(CheckIn(1, "a", 10))
        await until(lambda: "a" in coordinator.host.devices)
        entry = coordinator.run.bundle.manifest.files[TRAIN]
        peer = coordinator.host.devices["a"]
        asked = await fetch_until_blocked(coordinator, peer, a, entry)
        stuck = peer.download
        await a.send(Fetch(coordinator.run.models.newest.digest))
        await until(lambda: peer.download is not stuck)
        a.connection.transport.resume_reading()
        await a.expect(Welcome)
        contents = [await a.expect(Content)]
        while contents[-1].sha256 == entry.sha256:
            contents.append(await a.expect(Content))
        # the last fetch of the file may have waited for the device to read
        assert len(contents) in (asked, asked + 1)
        assert {content.sha256 for content in contents[:-1]} == {entry.sha256}
        assert contents[-1].sha256 == coordinator.run.models.newest.digest
        assert sum(len(chunk.payload) for chunk in a.chunks) < asked * entry.size
        received = b""
        while len(received) < contents[-1].size:
            chunk = unpack_chunk(await a.connection.recv(decode=False))
            assert (chunk.transfer, chunk.offset) == (contents[-1].transfer, len(received))
            received += chunk.payload
        assert received == coordinator.run.models.newest.model.tobytes()
        await until(lambda: peer.download is None)
        await join("b")  # not before: a task would come between the contents
        await a.do_round(update_of(1.0))


BEFORE_CHECK_IN: list[tuple[str | bytes, Code]] = [
    ("not json", Code.BAD_MESSAGE),
    ("{}", Code.BAD_MESSAGE),
    ('{"type":"check-in","protocol":1,"device":"a/b","examples":1}', Code.BAD_MESSAGE),
    ('{"type":"check-in","protocol":1,"device":"a","examples":0}', Code.BAD_MESSAGE),
    ('{"type":"check-in","protocol":1,"device":"a"}', Code.BAD_MESSAGE),
    ('{"type":"check-in","protocol":"1","device":"a","examples":1}', Code.BAD_MESSAGE),
    ('{"type":"nonsense"}', Code.UNKNOWN_TYPE),
    (encode(Welcome("x", 1.0, 4)), Code.UNKNOWN_TYPE),
    (encode(Heartbeat()), Code.OUT_OF_TURN),
    (encode(Fetch("0" * 64)), Code.OUT_OF_TURN),
    (b"", Code.BAD_FRAME),
    (b"\x07" * 20, Code.BAD_FRAME),
    (b"\x01" + bytes(CHUNK_BYTES + 16), Code.TOO_LARGE),
    ('{"type":"check-in","pad":"' + "x" * 70_000 + '"}', Code.TOO_LARGE),
    (pack_chunk(1, 0, b"1234"), Code.OUT_OF_TURN),
]


@run_async
async def test_malformed_messages_are_refused_and_the_connection_lives(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan()) as (_, join):
        a = await join("a", check_in=False)
        for message, code in BEFORE_CHECK_IN:
            await a.send(message)
            refused = await a.expect(Refused)
            assert refused.code is code, (message[:60], refused)
            assert refused.text
        await a.check_in()
        await a.send(CheckIn(1, "a", 10))
        assert (await a.expect(Refused)).code is Code.DUPLICATE
        await a.do_round(update_of(1.0))


@run_async
async def test_too_many_refusals_close_the_connection(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (_, join):
        a = await join("a", check_in=False)
        for _ in range(MAX_REFUSALS + 1):
            await a.send("{}")
            await a.expect(Refused)
        assert await a.closed() == 1008


@run_async
async def test_a_device_that_loses_the_race_of_every_round_stays(make_plan: PlanMaker) -> None:
    """Its report was on its way when the round ended. It was closed at the 33rd, some with a task
    under way."""
    plan = make_plan(round__goal=1, round__minimum=1, round__over_selection=2.0, stop__rounds=1000)
    async with fleet(plan) as (_, join):
        quick, slow = await join("quick"), await join("slow")
        late = await slow.task()
        for _ in range(MAX_REFUSALS + 8):
            await quick.do_round(update_of(1.0))
            await slow.expect(Cancel)
            begun = await slow.task()
            await slow.send(report_of(late, update_of(2.0)))
            assert (await slow.expect(Refused)).code is Code.STALE_ROUND
            late = begun


@run_async
async def test_another_version_is_refused_and_closed(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (_, join):
        a = await join("a", check_in=False)
        await a.send(CheckIn(PROTOCOL_VERSION + 1, "a", 10))
        assert (await a.expect(Refused)).code is Code.BAD_VERSION
        assert await a.closed() == 1008


@run_async
async def test_a_device_of_version_1_trains_and_is_told_so(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1, stop__rounds=2)) as (_, join):
        a = await join("a", check_in=False)
        await a.send(CheckIn(1, "a", 10))
        welcome = await a.expect(Welcome)
        assert (welcome.protocol, welcome.ineligible) == (1, "")
        await a.do_round(update_of(1.0))


@run_async
async def test_a_model_with_buffers_is_for_devices_of_version_2(make_plan: PlanMaker) -> None:
    """The last release's devices decline such a task: they are told at once, and get none."""
    plan = make_plan(round__goal=1)
    bundle = write_buffered_bundle(plan.data_dir.parent / "buffered.bundle")
    plan = msgspec.structs.replace(plan, bundle=bundle)
    async with fleet(plan) as (coordinator, join):
        old, new = await join("old", check_in=False), await join("new", check_in=False)
        await old.send(CheckIn(1, "old", 10))
        welcome = await old.expect(Welcome)
        assert (welcome.protocol, welcome.ineligible) == (
            1,
            "this run's model has buffers, such as BatchNorm's statistics, which version 2 of the "
            "protocol carries; the device speaks version 1. Update its fleetlearn",
        )
        await new.send(CheckIn(1, "new", 10, newest_protocol=3))
        assert (await new.expect(Welcome)).protocol == 3
        assert "buffers" in (await new.task()).parts
        assert [*coordinator.engine.leases] == ["new"]


@run_async
async def test_a_device_that_cannot_work_is_given_no_task(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1)) as (coordinator, join):
        broken, well = await join("broken", check_in=False), await join("well", check_in=False)
        await broken.send(CheckIn(1, "broken", 1, error="onnxruntime is not installed"))
        welcome = await broken.expect(Welcome)
        assert welcome.ineligible == (
            "the device says that it cannot work: onnxruntime is not installed"
        )
        await well.send(CheckIn(1, "well", 10))
        await well.expect(Welcome)
        await well.task()
        assert [*coordinator.engine.leases] == ["well"]


@pytest.mark.parametrize("says", [{"error": "no memory"}, {"wants": "model"}])
def test_a_device_that_waited_for_a_task_and_takes_none_on_its_next_connection(
    make_plan: PlanMaker, says: dict[str, Any]
) -> None:
    @run_async
    async def check(make_plan: PlanMaker) -> None:
        async with fleet(make_plan(round__goal=2, round__minimum=2)) as (coordinator, join):
            await join("a")
            again = await join("a", check_in=False)
            await again.send(CheckIn(1, "a", 10, **says))
            assert (await again.expect(Welcome)).ineligible
            await join("b")
            await join("c")
            await until(lambda: len(coordinator.engine.leases) == 2)
            assert {*coordinator.engine.leases} == {"b", "c"}

    check(make_plan)


@run_async
async def test_a_second_connection_of_a_device_replaces_the_first(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        first = await join("a")
        task = await first.task()
        second = await join("a")
        assert (await first.expect(Refused)).code is Code.REPLACED
        assert await first.closed() == 1008
        assert (await second.task()).task == task.task
        assert isinstance(await second.upload(task, update_of(1.0)), Accepted)
        assert coordinator.engine.version == 1


@run_async
async def test_reports_that_are_refused_leave_the_round_unharmed(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a = await join("a")
        task = await a.task()
        update = update_of(1.0)
        for fields, code in [
            ({"task": "t9-9"}, Code.UNKNOWN_TASK),
            ({"task": "t0-1", "round": 0}, Code.STALE_ROUND),
        ]:
            await a.send(report_of(task, update, **fields))
            assert (await a.expect(Refused)).code is code, fields
        await a.send(Uploaded(task.task))
        assert (await a.expect(Refused)).code is Code.OUT_OF_TURN
        await a.send(pack_chunk(1, 0, b"1234"))
        assert (await a.expect(Refused)).code is Code.OUT_OF_TURN
        assert isinstance(await a.upload(task, update), Accepted)
        assert coordinator.engine.version == 1


@run_async
async def test_what_arrived_wrong_may_be_sent_once_more(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a, b = await join("a"), await join("b")
        task, other = await a.task(), await b.task()
        refused = await a.upload(task, update_of(1.0), crc32=7)
        assert (refused.code, refused.task) == (Code.WRONG_HASH, task.task)
        await a.send(report_of(task, update_of(1.0)))
        grant = await a.expect(Grant)
        assert grant.offset == 0
        await a.send_update(grant, update_of(1.0))
        await a.expect(Accepted)
        assert (await b.upload(other, update_of(1.0), crc32=7)).code is Code.WRONG_HASH
        await b.send(report_of(other, update_of(1.0)))
        grant = await b.expect(Grant)
        await b.send(pack_chunk(grant.transfer, 0, bytes(1000)))
        await b.send(Uploaded(other.task))
        assert (await b.expect(Refused)).code is Code.WRONG_LENGTH
        await until(lambda: coordinator.engine.version == 1)
    assert read_status(coordinator.run.plan.data_dir).rounds[0].summary["dropped"] == {
        "rejected: wrong-length": 1
    }


@run_async
async def test_an_update_of_another_length_ends_the_task(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a = await join("a")
        await a.send(report_of(await a.task(), update_of(1.0), size=4 * SIZE - 4))
        assert (await a.expect(Refused)).code is Code.WRONG_LENGTH
        assert coordinator.engine.causes() == {"rejected: wrong-length": 1}
        assert not coordinator.engine.leases


@run_async
async def test_a_report_of_more_work_than_the_task_asked_for_ends_the_task(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(local__epochs=2, round__goal=3)) as (coordinator, join):
        for device, otherwise in (("a", {"epochs": 2.5}), ("b", {"steps": 41})):
            peer = await join(device)
            await peer.send(report_of(await peer.task(), update_of(1.0), **otherwise))
            refused = await peer.expect(Refused)
            assert refused.code is Code.BAD_MESSAGE
            assert "on 10 examples came; the task asked for 2 epochs" in refused.text
        assert coordinator.engine.causes() == {"rejected: bad-message": 2}
        c = await join("c")
        assert isinstance(
            await c.upload(await c.task(), update_of(1.0), epochs=2.0, steps=40), Accepted
        )


@run_async
async def test_a_report_of_a_task_from_before_a_change_of_the_plan_counts(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(local__epochs=2, round__goal=1)) as (_, join):
        task = await (await join("a")).task()
    async with fleet(make_plan(local__epochs=1, round__goal=1)) as (_, join):
        a = await join("a", held=Held(task.task, task.round))
        assert isinstance(await a.upload(task, update_of(1.0), epochs=2.0), Accepted)


@run_async
async def test_a_report_of_parts_that_were_not_asked_for_ends_the_task(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        for device, otherwise, given in (
            ("a", {"name": "control"}, "control (float32)"),
            ("b", {"encoding": "int8"}, "update (int8)"),
        ):
            peer = await join(device)
            task = await peer.task()
            assert [(vector.name, vector.encoding) for vector in task.vectors] == [
                ("model", "float32")
            ]
            assert task.parts == {"update": "float32"}
            await peer.send(report_of(task, update_of(1.0), **otherwise))
            refused = await peer.expect(Refused)
            assert refused.code is Code.WRONG_PARTS
            assert (
                refused.text
                == f"a report of the parts {given} came; the task asked for update (float32)"
            )
        assert coordinator.engine.causes() == {"rejected: wrong-parts": 2}
        assert not coordinator.engine.leases


@run_async
async def test_a_malformed_message_does_not_concern_the_upload_in_progress(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan()) as (_, join):
        a = await join("a")
        task = await a.task()
        await a.send(report_of(task, update_of(1.0)))
        grant = await a.expect(Grant)
        await a.send("{}")
        assert (await a.expect(Refused)).task is None
        await a.send(Failed("t7-7", "diverged"))
        await a.send_update(grant, update_of(1.0))
        await a.expect(Accepted)


@run_async
async def test_a_device_may_return_when_all_places_are_taken(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(), max_connections=2) as (_, join):
        await join("a")
        await join("b")
        await join("a")


@run_async
async def test_a_chunk_at_the_wrong_place_is_refused_and_the_upload_goes_on(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a = await join("a")
        task, update = await a.task(), update_of(1.0)
        chunks = update.tobytes()
        await a.send(report_of(task, update))
        grant = await a.expect(Grant)
        await a.send(pack_chunk(grant.transfer, 0, chunks[:CHUNK_BYTES]))
        await a.send(pack_chunk(grant.transfer, 2 * CHUNK_BYTES, chunks[2 * CHUNK_BYTES :]))
        await a.send(pack_chunk(grant.transfer, CHUNK_BYTES, chunks[CHUNK_BYTES : 2 * CHUNK_BYTES]))
        assert (await a.expect(Refused)).code is Code.WRONG_OFFSET
        again = await a.expect(Grant)
        assert again.offset == CHUNK_BYTES
        assert again.transfer != grant.transfer
        await a.send_update(again, update)
        await a.expect(Accepted)
        assert coordinator.engine.version == 1


@run_async
async def test_an_update_that_is_not_finite_ends_the_task_and_not_the_round(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a, b = await join("a"), await join("b")
        bad = update_of(1.0)
        bad[SIZE - 1] = np.nan
        task = await a.task()
        await a.send(report_of(task, bad))
        grant = await a.expect(Grant)
        for chunk in pack_chunks(grant.transfer, bad.tobytes()):
            await a.send(chunk)
        assert (await a.expect(Refused)).code is Code.NOT_FINITE
        before = coordinator.run.models.newest.model.copy()
        await b.do_round(update_of(0.5))
        assert coordinator.engine.version == 1
        np.testing.assert_array_equal(coordinator.run.models.newest.model, before + np.float32(0.5))
        assert read_status(coordinator.run.plan.data_dir).rounds[0].summary["dropped"] == {
            "rejected: not-finite": 1
        }


@run_async
async def test_an_update_beyond_the_exact_sum_is_refused(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a, b = await join("a"), await join("b")
        refused = await a.upload(await a.task(), update_of(1e30))
        assert refused.code is Code.OUT_OF_RANGE
        await b.do_round(update_of(0.5))
        assert read_status(coordinator.run.plan.data_dir).rounds[0].summary["dropped"] == {
            "rejected: out-of-range": 1
        }


@run_async
async def test_said_twice_counts_once(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a, b = await join("a"), await join("b")
        task, update = await a.task(), update_of(1.0)
        await a.send(report_of(task, update))
        await a.send(report_of(task, update))
        grant = await a.expect(Grant)
        await a.send_update(grant, update)
        await a.send(Uploaded(task.task))
        await a.expect(Accepted)
        await a.expect(Accepted)
        await a.send(report_of(task, update))
        await a.expect(Accepted)
        assert len(coordinator.engine.accepted) == 1
        await b.do_round(update_of(3.0))
        summary = read_status(coordinator.run.plan.data_dir).rounds[0].summary
        assert summary["reports"] == 2


@run_async
async def test_a_broken_upload_resumes_where_it_was(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a = await join("a")
        task = await a.task()
        update = np.arange(SIZE, dtype=np.float32) / SIZE
        await a.send(report_of(task, update))
        grant = await a.expect(Grant)
        await a.send(pack_chunk(grant.transfer, 0, update.tobytes()[:CHUNK_BYTES]))
        await until(lambda: bool(coordinator.host.uploads.active[task.task].offset))
        a.connection.transport.abort()
        await until(lambda: not coordinator.host.devices)
        a = await join("a", held=Held(task.task, task.round))
        await a.send(report_of(task, update))
        grant = await a.expect(Grant)
        assert grant.offset == CHUNK_BYTES
        before = coordinator.run.models.newest.model.copy()
        await a.send_update(grant, update)
        await a.expect(Accepted)
        np.testing.assert_array_equal(coordinator.run.models.newest.model, before + update)


@run_async
async def test_a_device_that_trained_anew_uploads_anew(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a = await join("a")
        task = await a.task()
        await a.send(report_of(task, update_of(1.0)))
        grant = await a.expect(Grant)
        await a.send(pack_chunk(grant.transfer, 0, bytes(CHUNK_BYTES)))
        await until(lambda: bool(coordinator.host.uploads.active[task.task].offset))
        a.connection.transport.abort()
        a = await join("a")
        assert (await a.task()).task == task.task  # it came without its work
        await a.send(report_of(task, update_of(2.0)))
        assert (await a.expect(Grant)).offset == 0


@run_async
async def test_uploads_are_granted_a_few_at_a_time(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=4, round__minimum=4)
    async with fleet(plan, uploads=2) as (coordinator, join):
        peers = [await join(name) for name in "abcd"]
        tasks = [await peer.task() for peer in peers]
        for peer, task in zip(peers, tasks, strict=True):
            await peer.send(report_of(task, update_of(1.0)))
        await until(lambda: len(coordinator.host.uploads.waiting) == 2)
        assert len(coordinator.host.uploads.active) == 2
        granted = [
            peer
            for peer in peers
            if peer.name in {u.device for u in coordinator.host.uploads.active.values()}
        ]
        await granted[0].send_update(await granted[0].expect(Grant), update_of(1.0))
        await granted[0].expect(Accepted)
        await until(lambda: len(coordinator.host.uploads.waiting) == 1)
        granted[1].connection.transport.abort()  # a slot comes back this way too
        await until(lambda: len(coordinator.host.uploads.waiting) == 0)


@run_async
async def test_the_goal_cancels_the_others_and_a_late_report_is_refused(
    make_plan: PlanMaker,
) -> None:
    plan = make_plan(round__goal=1, round__over_selection=2)
    async with fleet(plan) as (_, join):
        a, b = await join("a"), await join("b")
        late = await b.task()
        await a.do_round(update_of(1.0))
        cancel = await b.expect(Cancel)
        assert (cancel.task, cancel.code) == (late.task, Code.ROUND_OVER)
        assert (await b.task()).round == 2
        await b.send(report_of(late, update_of(1.0)))
        assert (await b.expect(Refused)).code is Code.STALE_ROUND


@run_async
async def test_chunks_under_way_when_the_round_ends_are_ignored(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=1, round__over_selection=2)
    async with fleet(plan) as (coordinator, join):
        a, b = await join("a"), await join("b")
        late = await b.task()
        await b.send(report_of(late, update_of(1.0)))
        grant = await b.expect(Grant)
        await a.do_round(update_of(1.0))
        await b.send_update(grant, update_of(1.0))
        await b.expect(Cancel)
        task = await b.task()
        assert isinstance(await b.upload(task, update_of(1.0)), Accepted)
        assert coordinator.engine.version == 2


@run_async
async def test_a_failed_device_gives_its_slot_back(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__goal=1)) as (coordinator, join):
        a = await join("a")
        task = await a.task()
        await join("b")
        await a.send(Failed(task.task, "diverged", "loss is NaN at step 3"))
        await until(lambda: "b" in coordinator.engine.leases)
        assert coordinator.engine.causes() == {"failed: diverged": 1}


@run_async
async def test_a_device_that_failed_and_is_back_saves_the_round_of_a_small_fleet(
    make_plan: PlanMaker,
) -> None:
    """Two devices, of which a round needs both. Both sat connected until the deadline, and the
    update was lost."""
    async with fleet(make_plan(round__goal=2, round__minimum=2, stop__rounds=1)) as (
        coordinator,
        join,
    ):
        before = coordinator.run.models.newest.model.copy()
        one, other = await join("one"), await join("other")
        await one.do_round(update_of(1.0))
        task = await other.task()
        await other.send(Failed(task.task, "bad-data", "label 7 names no class"))
        other.connection.transport.abort()
        while coordinator.engine.leases:
            await asyncio.sleep(0.01)
        assert re.fullmatch(
            r"round 1 has 1 of 2 reports, and waits until another device, or one whose task failed "
            r"\(other\), connects, for \d+ s more at most",
            coordinator.live()["waits_for"],
        )
        again = await join("other")
        assert (await again.do_round(update_of(3.0))).task != task.task
        assert await coordinator.done == "1 rounds done"
        np.testing.assert_array_equal(coordinator.run.models.newest.model, before + np.float32(2.0))


@run_async
async def test_a_vanished_device_is_lost_after_its_grace(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__grace=0.05)) as (coordinator, join):
        a, b = await join("a"), await join("b")
        await a.task()
        a.connection.transport.abort()
        await until(lambda: coordinator.engine.causes() == {"lost": 1})
        await b.do_round(update_of(1.0))
        assert coordinator.engine.version == 1


@run_async
async def test_a_silent_device_is_ended(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(), heartbeat=0.02) as (coordinator, join):
        a = await join("a")
        await until(lambda: not coordinator.host.connections)
        assert await a.closed() == 1006
        b = await join("b", check_in=False)  # nor may a connection stay that never checks in
        assert await b.closed() == 1006


@run_async
async def test_a_device_is_not_silent_while_the_coordinator_stands_still(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(), heartbeat=0.2) as (coordinator, join):
        a = await join("a")
        seen = coordinator.host.devices["a"].conversation.seen
        coordinator.host.sweep(1.0)
        time.sleep(1.5)  # a slow disk, or a machine that was suspended
        coordinator.host.sweep(1.0)
        await a.send(Heartbeat())
        await until(lambda: coordinator.host.devices["a"].conversation.seen > seen + 1.5)


@run_async
async def test_a_device_that_stops_reading_is_ended(make_plan: PlanMaker) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetlearn_coordinator.network.driver.SEND_TIMEOUT", 0.1)
        async with fleet(make_plan()) as (coordinator, join):
            a = await join("a", check_in=False)
            a.connection.transport.pause_reading()
            await a.send(CheckIn(1, "a", 10))
            await until(lambda: "a" in coordinator.host.devices)
            entry = coordinator.run.bundle.manifest.files[TRAIN]
            await fetch_until_blocked(coordinator, coordinator.host.devices["a"], a, entry)
            await until(lambda: not coordinator.host.connections)


@run_async
async def test_a_granted_upload_that_stalls_is_ended(make_plan: PlanMaker) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetlearn_coordinator.conversation.conversation.UPLOAD_TIMEOUT", 0.1)
        async with fleet(make_plan()) as (_, join):
            a = await join("a")
            await a.send(report_of(await a.task(), update_of(1.0)))
            await a.expect(Grant)
            assert await a.closed() == 1006


@run_async
async def test_the_end_of_training_is_told_to_all(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(stop__rounds=1, round__goal=1)) as (coordinator, join):
        a = await join("a")
        task = await a.task()
        b = await join("b")
        assert isinstance(await a.upload(task, update_of(1.0)), Accepted)
        for peer in (a, b, await join("c", check_in=False)):
            if peer.name == "c":
                await peer.send(CheckIn(1, "c", 10))
            told = await peer.expect(ComeBack)
            assert told.reason == "finished"
            assert 60.0 <= told.after <= 63.0, "soon: the stop rules may be changed"
        assert await coordinator.done == "1 rounds done"
    assert read_status(coordinator.run.plan.data_dir).finished == "1 rounds done"


@run_async
async def test_stopping_sends_the_devices_away(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a = await join("a")
        await a.task()
        stopping = asyncio.create_task(coordinator.stop("stopped by a test"))
        assert (await a.expect(ComeBack)).reason == "stopping"
        await a.connection.close()
        await stopping
        assert coordinator.done.result() == "stopped by a test"


@run_async
async def test_no_more_connections_than_the_plan_allows(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(), max_connections=2) as (_, join):
        await join("a")
        await join("b")
        c = await join("c", check_in=False)
        await c.send(CheckIn(1, "c", 10))
        assert (await c.expect(ComeBack)).reason == "busy"
        assert await c.closed() == 1000


@run_async
async def test_a_new_process_goes_on_with_the_round(make_plan: PlanMaker) -> None:
    """Two of three reports before, the third after: the model is the undisturbed run's, bit for
    bit."""
    plan = make_plan(round__goal=3, round__minimum=3)
    updates = [
        np.random.default_rng(seed).normal(size=SIZE).astype(np.float32) for seed in range(3)
    ]
    async with fleet(plan) as (coordinator, join):
        peers = [await join(name) for name in "abc"]
        tasks = [await peer.task() for peer in peers]
        for peer, task, update in list(zip(peers, tasks, updates, strict=True))[:2]:
            assert isinstance(await peer.upload(task, update, examples=7), Accepted)
        expected = coordinator.run.models.newest.model.copy()
    async with fleet(plan) as (coordinator, join):
        assert coordinator.engine.phase is Phase.OPEN
        assert len(coordinator.run.reports.round) == 2
        a = await join("a", held=Held(tasks[0].task, 1))
        await a.send(report_of(tasks[0], updates[0], examples=7))
        await a.expect(Accepted)  # it counted before, and is told so again
        c = await join("c")
        assert (await c.task()).task == tasks[2].task
        assert isinstance(await c.upload(tasks[2], updates[2], examples=7), Accepted)
        mean = sum(update.astype(np.float64) for update in updates) / 3
        np.testing.assert_allclose(coordinator.run.models.newest.model, expected + mean, atol=1e-6)
        assert coordinator.engine.version == 1


def test_many_updates_fold_into_a_written_sum(make_plan: PlanMaker, tmp_path: Path) -> None:
    """More updates than slots, a restart in between: as exact as without."""
    count = 80
    plan = make_plan(round__goal=count, round__minimum=count)
    updates = [
        np.random.default_rng(seed).normal(size=SIZE).astype(np.float32) for seed in range(count)
    ]

    async def part(first: int, last: int, known: dict[int, Task]) -> RunServer:
        async with fleet(plan) as (coordinator, join):
            peers: dict[int, Peer] = {}
            for number in range(0 if not known else first, count if not known else last):
                peers[number] = await join(f"d{number:02d}")
            for number, peer in peers.items():
                known[number] = await peer.task()
            for number in range(first, last):
                assert isinstance(
                    await peers[number].upload(
                        known[number], updates[number], examples=number + 1, steps=1
                    ),
                    Accepted,
                )
            return coordinator  # type: ignore[no-any-return]

    known: dict[int, Task] = {}
    asyncio.run(part(0, 70, known))
    assert len(list((plan.data_dir / "uploads").iterdir())) <= 32 + 16
    coordinator = asyncio.run(part(70, count, known))
    weights = np.arange(1, count + 1)
    expected = sum(
        weight * update.astype(np.float64) for weight, update in zip(weights, updates, strict=True)
    )
    initial = coordinator.run.bundle.parameters()
    np.testing.assert_array_equal(
        coordinator.run.models.newest.model, (initial + expected / weights.sum()).astype(np.float32)
    )


@run_async
async def test_a_device_that_returns_to_train_again_leaves_its_place_to_the_next(
    make_plan: PlanMaker,
) -> None:
    async with fleet(make_plan(), uploads=1) as (_, join):
        a, b = await join("a"), await join("b")
        await a.send(report_of(await a.task(), update_of(1.0)))
        await a.expect(Grant)
        task = await b.task()
        await b.send(report_of(task, update_of(2.0)))
        await (await join("a")).task()  # without its update: it trains again
        await b.send_update(await b.expect(Grant), update_of(2.0))
        await b.expect(Accepted)


@run_async
async def test_an_upload_ends_with_its_task(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(), uploads=1) as (coordinator, join):
        a, b = await join("a"), await join("b")
        task = await a.task()
        await a.send(report_of(task, update_of(1.0)))
        await a.expect(Grant)
        await b.send(report_of(await b.task(), update_of(2.0)))
        await a.send(report_of(task, update_of(1.0), size=4))
        assert (await a.expect(Refused)).code is Code.WRONG_LENGTH
        await b.expect(Grant)
        assert [upload.device for upload in coordinator.host.uploads.active.values()] == ["b"]


@run_async
async def test_an_error_at_the_end_of_a_connection_ends_the_process_too(
    make_plan: PlanMaker,
) -> None:
    plan = make_plan()
    # so that the second slot cannot be made
    (plan.data_dir / "uploads" / "slot-0001").mkdir(parents=True)
    async with fleet(plan, uploads=1) as (coordinator, join):
        a, b = await join("a"), await join("b")
        await a.send(report_of(await a.task(), update_of(1.0)))
        grant = await a.expect(Grant)
        await b.send(report_of(await b.task(), update_of(2.0)))
        await a.send(pack_chunk(grant.transfer, 0, bytes(CHUNK_BYTES)))
        await until(
            lambda: coordinator.run.bytes_up > 0 and len(coordinator.host.uploads.waiting) == 1
        )
        a.connection.transport.abort()
        with pytest.raises(IsADirectoryError, match="slot-0001"):
            async with asyncio.timeout(5):
                await coordinator.done


@run_async
async def test_a_full_disk_ends_the_process_and_nothing_is_done_after(make_plan: PlanMaker) -> None:
    plan = make_plan()
    (plan.data_dir / "uploads").mkdir(parents=True)
    (plan.data_dir / "uploads" / "slot-0000").symlink_to("/dev/full")
    async with fleet(plan) as (coordinator, join):
        a, b = await join("a"), await join("b")
        await a.send(report_of(await a.task(), update_of(1.0)))
        grant = await a.expect(Grant)
        await b.send(report_of(await b.task(), update_of(2.0)))
        other = await b.expect(Grant)
        await a.send(pack_chunk(grant.transfer, 0, bytes(CHUNK_BYTES)))
        with pytest.raises(OSError, match="No space left"):
            await coordinator.done
        for chunk in pack_chunks(other.transfer, update_of(2.0).tobytes()):
            await b.send(chunk)
        await b.closed()
        assert coordinator.run.reports.round.accepted == []
    async with fleet(make_plan()) as (coordinator, join):  # with room again
        assert coordinator.engine.phase is Phase.OPEN
        assert len(coordinator.engine.leases) == 2


@run_async
async def test_a_device_that_takes_chunks_in_is_not_silent(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(), downloads=1) as (coordinator, join):
        a = await join("a")
        driver = coordinator.host.devices["a"]
        other = take_the_place(coordinator)
        await a.send(Fetch(coordinator.run.models.newest.digest))
        await a.expect(Waiting)
        asked = driver.conversation.seen
        end_download(coordinator, other)
        await a.expect(Content)
        await until(lambda: driver.download is None)
        assert driver.conversation.seen > asked


@run_async
async def test_what_a_connection_ended_is_remembered_within_bounds(make_plan: PlanMaker) -> None:
    async with fleet(make_plan()) as (coordinator, join):
        a = await join("a")
        task = await a.task()
        for number in range(3 * MAX_REFUSALS):
            await a.send(report_of(task, update_of(1.0), crc32=number))
            await a.expect(Grant)
        assert len(coordinator.host.devices["a"].conversation._transfers) <= MAX_REFUSALS


@run_async
async def test_no_alarm_goes_off_after_the_end(make_plan: PlanMaker) -> None:
    async with fleet(make_plan(round__deadline=0.3)) as (coordinator, join):
        await (await join("a")).task()
    await until(lambda: coordinator._alarm is None)
    assert not coordinator.done.done()


@run_async
async def test_a_learning_rate_by_step_is_for_devices_of_version_3(make_plan: PlanMaker) -> None:
    """An older device would not see the schedule, and train with one rate."""
    schedule = {"kind": "cosine", "warm_up": 2, "start": 0.5}
    plan = make_plan(round__goal=1, local__step_schedule=schedule)
    async with fleet(plan) as (coordinator, join):
        old, new = await join("old", check_in=False), await join("new", check_in=False)
        await old.send(CheckIn(1, "old", 10, newest_protocol=2))
        welcome = await old.expect(Welcome)
        assert (welcome.protocol, welcome.ineligible) == (
            2,
            "this run's learning rate changes from step to step ([local.step_schedule]), which "
            "devices know from version 3 of the protocol on; the device speaks version 2. Update "
            "its fleetlearn",
        )
        await new.send(CheckIn(1, "new", 10, newest_protocol=3))
        assert (await new.expect(Welcome)).ineligible == ""
        assert (await new.task()).schedule == StepSchedule("cosine", 2, 0.5)
        assert [*coordinator.engine.leases] == ["new"]
