"""A run behind gateways: what devices hear is what they hear from one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.gateways import run_behind
from fleetlearn_coordinator.gateways.gateway_link import GatewayLink
from fleetlearn_coordinator.gateways.gateway_messages import HANDLERS
from fleetlearn_coordinator.gateways.published_files import PublishedFiles
from fleetlearn_coordinator.gateways.wire import (
    AskAnnounce,
    AskSave,
    PublishContents,
    PublishOlder,
    encode_batch,
)
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.monitoring.catalogue import SPECS
from fleetlearn_coordinator.service.monitoring.gauges import host_gauges
from fleetlearn_coordinator.service.serve import running
from fleetlearn_coordinator.storage.file_storage import FileStorage
from fleetlearn_coordinator.storage.ledger import Row
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE, SqliteLedger
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.messages import (
    Accepted,
    CheckIn,
    ComeBack,
    Failed,
    Grant,
    Held,
    Refused,
    Uploaded,
)
from gateways import gateway_fleet
from peers import PlanMaker, report_of, update_of


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **named: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(60):
                await test(*args, **named)

        asyncio.run(within())

    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@run_async
async def test_a_round_over_two_gateways(make_plan: PlanMaker) -> None:
    """Its model is that of one process, bit for bit."""
    plan = make_plan(round__goal=2, round__over_selection=1, stop__rounds=2)
    async with gateway_fleet(plan) as behind:
        a, b = await behind.join("a", 0), await behind.join("b", 1)
        for value in (1.0, 2.0):
            task = await a.task()
            model = await a.fetch(task.vectors[0].sha256)
            assert len(model) == task.vectors[0].size
            assert isinstance(await a.upload(task, update_of(value)), Accepted)
            assert isinstance(await b.upload(await b.task(), update_of(3 * value)), Accepted)
        assert (await a.expect(ComeBack)).reason == "finished"
        assert await behind.server.done == "2 rounds done"
        c = await behind.join("c", 0, check_in=False)
        await c.send(CheckIn(1, "c", 10))
        assert (await c.expect(ComeBack)).reason == "finished"
        devices = {port.device for port in behind.gateways[0].link._ports.values()}
        assert devices == {"a"}, "nothing is kept of who was sent away"
    version, model = read_model(plan.data_dir)
    assert version == 2
    np.testing.assert_allclose(model, np.linspace(-1, 1, len(model), dtype=np.float32) + 6, 1e-6)


@run_async
async def test_the_engine_ends_while_devices_train_upload_and_wait(make_plan: PlanMaker) -> None:
    """Devices notice nothing but a pause."""
    plan = make_plan(round__goal=3, round__over_selection=1, stop__rounds=1, round__deadline=60.0)
    async with gateway_fleet(plan) as behind:
        a, b, c = [await behind.join(name, number % 2) for number, name in enumerate("abc")]
        tasks = [await each.task() for each in (a, b, c)]
        await b.send(report_of(tasks[1], update_of(2.0)))
        grant = await b.expect(Grant)
        first, *others = pack_chunks(grant.transfer, update_of(2.0).tobytes())
        await b.send(first)
        assert isinstance(await c.upload(tasks[2], update_of(3.0)), Accepted)
        await behind.end_engine()
        # a trained meanwhile and reports to nobody; b sends the rest; d waits for its welcome
        await a.send(report_of(tasks[0], update_of(1.0)))
        for chunk in others:
            await b.send(chunk)
        await b.send(Uploaded(tasks[1].task))
        d = await behind.join("d", 1, check_in=False)
        checking_in = asyncio.create_task(d.check_in())
        await behind.begin_engine()
        assert isinstance(await b.expect(Accepted), Accepted)
        await a.send_update(await a.expect(Grant), update_of(1.0))
        await a.expect(Accepted)
        await checking_in
        assert (await d.expect(ComeBack)).reason == "finished"
        await behind.server.done
    version, model = read_model(plan.data_dir)
    assert version == 1
    np.testing.assert_allclose(model, np.linspace(-1, 1, len(model), dtype=np.float32) + 2, 1e-6)


@run_async
async def test_what_was_asked_when_the_engine_died_is_asked_again(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update was saved, and the answer got lost: it counts once, and the device hears so."""
    plan = make_plan(round__goal=2, stop__rounds=1, round__deadline=60.0)
    async with gateway_fleet(plan) as behind:
        a, b = await behind.join("a", 0), await behind.join("b", 1)
        task, other = await a.task(), await b.task()
        host = behind.server.host
        link = host.gateways[0]
        await a.send(report_of(task, update_of(1.0)))
        grant = await a.expect(Grant)
        monkeypatch.setattr(link._bus, "send", lambda batch: None)  # what it says gets lost
        await a.send_update(grant, update_of(1.0))
        await until(lambda: len(behind.server.engine.accepted) == 1)
        link._bus.close()
        await a.expect(Accepted)
        assert len(behind.server.engine.accepted) == 1
        assert isinstance(await b.upload(other, update_of(3.0)), Accepted)
        await behind.server.done
    _, model = read_model(plan.data_dir)
    np.testing.assert_allclose(model, np.linspace(-1, 1, len(model), dtype=np.float32) + 2, 1e-6)


