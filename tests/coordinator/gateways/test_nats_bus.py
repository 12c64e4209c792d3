"""A bus over a NATS server, which dies, stands still and refuses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.gateways import nats_bus, nats_line
from fleetlearn_coordinator.gateways.nats_bus import NatsBus
from fleetlearn_coordinator.gateways.nats_gateway import NatsGateway
from fleetlearn_coordinator.gateways.nats_line import BusError, open_line
from fleetlearn_coordinator.gateways.nats_listener import NatsListener
from fleetlearn_coordinator.gateways.nats_place import NatsPlace, check_place
from fleetlearn_coordinator.gateways.nats_subjects import subjects_of
from fleetlearn_coordinator.gateways.numbered_frames import WINDOW
from fleetlearn_coordinator.plan.bus_settings import NatsSettings
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.checks import check_bus
from fleetlearn_coordinator.service.private_ca import CA, CERTIFICATE, KEY, make_certificate
from nats_accounts import accounts
from nats_server import NatsServer, nats_server
from postgres_server import free_port

FIRST = 1000


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with nats_server() as one:
        yield one


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nats_bus", "nats_gateway", "nats_listener"):
        monkeypatch.setattr(f"fleetlearn_coordinator.gateways.{module}.BEAT", 0.05)


class Side:
    """Whoever speaks on one end, of one bus after another."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.why: list[str] = []
        self.buses: list[Any] = []
        self.numbers: list[int] = []
        self.was_writable = 0
        self.over = asyncio.Event()

    @property
    def bus(self) -> Any:
        return self.buses[-1]

    def speak_on(self, bus: Any) -> Side:
        self.buses.append(bus)
        self.over.clear()
        return self

    def received(self, batch: bytes) -> None:
        self.heard.append(batch)

    def lost(self, why: str) -> None:
        self.why.append(why)
        assert len(self.why) <= len(self.buses), "once for each bus"
        self.over.set()

    def writable(self) -> None:
        self.was_writable += 1


class Pair:
    """An engine and a gateway."""

    def __init__(self, server: NatsServer, run: str = "digits.v2") -> None:
        self.place = NatsPlace(server.url(), NatsSettings(), subjects_of("fleetlearn", run))
        self.engine, self.gateway = Side(), Side()
        self.is_lost = False
        self.listener = self.listens(self.engine, 5)
        self._gateway = NatsGateway(self.place, "berlin", self.gateway, self.gateway.numbers.append)

    def listens(self, engine: Side, epoch: int) -> NatsListener:
        return NatsListener(
            self.place,
            epoch,
            lambda bus, number, name: engine.speak_on(bus),
            first=FIRST,
            may_speak=lambda: not self.is_lost,
        )

    async def begin(self) -> None:
        await self.listener.listen()
        self._gateway.begin()
        await self.speak()

    async def speak(self) -> None:
        """Wait for the next bus, and say something."""
        lost, heard = len(self.gateway.why), self.engine.heard.count(b"hello")
        await until(lambda: len(self.gateway.buses) > lost)
        self.gateway.bus.send(b"hello")
        await until(lambda: self.engine.heard.count(b"hello") > heard)

    async def end(self) -> None:
        await self._gateway.close()
        await self.listener.close()


@asynccontextmanager
async def pair(server: NatsServer) -> AsyncIterator[Pair]:
    both = Pair(server)
    try:
        await both.begin()
        yield both
    finally:
        await both.end()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.002)


def test_batches_come_whole_and_in_order(server: NatsServer) -> None:
    async def test() -> None:
        async with pair(server) as both:
            batches = [bytes([number % 256]) * (number**3) for number in range(0, 150, 7)]
            assert len(batches[-1]) > 3 * 2**20
            for batch in batches:
                both.gateway.bus.send(batch)
                both.engine.bus.send(batch[:1000])
            await until(lambda: len(both.engine.heard) == len(batches) + 1)
            await until(lambda: len(both.gateway.heard) == len(batches))
            assert both.engine.heard == [b"hello", *batches]
            assert both.gateway.heard == [batch[:1000] for batch in batches]
            assert both.gateway.numbers == [FIRST]
            both.gateway.bus.send(b"last")
            both.gateway.bus.close()
            both.gateway.bus.send(b"nobody hears this")
            await until(lambda: both.engine.why and both.gateway.why)
            assert both.engine.heard[-1] == b"last"
            assert both.engine.why == ["the other process ended, or closed the connection"]
            await both.speak()  # it connects again
            assert both.gateway.numbers == [FIRST, FIRST]

    asyncio.run(test())


