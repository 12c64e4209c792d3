"""What ends a vertical run's server, and what a party that keeps to no rule cannot do to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fleetlearn_coordinator.service.vertical import serve
from fleetlearn_coordinator.service.vertical.engine import TellParty
from fleetlearn_coordinator.service.vertical.serve import (
    MOST_CONNECTIONS,
    QUEUED,
    PartyServer,
    ServedPlace,
)
from fleetlearn_coordinator.service.vertical.settings import hash_of_token
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vertical.arrays import ArrayPart
from fleetlearn_protocol.vertical.messages import (
    VERTICAL_PROTOCOL,
    PartyGradients,
    PartyJoin,
    PartyState,
    SplitBegin,
    VerticalPause,
    encode_from_party,
)
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol


class FullDisk(PartyServer):
    """A server whose first event meets a full disk."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def _next_event(self) -> Any:
        raise OSError("no space left on device")


def test_an_error_that_is_no_partys_ends_the_run_and_is_not_kept_silent() -> None:
    """It ended the task that handles what parties say, and nothing else: the process stayed, told
    systemd that it was alive, and answered nobody."""

    async def serve() -> None:
        server = FullDisk()
        with pytest.raises(OSError, match="no space left"):
            await server._handle_events()
        assert server.over.is_set()

    asyncio.run(serve())


def test_a_message_that_cannot_be_said_ends_the_run() -> None:
    """It ended the task that sent it, which nobody waited for: all sides waited for ever."""
    server = PartyServer.__new__(PartyServer)
    server._sending, server._sockets = {}, {"bank": object()}  # type: ignore[dict-item]
    part = ArrayPart("gradient", "float32", 0, 0)
    with pytest.raises(ProtocolError, match="loss"):
        server._tell("bank", PartyGradients(1, 0, (part,), 5e30), b"")


class Engine:
    """Answers each thing that a party says, and never fails."""

    phase, why, parties, waits_for = "training", "", ("bank", "shop"), None

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def most_bytes(self, message: Any) -> int:
        return 2**20

    def joined(self, party: str, message: Any) -> list[Any]:
        return [TellParty(party, VerticalPause("wait"))]

    def left(self, party: str) -> list[Any]:
        return []

    def said(self, party: str, message: Any, content: bytes) -> list[Any]:
        self.heard.append((party, message))
        return [TellParty(party, SplitBegin(1, 0, 0, 1, 2**24, 0), bytes(2**24))]


class Work:
    name, steps_done, notable = "run", 0, None

    def __init__(self) -> None:
        self.engine = Engine()

    def tell_status(self, traffic: Any, *, serving: bool = True) -> None: ...

    async def close(self) -> None: ...


TOKENS = {hash_of_token(party): party for party in Engine.parties}
JOIN = encode_from_party(PartyJoin(1, "bank", "a" * 64))
STATE = encode_from_party(PartyState(3, None, ()))


def server_of_two() -> PartyServer:
    place = ServedPlace("127.0.0.1", 0, None, TOKENS, 60.0)
    return PartyServer(place, Work())  # type: ignore[arg-type]


def connection(address: str, party: str = "bank", **more: Any) -> Any:
    headers = {"Authorization": f"Bearer {party}"}
    more |= {"additional_headers": headers, "subprotocols": [Subprotocol(VERTICAL_PROTOCOL)]}
    return connect(address, close_timeout=0.5, **more)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_a_party_that_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second answer waited for the first one to be sent, and all other parties with it."""
    monkeypatch.setattr(serve, "SEND_TIMEOUT", 600.0)

    async def talk() -> None:
        server = server_of_two()
        engine: Any = server.engine
        async with (
            server.listening() as address,
            connection(address, max_queue=1, max_size=None) as lazy,
            connection(address, "shop", max_size=None) as shop,
        ):
            await lazy.send(JOIN)
            await lazy.recv()
            lazy.transport.pause_reading()
            for _ in range(30):
                await lazy.send(STATE)
            await shop.send(JOIN)
            await shop.send(STATE)
            await until(lambda: ("shop", PartyState(3, None, ())) in engine.heard)
            # It is not kept waiting for ever either: its connection is ended.
            await until(lambda: "bank" not in server._sockets)
            lazy.transport.abort()

    asyncio.run(talk())


@pytest.mark.slow
def test_the_connections_of_one_party_do_not_keep_out_the_others() -> None:
    """It could hold all 64 of them, with a frame that is no message."""

    async def talk() -> None:
        server = server_of_two()
        async with server.listening() as address, AsyncExitStack() as open_:
            for _ in range(MOST_CONNECTIONS):
                one = await open_.enter_async_context(connection(address))
                await one.send(b"no message")
            with pytest.raises(InvalidStatus, match="503"):
                await connection(address)
            shop = await open_.enter_async_context(connection(address, "shop"))
            await shop.send(JOIN)
            assert "wait" in await shop.recv()

    asyncio.run(talk())


@pytest.mark.slow
def test_who_connects_and_does_not_join_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "JOIN_TIMEOUT", 0.2)

    async def talk() -> None:
        server = server_of_two()
        async with server.listening() as address, connection(address) as one:
            await one.send(b"no message")
            async with asyncio.timeout(60):
                await one.wait_closed()

    asyncio.run(talk())


class Failing(Engine):
    """Meets an error of the run in the first thing that is said."""

    def said(self, party: str, message: Any, content: bytes) -> list[Any]:
        raise OSError("no space left on device")


@pytest.mark.slow
def test_what_a_party_still_says_does_not_keep_a_failed_run_from_ending() -> None:
    """Nobody took its messages from the full queue, and the process never ended."""

    async def talk() -> None:
        server = server_of_two()
        server.engine = Failing()
        async with server.listening() as address, connection(address) as bank:
            await bank.send(JOIN)
            for _ in range(3 * QUEUED):
                await bank.send(STATE)
            await server.over.wait()
            bank.transport.abort()

    async def within() -> None:
        async with asyncio.timeout(60):
            await talk()

    with pytest.raises(OSError, match="no space left"):
        asyncio.run(within())