@run_async
async def test_a_device_connects_to_another_gateway(make_plan: PlanMaker) -> None:
    """The first connection is told so, and what still comes on it does nothing."""
    async with gateway_fleet(make_plan(round__goal=1)) as behind:
        a = await behind.join("a", 0)
        task = await a.task()
        again = await behind.join("a", 1)
        assert (await again.task()).task == task.task
        assert (await a.expect(Refused)).code == Code.REPLACED
        assert [*behind.server.host.devices] == ["a"]
        await until(lambda: not behind.gateways[0].devices)
        await a.closed()
        await asyncio.sleep(0)
        assert [*behind.server.host.devices] == ["a"], "the old connection's end is nobody's"
        assert isinstance(await again.upload(task, update_of(1.0)), Accepted)


@run_async
async def test_a_gateway_dies(make_plan: PlanMaker) -> None:
    """Its devices are gone, what it had acknowledged is not, and its spool files are free."""
    async with gateway_fleet(make_plan(round__goal=3, round__grace=60.0)) as behind:
        server = behind.server
        a, b, c = await behind.join("a", 0), await behind.join("b", 0), await behind.join("c", 1)
        tasks = [await each.task() for each in (a, b, c)]
        assert isinstance(await a.upload(tasks[0], update_of(1.0)), Accepted)
        await b.send(report_of(tasks[1], update_of(1.0)))
        await b.expect(Grant)
        blobs = server.run.store.blobs
        await behind.end_gateway(0)
        await until(lambda: [*server.host.devices] == ["c"])
        assert len(server.engine.accepted) == 1
        taken = len(blobs._spool) - len(blobs._free)
        assert taken == server.host._behind.each + 1, (
            "those of the other gateway, and the accepted update"
        )
        await behind.begin_gateway(0)
        held = Held(tasks[1].task, tasks[1].round)
        b = await behind.join("b", 1, held=held)
        assert isinstance(await b.upload(tasks[1], update_of(1.0)), Accepted)
        assert isinstance(await c.upload(tasks[2], update_of(1.0)), Accepted)
        await until(lambda: server.engine.version == 1)


@run_async
async def test_a_failed_task_is_told_to_the_next_engine(make_plan: PlanMaker) -> None:
    """Else it would wait for a device that has nothing to do."""
    async with gateway_fleet(make_plan(round__goal=1, round__deadline=60.0)) as behind:
        a = await behind.join("a", 0)
        task = await a.task()
        await behind.end_engine()
        await a.send(Failed(task.task, "out-of-memory"))
        await until(lambda: bool(behind.gateways[0].link._questions))
        await behind.begin_engine()
        assert (await a.task()).task != task.task


