"""Gateways of one release work with the engine process of another: during an update.

wire_1.json has the shapes of version 1's messages, and messages that were encoded before they had
their first new fields.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.gateways import engine_link, wire, wire_version
from fleetlearn_coordinator.gateways.bus import Bus
from fleetlearn_coordinator.gateways.engine_link import EngineLink
from fleetlearn_coordinator.gateways.wire_version import OLDEST, WIRE, agreed_wire, why_refused
from fleetlearn_protocol.messages import PROTOCOL_VERSION, Accepted, CheckIn, ComeBack, Refused
from gateways import gateway_fleet
from peers import PlanMaker, update_of
from wire_shapes import shapes

RECORDED = {
    version: json.loads(Path(__file__).with_name(f"wire_{version}.json").read_text())
    for version in range(OLDEST, WIRE + 1)
}


def changes(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what changed between two releases' shapes that the older one could not read, or that
    the newer one could not."""
    wrong = []
    for name, was in earlier.items():
        shape = now.get(name)
        if shape is None:
            wrong.append(f"{name} is gone")
            continue
        count = len(was["fields"])
        if shape["tag"] != was["tag"] or shape["fields"][:count] != was["fields"]:
            wrong.append(f"{name} had {was}")
        wrong += [
            f"{name}.{field} is new, and has no default, or {name} takes no new fields"
            for field, _, has_default in shape["fields"][count:]
            if not (was["grows"] and has_default)
        ]
    return wrong


@pytest.mark.parametrize("version", RECORDED)
def test_messages_have_grown_as_both_releases_can_read(version: int) -> None:
    assert not changes(RECORDED[version]["shapes"], shapes())


def test_a_new_kind_of_message_has_a_version() -> None:
    for version, recorded in RECORDED.items():
        new = shapes().keys() - recorded["shapes"].keys()
        messages = {name for name in new if issubclass(getattr(wire, name), wire.WireMessage)}
        late = {name for name in messages if wire_version.SINCE.get(name, 1) <= version}
        assert not late, "raise WIRE, and enter these in SINCE"


def test_a_planted_mistake_is_found() -> None:
    now = shapes()
    for change in (
        lambda shape: shape["fields"].append(["more", "int", False]),
        lambda shape: shape["fields"].reverse(),
        lambda shape: shape.update(tag=99),
        lambda shape: shape["fields"].pop(),
    ):
        other = json.loads(json.dumps(now))
        change(other["AskSave"])
        assert changes(now, other)
        assert changes(now, {name: each for name, each in now.items() if name != "Setup"})
    other = json.loads(json.dumps(now))
    other["AskSave"]["fields"].append(["more", "int", True])
    assert not changes(now, other)
    other["PartToAdd"]["fields"].append(["more", "int", True])
    assert changes(now, other), "a NamedTuple takes no new fields"


def begins_with(now: Any, was: Any) -> bool:
    """Return whether arrays, and those in them, have grown at their ends alone. Objects may have
    more fields."""
    if isinstance(was, list):
        return len(now) >= len(was) and all(map(begins_with, now, was))
    if isinstance(was, dict):
        return all(key in now and begins_with(now[key], value) for key, value in was.items())
    return bool(now == was)


@pytest.mark.parametrize("side", ["to_engine", "to_gateway"])
def test_what_an_earlier_release_said_is_understood(side: str) -> None:
    decode = {"to_engine": wire.decode_for_engine, "to_gateway": wire.decode_for_gateway}[side]
    for name, text in RECORDED[1][side]:
        batch = bytes.fromhex(text)
        (message,) = decode(batch)
        assert type(message).__name__ == name
        again = msgspec.msgpack.decode(wire.encode_batch([message]))
        (was,) = msgspec.msgpack.decode(batch)
        assert begins_with(again[0], was), name
    (hello,) = wire.decode_for_engine(bytes.fromhex(RECORDED[1]["to_engine"][0][1]))
    assert (hello.wire, hello.oldest) == (1, 1)


def test_what_a_later_release_adds_is_skipped() -> None:
    for side, text in RECORDED[1]["to_engine"] + RECORDED[1]["to_gateway"]:
        decode: Any = wire.decode_for_engine
        if [side, text] in RECORDED[1]["to_gateway"]:
            decode = wire.decode_for_gateway
        today = wire.encode_batch(decode(bytes.fromhex(text)))  # with what was added since
        (message,) = msgspec.msgpack.decode(today)
        batch = msgspec.msgpack.encode([[*message, "more", {"of": "it"}]])
        assert type(decode(batch)[0]).__name__ == side


