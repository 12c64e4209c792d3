"""What one address and one device may do, over real sockets: 127.0.0.2 is an attacker's address,
127.0.0.1 others'."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from fleetlearn_coordinator.conversation import limits
from fleetlearn_coordinator.network import listener, process_settings
from fleetlearn_protocol.messages import CheckIn, ComeBack, Heartbeat
from peers import PlanMaker, fleet, serving, update_of

from benchmarks._raw_peer import RawPeer, frame, open_stream, text

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only there 127.0.0.2 is this machine without more ado"
)
STRICT: dict[str, Any] = {"exempt": ["127.0.0.1/32"]}
ROUNDS = {"round__goal": 1, "round__over_selection": 20}
"""With tasks for the attackers, too."""
PROXY = {"proxies": ["127.0.0.0/8"]}
Test = Callable[[PlanMaker, pytest.MonkeyPatch], Awaitable[None]]


def run_async(test: Test) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own."""

    def run(make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        asyncio.run(bounded(test(make_plan, monkeypatch)))

    run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
    return run


OPEN: list[RawPeer] = []
"""Of the test that runs; all are cut off at its end."""


async def peer_at(address: str, source: str = "127.0.0.2") -> RawPeer:
    OPEN.append(RawPeer(*await open_stream(address, source)))
    return OPEN[-1]


async def bounded(test: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(30):
            await test
    finally:
        while OPEN:
            OPEN.pop().abort()
        await asyncio.sleep(0)  # so that the aborts are carried out


async def answer(
    address: str, source: str = "127.0.0.2", **headers: str
) -> tuple[int, dict[str, str], str]:
    """Return the status, the headers and the text with which a handshake is answered."""
    peer = await peer_at(address, source)
    status = await peer.handshake(address, **headers)
    head = dict(line.split(": ", 1) for line in peer.head.decode().splitlines()[1:] if line)
    body = await peer.reader.read() if status != 101 else b""
    if status != 101:
        peer.abort()
    return status, head, body.decode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@run_async
async def test_an_address_has_a_number_of_connections(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    async with fleet(make_plan(**ROUNDS), limits={"connections": 2, **STRICT}) as (
        coordinator,
        join,
    ):
        peers = [await peer_at(coordinator.host.address) for _ in range(2)]
        for number, peer in enumerate(peers):
            assert await peer.handshake(coordinator.host.address) == 101
            await peer.check_in(f"attacker-{number}")
        status, headers, said = await answer(coordinator.host.address)
        assert status == 429
        assert 1 <= int(headers["Retry-After"]) <= limits.RETRY_AFTER
        assert said.startswith(
            "127.0.0.2 has 2 connections, as many as one address may have at a time"
        )
        assert "[limits]" in said
        await (await join("honest")).do_round(update_of(1.0))
        peers.pop().abort()
        await until(lambda: len(coordinator.host.connections) == 2)
        assert (await answer(coordinator.host.address))[0] == 101


@run_async
async def test_an_address_opens_connections_at_a_rate(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    async with fleet(make_plan(**ROUNDS), limits={"check_ins": 0.5, **STRICT}) as (
        coordinator,
        join,
    ):
        found = [(await answer(coordinator.host.address))[0] for _ in range(4)]
        assert found == [101, 101, 429, 429]
        await (await join("honest")).do_round(update_of(1.0))


@run_async
async def test_newcomers_of_one_address_leave_places_for_others(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    """More connect than there are places, and say nothing. A device of another address comes in."""
    patch.setattr(process_settings, "NEWCOMERS", 16)
    async with fleet(make_plan(**ROUNDS), limits=STRICT) as (coordinator, join):
        for _ in range(40):
            await peer_at(coordinator.host.address)
        await until(lambda: len(coordinator.host.connections) == 8)
        await (await join("honest")).do_round(update_of(1.0))
        assert len(coordinator.host.connections) == 9


@run_async
async def test_short_lives_of_one_address_are_closed_unread(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    """And cost others nothing: a device of another address comes in, although hundreds knock."""
    patch.setattr(listener, "SHORT_LIFE_RATE", 1e-9)
    patch.setattr("fleetlearn_coordinator.network.addresses.SHORT_LIFE_RATE", 1e-9)
    async with fleet(make_plan(**ROUNDS), limits=STRICT) as (coordinator, join):
        served = 0
        for _ in range(300):
            peer = await peer_at(coordinator.host.address)
            with suppress(ConnectionError):
                served += await peer.handshake(coordinator.host.address) == 101
            peer.abort()
        most = limits.SHORT_LIFE_BURST * limits.ADDRESS_SHORT_LIVES
        assert most <= served <= most + 5  # an end is seen a moment after the next connection
        assert coordinator.host.refused["too-many"] == 300 - served
        await (await join("honest")).do_round(update_of(1.0))


@run_async
async def test_messages_of_an_address_have_a_rate(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    """Ten of its connections wait for their turns, and none is ended for what the others do."""
    async with fleet(make_plan(**ROUNDS), limits={"messages": 10.0, **STRICT}) as (
        coordinator,
        join,
    ):
        peers = [await peer_at(coordinator.host.address) for _ in range(10)]
        for number, peer in enumerate(peers):
            await peer.handshake(coordinator.host.address)
            await peer.check_in(f"attacker-{number}")
        for peer in peers:
            peer.writer.write(100 * text(Heartbeat()))
        use = coordinator.host.devices["attacker-0"].connection.use
        assert use is not None
        # each has booked a turn
        await until(lambda: use.messages.tokens < -10 * limits.FRAMES_PER_TURN + 1)
        for _ in range(4):
            await (await join("honest")).do_round(update_of(1.0))
            coordinator.host.devices["honest"].connection.transport.abort()
            await until(lambda: "honest" not in coordinator.host.devices)
        assert use.messages.tokens > -12 * limits.FRAMES_PER_TURN
        assert len(coordinator.host.devices) == 10


@run_async
async def test_updates_that_were_asked_for_do_not_count_as_an_address_s_bytes(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    async with fleet(make_plan(**ROUNDS), limits={"bytes": 16384.0, "exempt": []}) as (
        coordinator,
        join,
    ):
        a = await join("a")
        for _ in range(5):  # 280 kB each
            await a.do_round(update_of(1.0))
        use = coordinator.host.devices["a"].connection.use
        assert use is not None
        assert use.bytes.tokens > use.bytes.burst / 2
        connection = coordinator.host.devices["a"].connection
        connection.incoming.tokens = connection.incoming.burst  # what a task allowed is used up
        peer = await peer_at(coordinator.host.address, "127.0.0.1")
        await peer.handshake(coordinator.host.address)
        await peer.send(frame(1, b" " * 60_000))
        await peer.hear()
        assert use.bytes.tokens < use.bytes.burst - 59_000


# Proxies


@run_async
async def test_a_proxy_says_whom_it_connects_for(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    async with serving(make_plan(), limits={"connections": 1}, **PROXY) as coordinator:
        address = coordinator.host.address
        for client, status in (
            ("192.0.2.1", 101),
            ("192.0.2.1", 429),
            ("192.0.2.2", 101),
            ("2001:db8::1", 101),
        ):
            found = await answer(address, **{"X-Forwarded-For": client})
            assert found[0] == status
        assert (await answer(address, Forwarded="for=192.0.2.2"))[0] == 429
        # the left may be made up
        assert (await answer(address, Forwarded="for=192.0.2.2, for=192.0.2.9"))[0] == 101
        status, _, said = await answer(
            address, **{"Forwarded": "for=192.0.2.3", "X-Forwarded-For": "192.0.2.4"}
        )
        assert (status, "name different addresses" in said) == (400, True)
        for _ in range(3):  # the proxy itself has no limits
            assert (await answer(address))[0] == 101


@run_async
async def test_a_proxy_s_clients_leave_places_to_each_other(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(process_settings, "NEWCOMERS", 8)
    async with serving(make_plan(), **PROXY) as coordinator:
        for client, statuses in (
            ("192.0.2.1", [101, 101, 101, 101, 429]),
            ("192.0.2.2", [101, 101, 429]),
        ):
            for status in statuses:
                found = await answer(coordinator.host.address, **{"X-Forwarded-For": client})
                assert (found[0], client) == (status, client)
            assert found[2].startswith(
                f"too many connections of {client} end at once, or do not check in"
            )


def test_others_are_not_believed_and_the_log_has_the_right_address(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        plan = make_plan()
        async with serving(plan, limits={"connections": 1, "exempt": []}) as coordinator:
            found = [
                await answer(coordinator.host.address, **{"X-Forwarded-For": f"192.0.2.{number}"})
                for number in (1, 2)
            ]
            assert [one[0] for one in found] == [101, 429]
            assert found[1][2].startswith("127.0.0.2 has 1 connections")
        async with serving(plan, **PROXY) as coordinator:
            headers = {"X-Forwarded-For": "192.0.2.5", "Origin": "https://evil.example"}
            assert (await answer(coordinator.host.address, **headers))[0] == 403

    with caplog.at_level(logging.INFO, "fleetlearn"):
        asyncio.run(bounded(test()))
    assert any(
        "a connection of 127.0.0.2 was refused: 127.0.0.2 has 1" in line for line in caplog.messages
    )
    assert any(
        "a connection of 192.0.2.5 was refused: the origin" in line for line in caplog.messages
    )


# Devices


@run_async
async def test_a_device_that_returns_has_the_budgets_that_it_left(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    async with serving(make_plan(round__minimum=2)) as coordinator:
        address = coordinator.host.address
        for number in range(3):
            peer = await peer_at(address, "127.0.0.1")
            await peer.handshake(address)
            await peer.check_in("a")
            await until(lambda: "a" in coordinator.host.devices)
            connection = coordinator.host.devices["a"].connection
            if number:
                assert connection.messages.tokens < 50
                assert connection.downloads.tokens < 1000
            connection.messages.tokens = connection.downloads.tokens = 0.0
            connection.messages.rate = connection.downloads.rate = 1e-9
            if number != 1:  # the third replaces the second, which is still there
                peer.abort()
                await until(lambda: not coordinator.host.devices)


@run_async
async def test_a_device_that_checks_in_too_often_is_told_when_to_come_back(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr("fleetlearn_coordinator.network.device_budgets.DEVICE_BURST", 2)
    async with fleet(make_plan(), limits={"device_check_ins": 0.01}) as (_, join):
        for _ in range(2):
            await join("a")
        third = await join("a", check_in=False)
        await third.send(CheckIn(1, "a", 10))
        message = await third.expect(ComeBack)
        assert message.reason == "busy"
        assert 90 < message.after <= 100
        assert await third.closed() == 1000
        await join("b")


@run_async
async def test_who_is_told_to_come_back_is_no_short_life_of_its_address(
    make_plan: PlanMaker, patch: pytest.MonkeyPatch
) -> None:
    """The coordinator sent it away; others behind the same address must not pay for that."""
    patch.setattr("fleetlearn_coordinator.network.device_budgets.DEVICE_BURST", 1)
    async with fleet(make_plan(), limits={"exempt": []}) as (coordinator, join):
        await join("a")
        use = coordinator.host.devices["a"].connection.use
        assert use is not None
        full = use.short_lives.tokens
        for _ in range(3):
            again = await join("a", check_in=False)
            await again.send(CheckIn(1, "a", 10))
            await again.expect(ComeBack)
            assert await again.closed() == 1000
        await until(lambda: use.connections == 1)
        assert use.short_lives.tokens == full
        (await peer_at(coordinator.host.address, "127.0.0.1")).abort()
        await until(lambda: use.short_lives.tokens == full - 1)