@run_async
async def test_who_waits_too_long_for_a_welcome_comes_back_later(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetlearn_coordinator.gateways.engine_link.ADMISSION_PATIENCE", 0.0)
    async with gateway_fleet(make_plan()) as behind:
        await behind.end_engine()
        a = await behind.join("a", 0, check_in=False)
        waiting = asyncio.create_task(a.check_in())
        with pytest.raises(AssertionError, match="busy"):
            await waiting
        assert await a.closed() == 1000
        await behind.begin_engine()
        assert not behind.server.host.devices


@run_async
async def test_an_upload_goes_on_at_another_gateway(make_plan: PlanMaker) -> None:
    """Its connection broke: the engine process keeps its spool file, and lends it to the other."""
    async with gateway_fleet(make_plan(round__goal=1, round__deadline=60.0)) as behind:
        update = update_of(1.0)
        a = await behind.join("a", 0)
        task = await a.task()
        await a.send(report_of(task, update))
        grant = await a.expect(Grant)
        first, *_ = pack_chunks(grant.transfer, update.tobytes())
        await a.send(first)
        upload = behind.gateways[0].devices["a"].conversation.upload
        assert upload is not None
        await until(lambda: upload.offset > 0)
        begun = upload.offset
        a.connection.transport.abort()
        await until(lambda: behind.server.run.begun.bytes_kept == begun)
        again = await behind.join("a", 1, held=Held(task.task, task.round))
        await again.send(report_of(task, update))
        grant = await again.expect(Grant)
        assert grant.offset == begun
        await again.send_update(grant, update)
        await again.expect(Accepted)
        await until(lambda: behind.server.engine.version == 1)
        assert not list(behind.plan.data_dir.glob("uploads/*.begun"))


@run_async
async def test_a_gateway_dies_in_the_middle_of_an_upload(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its last checkpoint knows goes on at another gateway."""
    monkeypatch.setattr("fleetlearn_coordinator.conversation.uploads.CHECKPOINT_BYTES", 1)
    async with gateway_fleet(make_plan(round__goal=1, round__deadline=60.0)) as behind:
        update = update_of(1.0)
        a = await behind.join("a", 0)
        task = await a.task()
        await a.send(report_of(task, update))
        first, *_ = pack_chunks((await a.expect(Grant)).transfer, update.tobytes())
        await a.send(first)
        await until(lambda: bool(list(behind.plan.data_dir.glob("uploads/*.begun"))))
        monkeypatch.setattr(behind.gateways[0].link, "say", lambda message: None)
        monkeypatch.setattr(behind.gateways[0].link, "ask", lambda make, port: Pending())
        await behind.end_gateway(0)
        await until(lambda: behind.server.run.begun.bytes_kept > 0)
        again = await behind.join("a", 1, held=Held(task.task, task.round))
        await again.send(report_of(task, update))
        grant = await again.expect(Grant)
        assert grant.offset > 0
        await again.send_update(grant, update)
        await again.expect(Accepted)


@run_async
async def test_an_upload_with_a_checkpoint_outlives_the_engine(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine took up the checkpoint, and gives the file back to who still writes it."""
    monkeypatch.setattr("fleetlearn_coordinator.conversation.uploads.CHECKPOINT_BYTES", 1)
    async with gateway_fleet(make_plan(round__goal=1, round__deadline=60.0)) as behind:
        update = update_of(1.0)
        a = await behind.join("a", 0)
        task = await a.task()
        await a.send(report_of(task, update))
        first, *others = pack_chunks((await a.expect(Grant)).transfer, update.tobytes())
        await a.send(first)
        await until(lambda: bool(list(behind.plan.data_dir.glob("uploads/*.begun"))))
        await behind.end_engine()
        await a.send(others[0])
        await behind.begin_engine()
        for chunk in others[1:]:
            await a.send(chunk)
        await a.send(Uploaded(task.task))
        await a.expect(Accepted)
        await until(lambda: behind.server.engine.version == 1)


class HeldLedger(SqliteLedger):
    """A slow ledger, whose batches wait for ``may_write``."""

    is_slow = True
    may_write = threading.Event()

    def write(self, rows: Sequence[Row]) -> None:
        self.may_write.wait(20)
        super().write(rows)


@run_async
async def test_nothing_is_promised_before_it_is_stored(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway hears of a task, and that an update was accepted, once the rows are safe."""

    def open_ledger(storage: FileStorage, *, power: bool, any_thread: bool) -> HeldLedger:
        return HeldLedger(storage.folder / DATABASE, power=power, any_thread=True)

    monkeypatch.setattr(FileStorage, "open_ledger", open_ledger)
    HeldLedger.may_write.set()
    async with gateway_fleet(make_plan(round__goal=2, round__deadline=60.0)) as behind:
        server, link = behind.server, behind.gateways[0].link
        a, b = await behind.join("a", 0), await behind.join("b", 0)
        task, _ = await a.task(), await b.task()
        await a.send(report_of(task, update_of(1.0)))
        grant = await a.expect(Grant)
        HeldLedger.may_write.clear()
        await a.send_update(grant, update_of(1.0))
        await until(lambda: len(server.engine.accepted) == 1)
        for _ in range(50):  # what was said would have come by now
            await asyncio.sleep(0)
        assert [type(each.message) for each in link._questions.values()] == [AskSave]
        HeldLedger.may_write.set()
        await a.expect(Accepted)
        await until(lambda: not link._questions)


@pytest.mark.parametrize("how", ["dropped", "given up"])
@run_async
async def test_nothing_is_promised_for_a_run_that_is_served_no_more(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Or that cannot store what it decided: also if that happens before the answer is on its
    way."""

    def open_ledger(storage: FileStorage, *, power: bool, any_thread: bool) -> HeldLedger:
        return HeldLedger(storage.folder / DATABASE, power=power, any_thread=True)

    save, ended = HANDLERS[AskSave], asyncio.Event()

    def save_and_end(link: GatewayLink, message: Any) -> None:
        save(link, message)
        server.gate.give_up() if how == "given up" else server.host.drop_run(server._served)
        server.host.ended = True  # as where the run failed
        ended.set()

    monkeypatch.setattr(FileStorage, "open_ledger", open_ledger)
    monkeypatch.setitem(HANDLERS, AskSave, save_and_end)
    HeldLedger.may_write.set()
    async with gateway_fleet(make_plan(round__goal=2, round__deadline=60.0)) as behind:
        server, link = behind.server, behind.gateways[0].link
        a, b = await behind.join("a", 0), await behind.join("b", 0)
        task, _ = await a.task(), await b.task()
        await a.send(report_of(task, update_of(1.0)))
        grant = await a.expect(Grant)
        HeldLedger.may_write.clear()
        await a.send_update(grant, update_of(1.0))
        await ended.wait()
        for _ in range(50):  # what was said would have come by now
            await asyncio.sleep(0.001)
        HeldLedger.may_write.set()
        assert [type(each.message) for each in link._questions.values()] == [AskSave]


@run_async
async def test_what_people_are_told_of_gateways(make_plan: PlanMaker) -> None:
    async with gateway_fleet(make_plan(round__goal=3, round__minimum=3)) as behind:
        a = await behind.join("a", 0)
        await behind.join("b", 1)
        host = behind.server.host
        await until(lambda: [each.connections for each in host.gateways_now()] == [1, 1])
        assert [each.number for each in host.gateways_now()] == [0, 1]
        assert [each.devices for each in host.gateways_now()] == [1, 1]
        assert host.connections_now().open == 2
        found = {
            (name, sample.labels): sample.value
            for name, sample in host_gauges(host)
            if name.startswith("fleetlearn_gateway")
        }
        assert found["fleetlearn_gateway_devices", ("0",)] == 1.0
        assert len(found) == 10
        assert {name for name, _ in found} <= SPECS.keys()
        assert [each["devices"] for each in behind.server.live()["gateways"]] == [1, 1]
        await a.connection.close()
        await until(lambda: host.gateways_now()[0].devices == 0)


@run_async
async def test_a_full_disk_of_a_gateway_ends_the_run(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_fleet(make_plan(round__goal=1)) as behind:
        a = await behind.join("a", 0)
        task = await a.task()
        await a.send(report_of(task, update_of(1.0)))
        grant = await a.expect(Grant)

        def fail(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(behind.gateways[0].link.runs[""].spool, "write_spool_file", fail)
        await a.send_update(grant, update_of(1.0))
        with pytest.raises(FleetError, match=r"gateway 0: .*no space left on device"):
            await behind.server.done


@run_async
async def test_a_late_gateway_serves_what_is_published_next(make_plan: PlanMaker) -> None:
    """The files that it hears of first are gone by then: that is no error."""
    async with gateway_fleet(make_plan(round__goal=1)) as behind:
        link = behind.gateways[0].link
        newest = behind.server.host.runs[""].published.newest
        link.received(encode_batch([PublishContents(("e" * 64,), ("f" * 64,))]))
        link.received(encode_batch([PublishOlder("d" * 64), PublishContents(newest, ())]))
        a = await behind.join("a", 0)
        task = await a.task()
        assert len(await a.fetch(task.vectors[0].sha256)) == task.vectors[0].size
        assert not behind.server.done.done()


@run_async
async def test_a_stop_is_heard_before_any_gateway_is_there(make_plan: PlanMaker) -> None:
    """Where gateways cannot start, the engine process waited for the first one until it was
    killed."""
    plan, service = make_plan(), ServiceSettings(gateways=1)
    async with running(plan, service, lambda: True) as server:
        await server.stop("stopped by SIGTERM")
    assert server.done.result() == "stopped by SIGTERM"


@run_async
async def test_an_engine_that_stands_still_is_noticed(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices stay and go on once it speaks; whoever connects meanwhile does not wait for it."""
    async with gateway_fleet(make_plan(round__goal=1, round__deadline=60.0)) as behind:
        a, link = await behind.join("a", 0), behind.gateways[0].link
        task = await a.task()
        with monkeypatch.context() as silence:
            silence.setattr("fleetlearn_coordinator.gateways.engine_link.ENGINE_SILENT", 0.05)
            silence.setattr(GatewayLink, "say_alive", lambda link: None)
            await until(link.is_away)
            b = await behind.join("b", 0, check_in=False)
            await b.send(CheckIn(1, "b", 10))
            assert (await b.expect(ComeBack)).reason == "busy"
        await until(lambda: not link.is_away())
        assert isinstance(await a.upload(task, update_of(1.0)), Accepted)
        assert link.is_set_up.is_set(), "the bus stayed"


@run_async
async def test_an_engine_that_turns_is_not_away(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It speaks once a second, also where nothing happens."""
    monkeypatch.setattr("fleetlearn_coordinator.gateways.engine_link.ENGINE_SILENT", 1.6)
    async with gateway_fleet(make_plan()) as behind:
        link = behind.gateways[0].link
        first = link._heard
        await until(lambda: link._heard - first > 2.0)
        assert link._away_since is None


@run_async
async def test_what_waits_for_the_engine_is_bounded(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the bound nothing is read from devices; all goes on once the engine is there."""
    monkeypatch.setattr("fleetlearn_coordinator.gateways.engine_link.MOST_WAITING", 4)
    async with gateway_fleet(
        make_plan(round__goal=2, round__over_selection=1, round__deadline=60.0)
    ) as behind:
        a, b, link = await behind.join("a", 0), await behind.join("b", 0), behind.gateways[0].link
        task, other = await a.task(), await b.task()
        await behind.end_engine()
        for number in range(20):
            await a.send(Failed(f"{task.task}{number}", "out-of-memory"))
        await until(lambda: link._holding)
        reached = len(link._questions)
        await b.send(report_of(other, update_of(1.0)))
        await asyncio.sleep(0.1)
        assert reached <= len(link._questions) <= 20, "and b is not heard"
        assert not any(isinstance(each.message, AskAnnounce) for each in link._questions.values())
        await behind.begin_engine()
        await b.send_update(await b.expect(Grant), update_of(1.0))
        await b.expect(Accepted)
        await until(lambda: not link._questions)
        assert not link._holding


@run_async
async def test_a_gateway_that_fails_while_the_engine_is_away_ends_the_run(
    make_plan: PlanMaker,
) -> None:
    async with gateway_fleet(make_plan(), 1) as behind:
        await behind.end_engine()
        behind.gateways[0].link.fail(OSError(28, "No space left on device"))
        await behind.begin_engine()
        with pytest.raises(FleetError, match=r"gateway 0: .*no space left on device"):
            await behind.server.done


@run_async
async def test_large_contents_are_written_beside_the_event_loop(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hears of them before they are there."""
    monkeypatch.setattr(run_behind, "LARGE", 1)
    plan = make_plan(round__goal=1, stop__rounds=2)
    writing, go_on = threading.Event(), threading.Event()
    write = PublishedFiles.write

    def slowly(files: PublishedFiles, *what: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if writing.is_set():
            assert go_on.wait(20)
        write(files, *what)

    monkeypatch.setattr(PublishedFiles, "write", slowly)
    async with gateway_fleet(plan) as behind:
        a = await behind.join("a", 0)
        task = await a.task()
        writing.set()
        await a.send(report_of(task, update_of(1.0)))
        await a.send_update(await a.expect(Grant), update_of(1.0))
        await until(lambda: behind.server.engine.version == 1)
        waiting = asyncio.create_task(a.receive())
        await asyncio.sleep(0.1)
        assert not waiting.done(), "the answer waits with what it promises"
        go_on.set()
        assert isinstance(await waiting, Accepted)
        task = await a.task()
        assert len(await a.fetch(task.vectors[0].sha256)) == task.vectors[0].size
        assert isinstance(await a.upload(task, update_of(1.0)), Accepted)
        await behind.server.done


@run_async
async def test_contents_that_cannot_be_written_end_the_run(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_fleet(make_plan(round__goal=1)) as behind:
        monkeypatch.setattr(run_behind, "LARGE", 1)

        def fail(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        a = await behind.join("a", 0)
        task = await a.task()
        monkeypatch.setattr(PublishedFiles, "write", fail)
        await a.send(report_of(task, update_of(1.0)))
        await a.send_update(await a.expect(Grant), update_of(1.0))
        with pytest.raises(OSError, match="No space left on device"):
            await behind.server.done
