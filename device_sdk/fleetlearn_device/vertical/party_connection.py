"""A party's connection to the coordinator: kept, begun again when it is lost, and its messages read
and answered."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias

from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.errors import FleetError, ProtocolError, clip
from fleetlearn_protocol.frames import MAX_FRAME_BYTES, pack_chunks
from fleetlearn_protocol.vertical.messages import (
    VERTICAL_PROTOCOL,
    VERTICAL_VERSION,
    ContentReader,
    FromParty,
    PartyJoin,
    PartyStops,
    ToParty,
    decode_to_party,
    encode_from_party,
)
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from fleetlearn_device.driver.address import Address
from fleetlearn_device.driver.connection import DirectConnect, RepeatedLine, printable
from fleetlearn_device.driver.dead_ends import refusal
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.timing import Timing, seconds_to_wait
from fleetlearn_device.driver.way import Way, explain, open_way
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.sessions import StepError
from fleetlearn_device.vertical.party_machine import EndParty, Say, Wait

log = logging.getLogger("fleetlearn.device")

SendMessage: TypeAlias = Callable[..., Awaitable[None]]
"""Sends a message, and the bytes that follow it."""


class PartyRefusedError(Exception):
    """The coordinator does not let this party take part."""


class PartySettings(NamedTuple):
    """What a party is started with."""

    address: Address
    party: str
    """Its name in the run."""
    token: str | None
    """What the coordinator knows it by."""
    threads: int = 1
    timing: Timing = Timing()


class Machine(Protocol):
    """Decides what is done with each message of one connection."""

    @property
    def is_admitted(self) -> bool:
        """Whether the coordinator has told the terms."""

    def received(self, message: ToParty, content: bytes) -> Sequence[Any]:
        """Return the commands. Raises ProtocolError."""


class PartyTrainer(Protocol):
    """One party: its bottom and its rows."""

    bundle: Bundle

    def machine(self) -> Machine:
        """Return what decides about the messages of a new connection."""

    def most_bytes(self, message: ToParty) -> int:
        """Return the most bytes that may follow a message."""

    async def do(self, command: Any, send: SendMessage) -> None:
        """Carry a command out. Raises ProtocolError, DataError, StepError, FleetError."""


async def take_part(settings: PartySettings, trainer: PartyTrainer) -> None:
    """Take part until the training is over. Raises PartyRefusedError; ProtocolError, DataError,
    StepError, FleetError where this party cannot go on."""
    failures, dice, trouble = 0, random.SystemRandom(), RepeatedLine()
    while True:
        machine = trainer.machine()
        if await _converse(settings, trainer, machine, failures, trouble):
            return
        failures = 0 if machine.is_admitted else failures + 1
        delay = seconds_to_wait(settings.timing, failures, None, dice)
        log.log(trouble.level(logging.INFO), "connecting again in %.1f s", delay)
        await asyncio.sleep(delay)


async def _converse(
    settings: PartySettings,
    trainer: PartyTrainer,
    machine: Machine,
    failures: int,
    trouble: RepeatedLine,
) -> bool:
    """Open a connection, and take part until it ends. Returns whether the training is over."""
    url = settings.address.url
    token = settings.token
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    uri, way = parse_uri(url), None
    try:
        way = await open_way(uri, settings.timing.open, failures)
        async with DirectConnect(
            url,
            ssl=settings.address.tls,
            additional_headers=headers,
            subprotocols=[Subprotocol(VERTICAL_PROTOCOL)],
            compression=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=4,
            open_timeout=settings.timing.open,
            close_timeout=settings.timing.close,
            ping_interval=settings.timing.ping,
            ping_timeout=settings.timing.ping,
            **way.options(),
        ) as socket:
            trouble.clear()
            log.info("connected to %s as %s", url, settings.party)
            return await _take_part(settings, trainer, machine, socket)
    except ConnectionClosed as error:
        trouble.warn(f"the connection is lost: {printable(str(error))}")
    except InvalidStatus as error:
        answer = printable(clip(refusal(error.response)))
        if error.response.status_code in (400, 401, 403):
            raise PartyRefusedError(f"{url} refuses the connection: {answer}") from None
        trouble.warn(f"{url} refuses the connection: {answer}")
    except (OSError, WebSocketException, EOFError) as error:
        trouble.warn(f"cannot connect to {url}: {printable(explain(error, uri, way))}")
    finally:
        if isinstance(way, Way):
            way.close()
    return False


async def _take_part(
    settings: PartySettings, trainer: PartyTrainer, machine: Machine, socket: ClientConnection
) -> bool:
    """Answer messages. Returns True when the training is over."""

    async def send(message: FromParty, content: bytes = b"") -> None:
        for frame in _frames(message, content):
            async with timeout(settings.timing.send):
                await socket.send(frame)

    try:
        await send(PartyJoin(VERTICAL_VERSION, settings.party, trainer.bundle.sha256))
        reader: ContentReader | None = None
        async for frame in socket:
            if isinstance(frame, str):
                message = decode_to_party(frame)
                reader = ContentReader(message, trainer.most_bytes(message))
            elif reader is not None:
                reader.add(frame)
            if reader is None or not reader.is_complete:
                continue
            commands = machine.received(reader.message, reader.content())  # type: ignore[arg-type]
            reader = None
            for command in commands:
                match command:
                    case Say(message_of_party):
                        await send(message_of_party)
                    case Wait(text):
                        log.info("waiting: %s", printable(text))
                    case EndParty(refused):
                        if refused:
                            raise PartyRefusedError(printable(refused))
                        return True
                    case _:
                        await trainer.do(command, send)
    except (ProtocolError, DataError, StepError, FleetError) as error:
        text = error.text if isinstance(error, FleetError) else str(error)
        with suppress(ConnectionClosed):
            await send(PartyStops(clip(text)))
        raise
    raise ConnectionClosed(None, None)


def _frames(message: FromParty, content: bytes) -> Iterator[str | bytes]:
    yield encode_from_party(message)
    yield from pack_chunks(0, content)