@pytest.mark.parametrize(
    ("wire", "oldest", "agreed"),
    [(WIRE, OLDEST, WIRE), (WIRE + 5, OLDEST, WIRE), (WIRE + 5, WIRE + 1, None), (0, 0, None)],
)
def test_the_agreed_version(wire: int, oldest: int, agreed: int | None) -> None:
    assert agreed_wire(wire, oldest) == agreed


def test_who_is_refused_hears_which_of_both_is_to_be_updated() -> None:
    text = why_refused("gateway 3 (fleetlearn 9)", "fleetlearn 0", WIRE + 5, WIRE + 3)
    assert f"versions {WIRE + 3} to {WIRE + 5}" in text
    assert "the gateway is newer: start the engine process with the gateway's release" in text
    assert "start it with the engine process's release" in why_refused("gateway 3", "f", 0, 0)


def test_a_gateway_of_another_release_works(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is another, and its hello has none of the newer fields."""
    plan = make_plan(round__goal=2, stop__rounds=1)
    kinds = shapes()["GatewayHello"]["fields"]
    first = 1 + len(RECORDED[1]["shapes"]["GatewayHello"]["fields"]) - 2

    def as_before(messages: list[Any]) -> bytes:
        rows = msgspec.msgpack.decode(encode(messages))
        for message, row in zip(messages, rows, strict=True):
            if isinstance(message, wire.GatewayHello):
                del row[first : 1 + len(kinds)]
        return msgspec.msgpack.encode(rows)

    encode = wire.encode_batch
    monkeypatch.setattr(engine_link, "SOFTWARE", "fleetlearn 0.2.7")
    monkeypatch.setattr(wire, "encode_batch", as_before)

    async def test() -> None:
        async with asyncio.timeout(60), gateway_fleet(plan) as behind:
            a, b = await behind.join("a", 0), await behind.join("b", 1)
            for peer in (a, b):
                assert isinstance(await peer.upload(await peer.task(), update_of(1.0)), Accepted)
            assert (await a.expect(ComeBack)).reason == "finished"

    asyncio.run(test())


def test_a_gateway_that_is_refused_says_so_and_tries_again(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hellos: list[EngineLink] = []
    speak_on = EngineLink.speak_on

    def say_hello(link: EngineLink, bus: Bus) -> EngineLink:
        hellos.append(link)
        return speak_on(link, bus)

    async def test() -> None:
        async with asyncio.timeout(60), gateway_fleet(make_plan(round__goal=1)) as behind:
            host = behind.gateways[1]
            monkeypatch.setattr(EngineLink, "speak_on", say_hello)
            # to the test's end: the last refusal may be heard after what follows
            monkeypatch.setattr("fleetlearn_coordinator.gateways.gateway.REFUSED_RETRY", 0.05)
            with monkeypatch.context() as newer:
                newer.setattr(engine_link, "OLDEST", WIRE + 1)
                newer.setattr(engine_link, "WIRE", WIRE + 1)
                assert host.link._bus is not None
                host.link._bus.close()
                await host.link.over.wait()
                b = await behind.join("b", 1, check_in=False)
                checking_in = asyncio.create_task(b.check_in())  # asked behind each hello
                while hellos.count(host.link) < 3 or not host.link.refused:
                    await asyncio.sleep(0.01)
                assert not host.link.is_set_up.is_set()
            await host.link.is_set_up.wait()
            await checking_in
            assert not behind.server.done.done()
            assert isinstance(await b.upload(await b.task(), update_of(1.0)), Accepted)

    with caplog.at_level(logging.ERROR, "fleetlearn.coordinator.peers"):
        asyncio.run(test())
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) == 2, "each side says it once, however often the gateway tries"
    assert all("start the engine process with the gateway's release" in line for line in lines)


def test_a_newer_device_speaks_what_its_gateway_speaks(make_plan: PlanMaker) -> None:
    """Otherwise a newer engine process would agree on a version that an older gateway does not
    know."""

    async def test() -> None:
        async with asyncio.timeout(60), gateway_fleet(make_plan(round__goal=1)) as behind:
            a = await behind.join("a", 0, newest_protocol=PROTOCOL_VERSION + 3)
            port = behind.gateways[0].link._ports[1]
            assert port.check_in.newest_protocol == PROTOCOL_VERSION
            assert isinstance(await a.upload(await a.task(), update_of(1.0)), Accepted)
            b = await behind.join("b", 1, check_in=False)
            await b.send(CheckIn(PROTOCOL_VERSION + 1, "b", 10))
            assert "update the coordinator's fleetlearn" in (await b.expect(Refused)).text

    asyncio.run(test())