def test_who_is_not_read_is_full_and_then_writable(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with pair(server) as both:
            took = NatsBus.took
            kept: list[tuple[NatsBus, bytes]] = []
            monkeypatch.setattr(NatsBus, "took", lambda bus, frame: kept.append((bus, frame)))
            both.gateway.bus.send(bytes(2 * WINDOW))
            assert both.gateway.bus.full
            await until(lambda: sum(len(frame) for _, frame in kept) >= WINDOW)
            assert both.gateway.was_writable == 0
            monkeypatch.setattr(NatsBus, "took", took)
            for bus, frame in kept:
                bus.took(frame)
            await until(lambda: both.gateway.was_writable)
            assert not both.gateway.bus.full
            await until(lambda: bytes(2 * WINDOW) in both.engine.heard)
            monkeypatch.setattr(nats_bus, "MOST_UNSENT", 100)
            both.gateway.bus.send(bytes(2 * WINDOW))
            await until(lambda: both.gateway.why == ["the other process takes nothing in"])
            await both.speak()

    asyncio.run(test())


def test_a_message_that_is_lost_ends_the_bus_on_both_sides(server: NatsServer) -> None:
    async def test() -> None:
        async with pair(server) as both:
            publish = both.gateway.bus._publish
            both.gateway.bus._publish = lambda frame: None  # lost on the way
            both.gateway.bus.send(b"lost")
            both.gateway.bus._publish = publish
            await until(lambda: both.engine.why and both.gateway.why)
            assert "messages were lost on the way" in both.engine.why[0]
            await both.speak()
            assert b"lost" not in both.engine.heard

    asyncio.run(test())


def test_the_server_dies(server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with pair(server) as both:
            server.kill()
            await until(lambda: both.engine.why and both.gateway.why)
            both.gateway.bus.send(b"nobody hears this")
            server.start()
            await both.speak()
            assert both.engine.heard == [b"hello", b"hello"]

    caplog.set_level(logging.WARNING)
    asyncio.run(test())
    assert "the connection to the NATS server broke" in caplog.text


def test_the_server_stands_still(server: NatsServer) -> None:
    async def test() -> None:
        async with pair(server) as both:
            server.pause()
            try:
                await until(lambda: both.engine.why and both.gateway.why)
            finally:
                server.go_on()
            assert both.engine.why == ["the other process is silent"]
            await both.speak()

    asyncio.run(test())


def test_who_stands_still_itself_loses_nothing(server: NatsServer) -> None:
    import time

    async def test() -> None:
        async with pair(server) as both:
            time.sleep(0.05 * 2 * nats_bus.SILENCE)
            both.gateway.bus.send(b"still here")
            await until(lambda: both.engine.heard[-1] == b"still here")
            assert not both.engine.why + both.gateway.why

    asyncio.run(test())


def test_an_engine_that_takes_the_run_over_is_heard_at_once(server: NatsServer) -> None:
    """The earlier one is not listened to any more, whatever it says."""

    async def test() -> None:
        async with pair(server) as both:
            newer = Side()
            takes_over = both.listens(newer, 6)
            await takes_over.listen()
            await until(lambda: len(both.gateway.buses) == 2)
            assert both.gateway.why == ["another engine process has the run"]
            both.gateway.bus.send(b"to the newer one")
            await until(lambda: newer.heard == [b"to the newer one"])
            both.engine.bus.send(b"of the one that has lost it")
            newer.bus.send(b"of the newer one")
            await until(lambda: both.gateway.heard)
            assert both.gateway.heard == [b"of the newer one"]
            # the earlier one answers too, and the newer one stands still
            both.is_lost = False
            await takes_over.close()
            await until(lambda: len(both.gateway.why) == 2)
            await asyncio.sleep(0.5)
            assert len(both.gateway.buses) == 2
            # an engine that knows that it has lost the run does not answer
            both.is_lost = True
            third = both.listens(Side(), 7)
            await third.listen()
            await asyncio.sleep(0.3)
            assert len(both.gateway.buses) == 2
            both.is_lost = False
            await until(lambda: len(both.gateway.buses) == 3)
            await third.close()

    asyncio.run(test())


def test_a_gateway_that_no_engine_process_answers_says_so_once(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with caplog.at_level(logging.INFO):
            both = Pair(server)
            both._gateway.begin()
            words = "no engine process answers at fleetlearn.digits~v2.hello.berlin"
            await until(lambda: words in caplog.text)
            await asyncio.sleep(1.0)  # 20 beats more, in which no second line comes
            assert caplog.text.count(words) == 1
            await both.listener.listen()
            await both.speak()
            assert f"this is gateway {FIRST}" in caplog.text
            await both.end()

    asyncio.run(test())


USERS = """
authorization {{
  users = [
    {{ user: engine, password: "e-secret", permissions: {{
        publish: ["fleetlearn.digits~v2.engine", "fleetlearn.digits~v2.welcome.*",
                  "fleetlearn.digits~v2.down.>"],
        subscribe: ["fleetlearn.digits~v2.hello.*", "fleetlearn.digits~v2.up.>"] }} }}
    {{ user: berlin, password: "b-secret", permissions: {{
        publish: ["fleetlearn.digits~v2.hello.{name}", "fleetlearn.digits~v2.up.{name}.>"],
        subscribe: ["fleetlearn.digits~v2.engine", "fleetlearn.digits~v2.welcome.{name}",
                    "fleetlearn.digits~v2.down.{name}.>"] }} }}
  ]
}}
"""


def user(folder: Path, name: str, password: str) -> NatsSettings:
    file = folder / f"{name}.password"
    file.write_text(f"{password}\n")
    return NatsSettings(user=name, password_file=file)


def test_each_user_needs_its_own_subjects_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(name: str) -> None:
        with nats_server(USERS.format(name=name)) as server:
            both = Pair(server)
            engine = both.place._replace(settings=user(tmp_path, "engine", "e-secret"))
            gateway = both.place._replace(settings=user(tmp_path, "berlin", "b-secret"))
            both.listener._place, both._gateway._place = engine, gateway
            if name == "berlin":
                await both.begin()
            else:
                both._gateway.begin()
                await both.listener.listen()
                await until(lambda: "does not allow what is needed" in caplog.text)
                await asyncio.sleep(0.5)  # in which it is tried again, without another line
                assert caplog.text.count("does not allow what is needed") == 1
                assert not both.gateway.buses
            await both.end()

    asyncio.run(test("berlin"))
    assert "secret" not in caplog.text
    asyncio.run(test("paris"))
    assert "fleetlearn.digits~v2." in caplog.text
    assert "secret" not in caplog.text


def test_what_is_wrong_is_said_without_what_is_secret(tmp_path: Path) -> None:
    async def error_of(place: NatsPlace) -> str:
        with pytest.raises(BusError) as caught:
            await check_place(place, "test")
        assert "secret" not in caught.value.text
        return caught.value.text

    async def test() -> None:
        with nats_server(USERS.format(name="berlin")) as server:
            subjects = subjects_of("fleetlearn", "digits")
            wrong = NatsPlace(server.url(), user(tmp_path, "engine", "a wrong secret"), subjects)
            assert "refuses the credentials of [nats]" in await error_of(wrong)
            nobody = wrong._replace(settings=NatsSettings())
            assert "refuses the credentials of [nats]" in await error_of(nobody)
            plain = wrong._replace(addresses=server.url("tls"))
            assert "does not speak TLS; no password was sent" in await error_of(plain)
            missing = NatsSettings(token_file=tmp_path / "none")
            assert "none cannot be read" in await error_of(wrong._replace(settings=missing))
            server.kill()
            await check_place(wrong, "it may come")

    asyncio.run(test())


def test_with_tls_and_a_token(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["127.0.0.1"], 30)
    names = {"cert_file": tmp_path / CERTIFICATE, "key_file": tmp_path / KEY}
    lines = "\n".join(f'{name}: "{path}"' for name, path in names.items())
    token = tmp_path / "token"
    token.write_text("t-secret\n")

    async def test() -> None:
        configuration = f'tls {{\n{lines}\n}}\nauthorization {{ token: "t-secret" }}\n'
        with nats_server(configuration) as server:
            both = Pair(server)
            trusted = NatsSettings(token_file=token, ca=tmp_path / CA)
            place = both.place._replace(addresses=server.url("tls"), settings=trusted)
            both.listener._place = both._gateway._place = place
            await both.begin()
            await both.end()
            stranger = place._replace(settings=NatsSettings(token_file=token))
            with pytest.raises(BusError, match=r"not trusted here .* name its CA as nats\.ca"):
                await check_place(stranger, "test")
            nothing = place._replace(settings=NatsSettings(ca=tmp_path / "none.pem"))
            with pytest.raises(BusError, match=r"\[nats\]: ca, certificate or key"):
                await check_place(nothing, "test")

    asyncio.run(test())


def test_with_a_file_of_credentials(tmp_path: Path) -> None:
    configuration, credentials = accounts()
    file = tmp_path / "user.creds"
    settings = NatsSettings(credentials=file)

    async def test() -> None:
        with nats_server(configuration) as server:
            file.write_text(credentials)
            both = Pair(server)
            place = both.place._replace(settings=settings)
            both.listener._place = both._gateway._place = place
            await both.begin()
            await both.end()
            for content, why in (
                (credentials.partition("\n\n")[0], "has no USER NKEY SEED"),
                (credentials.partition("\n\n")[2], "has no NATS USER JWT"),
                (credentials.replace("SEED-----\nSU", "SEED-----\n?U"), "seed .* is damaged"),
                (credentials.replace("JWT-----\ney", "JWT-----\nyy"), "refuses the credentials"),
            ):
                file.write_text(content)
                with pytest.raises(BusError, match=why):
                    await check_place(place, "test")

    asyncio.run(test())


def test_the_first_server_that_answers_is_used(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_line, "CONNECT", 1)

    async def test() -> None:
        both = Pair(server)
        dead = f"nats://127.0.0.1:{free_port()}"
        place = both.place._replace(addresses=f"{dead},{server.url()}")
        both.listener._place = both._gateway._place = place
        await both.begin()
        await both.end()
        with pytest.raises(BusError, match=f"{dead} cannot be reached now: .*[Cc]onnect"):
            await open_line(dead, "test", NatsSettings())
        with socket.create_server(("127.0.0.1", 0)) as other:
            silent = f"nats://127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(BusError, match=f"{silent} .*no NATS server has answered"):
                await open_line(silent, "test", NatsSettings())

    asyncio.run(test())


def test_doctor_says_whether_the_bus_can_be_used(tmp_path: Path) -> None:
    keys = {"blobs": "s3://bucket/fleet"}
    own = {"gateway": {"run": "digits.v2", "name": "berlin"}}
    with nats_server(USERS.format(name="berlin")) as server:
        user(tmp_path, "engine", "e-secret")
        user(tmp_path, "berlin", "b-secret")
        keys["bus"] = server.url()

        def found(name: str, **more: Any) -> list[tuple[str, str]]:
            nats = {"user": name, "password_file": str(tmp_path / f"{name}.password")}
            settings = ServiceSettings.read({**keys, "nats": nats, **more})
            return [(each.state, each.found) for each in check_bus(settings, ["digits.v2"])]

        ((state, text),) = found("engine")
        assert state == "good"
        assert text.startswith(f"{server.url()}: NATS 2.")
        assert found("berlin", **own)[0][0] == "good"
        ((state, text),) = found("berlin")
        assert state == "bad"
        assert 'permissions violation for subscription to "fleetlearn.digits~v2.' in text
        server.kill()
        ((state, text),) = found("engine")
        assert state == "bad"
        assert f"{server.url()} cannot be reached now" in text
    assert not list(check_bus(ServiceSettings(), ["digits"]))
