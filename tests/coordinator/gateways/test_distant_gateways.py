"""A run behind gateways on other machines: folders of their own, a NATS server, an object store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import closing
from functools import wraps
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model
from fleetlearn_coordinator.conversation.begun import BegunUpload
from fleetlearn_coordinator.gateways import lent_files, wire
from fleetlearn_coordinator.gateways.distant_gateway import distant_gateway_running, link_of
from fleetlearn_coordinator.gateways.wire_version import OLDEST, WIRE
from fleetlearn_coordinator.storage.arrived import arrived_key, first_number
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.object_blobs import ObjectBlobs
from fleetlearn_coordinator.storage.served_objects import ServedObjects
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.messages import Accepted, ComeBack, Grant, Held, Refused, Uploaded
from gateways import DistantPlace, distant_fleet, distant_place
from msgspec import structs
from peers import PlanMaker, report_of, update_of
from websockets.exceptions import InvalidStatus


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistantPlace]:
    with distant_place(tmp_path_factory.mktemp("gateways")) as found:
        yield found


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **named: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(60):
                await test(*args, **named)

        asyncio.run(within())

    return run


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@run_async
async def test_a_round_over_two_gateways(make_plan: PlanMaker, place: DistantPlace) -> None:
    """Its model is that of one process, bit for bit."""
    plan = make_plan(round__goal=2, round__over_selection=1, stop__rounds=2)
    async with distant_fleet(plan, place) as behind:
        a, b = await behind.join("a", 0), await behind.join("b", 1)
        for value in (1.0, 2.0):
            task = await a.task()
            model = await a.fetch(task.vectors[0].sha256)
            assert len(model) == task.vectors[0].size
            assert isinstance(await a.upload(task, update_of(value)), Accepted)
            assert isinstance(await b.upload(await b.task(), update_of(3 * value)), Accepted)
        assert (await a.expect(ComeBack)).reason == "finished"
        assert await behind.server.done == "2 rounds done"
    version, model = read_model(plan.data_dir)
    assert version == 2
    np.testing.assert_allclose(model, np.linspace(-1, 1, len(model), dtype=np.float32) + 6, 1e-6)


@run_async
async def test_the_engine_ends_while_devices_train_upload_and_wait(
    make_plan: PlanMaker, place: DistantPlace
) -> None:
    """Devices notice nothing but a pause, also where the next engine has another data directory:
    what was acknowledged is in the object store."""
    plan = make_plan(round__goal=3, round__over_selection=1, stop__rounds=1, round__deadline=60.0)
    async with distant_fleet(plan, place) as behind:
        a, b, c = [await behind.join(name, number % 2) for number, name in enumerate("abc")]
        tasks = [await each.task() for each in (a, b, c)]
        await b.send(report_of(tasks[1], update_of(2.0)))
        grant = await b.expect(Grant)
        first, *others = pack_chunks(grant.transfer, update_of(2.0).tobytes())
        await b.send(first)
        assert isinstance(await c.upload(tasks[2], update_of(3.0)), Accepted)
        await behind.end_engine()
        await a.send(report_of(tasks[0], update_of(1.0)))
        for chunk in others:
            await b.send(chunk)
        await b.send(Uploaded(tasks[1].task))
        d = await behind.join("d", 1, check_in=False)
        checking_in = asyncio.create_task(d.check_in())
        link = link_of(behind.gateways[1])
        await until(lambda: len(link._to_save) == 1)
        for file in (plan.data_dir / "uploads").iterdir():
            file.unlink()
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
    await until(lambda: not behind.objects("arrived"))


@run_async
async def test_what_was_asked_when_the_bus_was_lost_is_asked_again(
    make_plan: PlanMaker, place: DistantPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update was saved, and the answer got lost: it counts once, and the device hears so."""
    plan = make_plan(round__goal=2, stop__rounds=1, round__deadline=60.0)
    async with distant_fleet(plan, place) as behind:
        a, b = await behind.join("a", 0), await behind.join("b", 1)
        task, other = await a.task(), await b.task()
        (link,) = [
            each for each in behind.server.host.gateways.values() if "a" in behind.devices_of(each)
        ]
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
        await until(lambda: not behind.objects("arrived"))
    _, model = read_model(plan.data_dir)
    np.testing.assert_allclose(model, np.linspace(-1, 1, len(model), dtype=np.float32) + 2, 1e-6)


@run_async
async def test_an_upload_goes_on_where_its_beginning_is(
    make_plan: PlanMaker, place: DistantPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same gateway, also after its death; another one has nothing of it."""
    monkeypatch.setattr("fleetlearn_coordinator.conversation.uploads.CHECKPOINT_BYTES", 1)
    async with distant_fleet(make_plan(round__goal=1, round__deadline=60.0), place) as behind:
        update = update_of(1.0)
        a = await behind.join("a", 0)
        task = await a.task()
        await a.send(report_of(task, update))
        first, *_ = pack_chunks((await a.expect(Grant)).transfer, update.tobytes())
        await a.send(first)
        upload = behind.gateways[0].devices["a"].conversation.upload
        assert upload is not None
        await until(lambda: upload.offset > 0)
        begun = upload.offset
        a.connection.transport.abort()
        held = Held(task.task, task.round)
        await until(lambda: "a" not in behind.gateways[0].devices)
        elsewhere = await behind.join("a", 1, held=held)
        await elsewhere.send(report_of(task, update))
        assert (await elsewhere.expect(Grant)).offset == 0
        await behind.end_gateway(0)
        await behind.begin_gateway(0)
        await behind.gateways[0].link.is_set_up.wait()
        again = await behind.join("a", 0, held=held)
        await again.send(report_of(task, update))
        grant = await again.expect(Grant)
        assert grant.offset == begun
        await again.send_update(grant, update)
        await again.expect(Accepted)
        await until(lambda: behind.server.engine.version == 1)
        assert not list(behind.folder(0).glob("uploads/*.begun"))


@run_async
async def test_a_gateway_dies(make_plan: PlanMaker, place: DistantPlace) -> None:
    """Its devices are gone, and what it had acknowledged is not."""
    async with distant_fleet(make_plan(round__goal=3, round__grace=60.0), place) as behind:
        a, b, c = await behind.join("a", 0), await behind.join("b", 0), await behind.join("c", 1)
        tasks = [await each.task() for each in (a, b, c)]
        assert isinstance(await a.upload(tasks[0], update_of(1.0)), Accepted)
        await b.send(report_of(tasks[1], update_of(1.0)))
        await b.expect(Grant)
        await behind.end_gateway(0)
        await until(lambda: [*behind.server.host.devices] == ["c"])
        assert len(behind.server.engine.accepted) == 1
        held = Held(tasks[1].task, tasks[1].round)
        b = await behind.join("b", 1, held=held)
        assert isinstance(await b.upload(tasks[1], update_of(1.0)), Accepted)
        assert isinstance(await c.upload(tasks[2], update_of(1.0)), Accepted)
        await until(lambda: behind.server.engine.version == 1)
        await behind.begin_gateway(0)


@run_async
async def test_an_object_that_does_not_count_is_removed(
    make_plan: PlanMaker, place: DistantPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an update that is refused, by its gateway; of a gateway that died before it asked, by the
    engine, and never one that counts."""
    monkeypatch.setattr("fleetlearn_coordinator.gateways.engine_host.ORPHANS", 0.0)
    plan = make_plan(round__goal=3, round__deadline=60.0, round__grace=60.0)
    async with distant_fleet(plan, place) as behind:
        a, b, c = [await behind.join(name, number % 2) for number, name in enumerate("abc")]
        task, other, _ = [await each.task() for each in (a, b, c)]
        assert isinstance(await a.upload(task, update_of(3e38)), Refused)
        await until(lambda: not behind.objects("arrived"))
        link = link_of(behind.gateways[0])
        spool = behind.server.host.runs[""].spool
        alive = link._puts[77]
        dead = first_number(spool.generation - 1, 0) + 77
        link._objects.put(arrived_key(dead), b"of a gateway of an earlier engine")
        await until(lambda: not behind.objects("arrived"))
        link._objects.put(arrived_key(alive), b"of a gateway that will ask for it")
        assert isinstance(await b.upload(other, update_of(1e-6)), Accepted)
        await asyncio.sleep(2.5)
        assert behind.server.engine.version == 0
        assert len(behind.objects("arrived")) == 2
        await behind.end_gateway(0)
        await until(lambda: len(behind.objects("arrived")) == 1)
        assert arrived_key(alive) not in behind.objects("arrived")
        await behind.begin_gateway(0)


@run_async
async def test_a_gateway_comes_while_objects_are_looked_through(
    make_plan: PlanMaker, place: DistantPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine takes the run over: the store answers slowly, and a gateway that has said
    hello meanwhile has put an update that it has not asked for yet."""
    monkeypatch.setattr("fleetlearn_coordinator.gateways.engine_host.ORPHANS", 0.0)
    drop, begun, go_on, dropped = ObjectBlobs.drop_orphans, Event(), Event(), Event()

    def drop_slowly(self: ObjectBlobs, *live: Container[int]) -> None:
        is_first = not begun.is_set()
        begun.set()
        go_on.wait(20)
        drop(self, *live)
        if is_first:
            dropped.set()

    plan = make_plan(round__goal=3, round__deadline=60.0, round__grace=60.0)
    async with distant_fleet(plan, place) as behind:
        await behind.join("a", 0)
        await behind.end_gateway(0)
        monkeypatch.setattr(ObjectBlobs, "drop_orphans", drop_slowly)
        await until(begun.is_set)
        await behind.begin_gateway(0)
        link = link_of(behind.gateways[0])
        await until(lambda: link._puts)
        number = link._puts[77]
        link._objects.put(arrived_key(number), b"of a gateway that will ask for it")
        go_on.set()
        await until(dropped.is_set)
        assert arrived_key(number) in behind.objects("arrived")


@run_async
async def test_two_runs_of_one_gateways_data_directory(
    make_plan: PlanMaker, place: DistantPlace
) -> None:
    plan = make_plan()
    async with distant_fleet(plan, place, 1) as behind:
        settings = behind.place.gateway(plan, 0)
        with pytest.raises(FleetError, match="is in use by another gateway"):
            async with distant_gateway_running(settings):
                raise AssertionError


@run_async
async def test_two_gateways_of_one_name_are_told_apart(
    make_plan: PlanMaker,
    place: DistantPlace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They take the bus away from each other. People are told, and nothing is lost."""
    for module in ("nats_bus", "nats_gateway", "nats_listener"):
        monkeypatch.setattr(f"fleetlearn_coordinator.gateways.{module}.BEAT", 0.1)
    plan = make_plan(round__goal=1, round__deadline=60.0, round__grace=60.0)
    async with distant_fleet(plan, place, 1) as behind:
        a = await behind.join("a", 0)
        other, settings = behind.place.gateway(plan, 1), behind.place.gateway(plan, 0)
        assert settings.gateway is not None
        assert other.gateway is not None
        twin = structs.replace(other.gateway, name=settings.gateway.own_name)
        async with distant_gateway_running(structs.replace(other, gateway=twin)):
            await until(lambda: "two gateways have this name" in caplog.text)
            assert not behind.server.done.done()
        assert isinstance(await a.upload(await a.task(), update_of(1.0)), Accepted)
        await until(lambda: behind.server.engine.version == 1)


@run_async
async def test_contents_that_were_published_are_copied_once(
    make_plan: PlanMaker, place: DistantPlace
) -> None:
    """And those that are over are removed."""
    async with distant_fleet(make_plan(round__goal=1), place, 1) as behind:
        a = await behind.join("a", 0)
        task = await a.task()
        served = behind.folder(0) / "served"
        newest = {each.sha256 for each in task.vectors}
        assert {file.name for file in served.iterdir()} == newest
        assert isinstance(await a.upload(task, update_of(1.0)), Accepted)
        task = await a.task()
        assert {file.name for file in served.iterdir()} == {each.sha256 for each in task.vectors}
        bundle = await a.fetch(behind.server.run.bundle.sha256)
        assert bundle
        await behind.end_gateway(0)
        await behind.begin_gateway(0)
        await behind.gateways[0].link.is_set_up.wait()


@run_async
async def test_copies_that_a_loss_of_power_damaged_are_fetched_again(
    make_plan: PlanMaker, place: DistantPlace
) -> None:
    async with distant_fleet(make_plan(round__goal=1), place, 1) as behind:
        a = await behind.join("a", 0)
        vector = (await a.task()).vectors[0].sha256
        bundle = behind.server.run.bundle
        largest = max(bundle.manifest.files.values(), key=lambda entry: entry.size).sha256
        content = await a.fetch(largest)
        await behind.end_gateway(0)
        files = [file for file in behind.folder(0).glob("*/**/*") if file.is_file()]
        damaged = [file for file in files if file.parent.name != "uploads"]
        assert len(damaged) > len(bundle.manifest.files)
        for file in damaged:
            file.write_bytes(bytes(file.stat().st_size))
        await behind.begin_gateway(0)
        await behind.gateways[0].link.is_set_up.wait()
        b = await behind.join("b", 0)
        assert sha256(await b.fetch(vector)).hexdigest() == vector
        assert await b.fetch(largest) == content


@run_async
async def test_a_revocation_waits_for_no_content(
    make_plan: PlanMaker,
    place: DistantPlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway fetches a model, which takes long."""
    folder, fetching, go_on = tmp_path / "identities", Event(), Event()
    fetch = ServedObjects.fetch

    def fetch_slowly(self: ServedObjects, sha256: str, path: Path) -> None:
        fetching.set()
        go_on.wait(20)
        fetch(self, sha256, path)

    plan = make_plan(round__goal=1, round__deadline=60.0)
    async with distant_fleet(plan, place, 1, identities=str(folder)) as behind:
        with closing(Identities(folder)) as operator:
            peers = []
            for name in ("a", "b"):
                token = operator.make_token(1, time.time() + 100, (), time.time())
                headers = {
                    "Authorization": f"Bearer {name * 43}",
                    "Fleetlearn-Device": name,
                    "Fleetlearn-Enrolment": token,
                }
                peers.append(await behind.join(name, 0, headers=headers))
            a, b = peers
            task = await a.task()
            monkeypatch.setattr(ServedObjects, "fetch", fetch_slowly)
            await a.send(report_of(task, update_of(1.0)))
            await a.send_update(await a.expect(Grant), update_of(1.0))
            await until(fetching.is_set)
            operator.revoke("b", time.time())
            try:
                assert await b.closed() == 1008
            finally:
                go_on.set()


@run_async
async def test_who_may_connect_is_asked_of_the_engine(
    make_plan: PlanMaker, place: DistantPlace, tmp_path: Path
) -> None:
    """Enrolment by a token, a credential at another gateway, a revocation; nobody is let in while
    the engine process is away, and a secret is on no bus."""
    folder = tmp_path / "identities"
    plan = make_plan(round__goal=1, round__deadline=60.0)
    async with distant_fleet(plan, place, identities=str(folder)) as behind:
        with closing(Identities(folder)) as operator:
            token = operator.make_token(1, time.time() + 100, ("eu",), time.time())
            secret = "s" * 43
            said: list[bytes] = []
            for gateway in behind.gateways:
                send = gateway.link._bus.send
                gateway.link._bus.send = lambda batch, send=send: (said.append(batch), send(batch))
            headers = {"Authorization": f"Bearer {secret}", "Fleetlearn-Device": "a"}
            enrolling = {**headers, "Fleetlearn-Enrolment": token}
            a = await behind.join("a", 0, headers=enrolling)
            assert (await a.task()).task
            assert [*behind.server.host.devices] == ["a"]
            again = await behind.join("a", 1, headers=headers)
            assert (await again.task()).task
            with pytest.raises(InvalidStatus) as refused:
                await behind.join(
                    "b", 1, check_in=False, headers={"Authorization": "Bearer " + "x" * 43}
                )
            assert refused.value.response.status_code == 401
            assert said
            assert not any(word.encode() in batch for batch in said for word in (secret, token))
            operator.revoke("a", time.time())
            assert await again.closed() == 1008
            with pytest.raises(InvalidStatus) as refused:
                await behind.join("a", 0, check_in=False, headers=headers)
            assert refused.value.response.status_code == 401
        await behind.end_engine()
        with pytest.raises(InvalidStatus) as refused:
            await behind.join("a", 0, check_in=False, headers=headers)
        assert refused.value.response.status_code == 503
        await behind.begin_engine()


@run_async
async def test_a_gateway_for_other_machines_needs_identities_or_open(
    make_plan: PlanMaker, place: DistantPlace
) -> None:
    plan = make_plan()
    async with distant_fleet(plan, place, 1) as behind:
        key = {"host": "0.0.0.0", "insecure": True}
        async with distant_gateway_running(behind.place.gateway(plan, 7, **key)) as host:
            with pytest.raises(FleetError, match="the engine process has no identities"):
                await link_of(host).failure
        async with distant_gateway_running(behind.place.gateway(plan, 7, **key, open=True)) as host:
            await host.link.is_set_up.wait()


@run_async
async def test_the_nats_server_dies_in_the_middle_of_a_round(
    make_plan: PlanMaker, place: DistantPlace
) -> None:
    """An update whose saving was asked is asked again: it counts once. Others arrive meanwhile."""
    plan = make_plan(round__goal=3, stop__rounds=1, round__deadline=60.0)
    async with distant_fleet(plan, place) as behind:
        a, b, c = [await behind.join(name, number % 2) for number, name in enumerate("abc")]
        tasks = [await each.task() for each in (a, b, c)]
        await a.send(report_of(tasks[0], update_of(1.0)))
        grant = await a.expect(Grant)
        await b.send(report_of(tasks[1], update_of(2.0)))
        other = await b.expect(Grant)
        place.server.kill()
        await a.send_update(grant, update_of(1.0))
        await b.send_update(other, update_of(2.0))
        for gateway in behind.gateways:
            await gateway.link.over.wait()
        place.server.start()
        await a.expect(Accepted)
        await b.expect(Accepted)
        assert isinstance(await c.upload(tasks[2], update_of(3.0)), Accepted)
        await behind.server.done
    _, model = read_model(plan.data_dir)
    np.testing.assert_allclose(model, np.linspace(-1, 1, len(model), dtype=np.float32) + 2, 1e-6)


class HeardBus:
    """The bus of a gateway that says what it likes: the test speaks for it."""

    full = False

    def __init__(self) -> None:
        self.said: list[wire.ToGateway] = []
        self.closed = False

    def send(self, batch: bytes) -> None:
        self.said += wire.decode_for_gateway(batch)

    def close(self) -> None:
        self.closed = True


def stranger(host: Any, number: int, name: str, says: list[wire.ToEngine]) -> HeardBus:
    """Let a gateway in, as whom the bus knows it, and let it say this."""
    bus = HeardBus()
    link = host._let_in_distant(bus, number, name)
    link.received(wire.encode_batch(says))
    return bus


def hello(number: int, *, apart: bool = True) -> wire.GatewayHello:
    return wire.GatewayHello(
        number, 1, "x", "ws://h", (), (), (), (), WIRE, OLDEST, apart=apart
    )  # fmt: skip


@run_async
async def test_a_hostile_gateway_ends_no_run(
    make_plan: PlanMaker,
    place: DistantPlace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has a gateway's account is that gateway, and costs the run that gateway alone."""
    plan = make_plan(round__goal=2, round__over_selection=1, stop__rounds=1)
    async with distant_fleet(plan, place) as behind:
        a, b = await behind.join("a", 0), await behind.join("b", 1)
        host = behind.server.host
        here = {**host.gateways}
        other = "the bus knows it as gateway 2000, mallory"
        (run,) = host.runs.values()
        for says, why in (
            ([hello(1000)], other),
            ([hello(0, apart=False)], other),
            ([hello(2000, apart=False)], "on another machine"),
            ([hello(2000), wire.GatewayFailed("its disk is full")], "its disk is full"),
            ([hello(2000)], "gateways have connected"),
        ):
            if why == "gateways have connected":
                monkeypatch.setattr(lent_files, "HELLOS", run.files._hellos)
            bus = stranger(host, 2000, "mallory", says)
            assert bus.closed
            (refused,) = (each for each in bus.said if isinstance(each, wire.GatewayRefused))
            assert why in refused.text
            assert host.gateways == here, "the others stay"
        assert not behind.server.done.done()
        assert {each.name for each in host.gateways_now()} == {"gateway-0", "gateway-1"}
        for peer, value in ((a, 1.0), (b, 3.0)):
            assert isinstance(await peer.upload(await peer.task(), update_of(value)), Accepted)
        assert await behind.server.done == "1 rounds done"
    assert "gateway mallory was refused" in caplog.text


@run_async
async def test_a_gateway_that_says_what_is_not_in_the_store_ends_no_run(
    make_plan: PlanMaker, place: DistantPlace
) -> None:
    """An update counts once its bytes are there, of the size that was said, and each once: a run
    could not go on, nor begin again, without one that it had accepted."""
    plan = make_plan(round__goal=2, round__over_selection=1, stop__rounds=1)
    async with distant_fleet(plan, place) as behind:
        a, b = await behind.join("a", 0), await behind.join("b", 1)
        tasks = [await a.task(), await b.task()]
        host, engine = behind.server.host, behind.server.engine
        (run,) = host.runs.values()
        report, content = report_of(tasks[0], update_of(1.0)), update_of(1.0).tobytes()
        for put, why in (
            (None, "no such object"),
            (content[:-4], "no such object"),
            (content, "may not keep"),
        ):
            bus = stranger(host, 2000, "mallory", [hello(2000)])
            number = run.files._puts[2000].start
            if put is not None:
                run.spool.objects.objects.put(arrived_key(number), put)
            said: wire.ToEngine = wire.AskSave(1, "a", report, number, {"update": 1.0})
            if why == "may not keep":
                begun = BegunUpload("a", report.task, report.parts, number, 0, {}, {})
                said = wire.AskKeep(1, begun)
            host.gateways[2000].received(wire.encode_batch([said]))
            await until(lambda heard=bus: heard.closed)
            (refused,) = (each for each in bus.said if isinstance(each, wire.GatewayRefused))
            assert why in refused.text
            assert not engine.accepted
        # one object for two updates, or for one twice: its bytes go once
        bus = stranger(host, 2000, "mallory", [hello(2000)])
        number = run.files._puts[2000].start
        run.spool.objects.objects.put(arrived_key(number), content)
        asks = [
            wire.AskSave(question, device, report_of(task, update_of(1.0)), number, {"update": 1.0})
            for question, (device, task) in enumerate(zip("aab", [tasks[0], *tasks], strict=True))
        ]
        host.gateways[2000].received(wire.encode_batch(asks))
        await until(lambda: sum(hasattr(each, "question") for each in bus.said) == 3)
        assert len(engine.accepted) == 1
        assert isinstance(await b.upload(tasks[1], update_of(3.0)), Accepted)
        assert await behind.server.done == "1 rounds done"
    _, model = read_model(plan.data_dir)
    np.testing.assert_allclose(model, np.linspace(-1, 1, len(model), dtype=np.float32) + 2, 1e-6)
