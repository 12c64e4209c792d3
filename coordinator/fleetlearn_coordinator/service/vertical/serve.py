"""Serves a vertical or a split run: its connections, and one event after the other."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, NamedTuple, Protocol

from fleetlearn_protocol.command_line import stop_signals
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError, clip
from fleetlearn_protocol.frames import MAX_FRAME_BYTES, pack_chunks
from fleetlearn_protocol.systemd import ALIVE, READY, STOPPING, notify_systemd
from fleetlearn_protocol.vertical.messages import (
    VERTICAL_PROTOCOL,
    ContentReader,
    FromParty,
    PartyJoin,
    ToParty,
    VerticalFinished,
    VerticalRefusal,
    decode_from_party,
    encode_to_party,
)
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from fleetlearn_coordinator.network.tls import Certificates
from fleetlearn_coordinator.plan.service_settings import Tls
from fleetlearn_coordinator.service.vertical.engine import Phase, StopRun, TellParty
from fleetlearn_coordinator.service.vertical.rounds_engine import DropDevice, EndServing
from fleetlearn_coordinator.service.vertical.settings import hash_of_token
from fleetlearn_coordinator.service.vertical.top import TopLostError
from fleetlearn_coordinator.service.worker_process import MAX_DEATHS, PAUSE

logger = logging.getLogger("fleetlearn.vertical")

SEND_TIMEOUT = 30.0
"""Seconds that a party may take nothing; then its connection is ended."""
JOIN_TIMEOUT = 15.0
"""Seconds until the first message of a connection."""
MOST_CONNECTIONS = 4
"""Of one party, open at a time; the newest counts."""
MOST_UNSENT = 8
"""Messages to a party that are not sent yet. A party answers what it reads, so that of one that
reads there are two or three."""
QUEUED = 64
"""Messages that wait to be handled; then no more is read."""
QUEUED_OF_PARTY = 2
"""Of these: of one connection. Each may have many megabytes."""
ALIVE_EVERY = 1.0
"""Seconds between what `status` shows, and signs of life to systemd."""
LAST_WORDS = 5.0
"""Seconds in which parties may read the last message, before the process ends."""


class VerticalRunError(FleetError):
    """The run cannot go on; nothing will change that by itself."""


class ServedPlace(NamedTuple):
    """Where a run is served, and to whom."""

    host: str
    port: int
    tls: Tls | None
    tokens: Mapping[str, str]
    """SHA-256 of a token -> its party."""
    patience: float
    """Seconds that a party may be gone, or silent, where others can go on without it."""


class RunTraffic(NamedTuple):
    """Bytes of frames."""

    received: int = 0
    sent: int = 0

    def plus(self, received: int = 0, sent: int = 0) -> RunTraffic:
        """Return these and more."""
        return RunTraffic(self.received + received, self.sent + sent)


class RunEngine(Protocol):
    """Decides what an event leads to."""

    phase: Phase
    why: str

    @property
    def parties(self) -> Sequence[str]:
        """The parties' names."""

    @property
    def waits_for(self) -> Hashable:
        """What could be given up; None: nothing."""

    def most_bytes(self, message: FromParty) -> int:
        """Return the most bytes that may follow a message."""

    def joined(self, party: str, message: PartyJoin) -> Sequence[Any]:
        """A party has connected, and said `join`."""

    def left(self, party: str) -> Sequence[Any]:
        """A party's newest connection has ended."""

    def said(self, party: str, message: FromParty, content: bytes) -> Sequence[Any]:
        """A party has said something. Raises ProtocolError."""

    def waited(self) -> Sequence[Any]:
        """``waits_for`` has not changed for the place's patience."""


class RunWork(Protocol):
    """What a run does beside talking: its top, and what it keeps."""

    name: str
    steps_done: int
    """Steps of the top since the process began."""

    @property
    def engine(self) -> RunEngine:
        """What decides."""

    @property
    def notable(self) -> Hashable:
        """What `status` shows at once when it changes."""

    async def do(self, command: Any) -> Sequence[Any]:
        """Carry a command out. Returns those that follow. Raises TopLostError, FleetError,
        OSError; ProtocolError where what a party sent cannot be used."""

    def top_lost(self) -> Sequence[Any]:
        """Return what is to be done when the top's process died."""

    def tell_status(self, traffic: RunTraffic, *, serving: bool = True) -> None:
        """Write what `status` shows."""

    async def close(self) -> None:
        """Give back what the run holds."""


@dataclass(frozen=True)
class _Joined:
    party: str
    socket: ServerConnection
    message: PartyJoin


@dataclass(frozen=True)
class _Said:
    party: str
    socket: ServerConnection
    message: FromParty
    content: bytes
    room: asyncio.Semaphore
    """To be released when the message was handled."""


@dataclass(frozen=True)
class _Left:
    party: str
    socket: ServerConnection


class PartyServer:
    """One run. ``_handle_events`` handles one event after the other."""

    def __init__(self, place: ServedPlace, work: RunWork) -> None:
        self._place, self._work, self.engine = place, work, work.engine
        self._events: asyncio.Queue[_Joined | _Said | _Left] = asyncio.Queue(QUEUED)
        self._sockets: dict[str, ServerConnection] = {}
        self._sending: dict[str, list[asyncio.Task[None]]] = {}
        """The messages that are on their way to each party, one after the other: one party's slow
        connection does not hold up the others'."""
        self._told_of_end: set[str] = set()
        """Parties that were told that the training is over."""
        self._told: Hashable = None
        self._deaths = 0
        """Of the top's process, without a step in between."""
        self._steps_at_death = 0
        self._waits: Hashable = None
        self._waits_since = 0.0
        self.traffic = RunTraffic()
        """Since the process began."""
        self.over = asyncio.Event()
        """Set when all parties know that the training is finished, or the run has failed."""

    # Connections

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Accept parties until the block is left. Yields the address. Raises FleetError,
        OSError."""
        place = self._place
        tls = None if place.tls is None else Certificates(place.tls).context
        server = await serve(
            self._converse,
            place.host,
            place.port,
            ssl=tls,
            subprotocols=[Subprotocol(VERTICAL_PROTOCOL)],
            process_request=self._admit,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=4,
            ping_interval=20.0,
            ping_timeout=20.0,
            close_timeout=LAST_WORDS,
        )
        work = asyncio.create_task(self._handle_events())
        try:
            host, port = server.sockets[0].getsockname()[:2]
            address = f"{'ws' if tls is None else 'wss'}://{host}:{port}"
            logger.info("run %s listens on %s", self._work.name, address)
            if self.engine.phase == "finished":
                logger.info("its training is finished: parties that come are told so")
            yield address
            if work.done():
                await work
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, FleetError, OSError):
                await work
            self._work.tell_status(self.traffic, serving=False)
            server.close()
            # A connection that waits for room in the queue would not end.
            forgetting = asyncio.create_task(self._forget_events())
            await server.wait_closed()
            forgetting.cancel()
            await asyncio.gather(*self._unsent(), return_exceptions=True)
            await self._work.close()

    def _admit(self, socket: ServerConnection, request: Request) -> Response | None:
        """Refuse whoever shows no party's token."""
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        digest, party = hash_of_token(shown), None
        for known, name in self._place.tokens.items():
            if hmac.compare_digest(known, digest):
                party = name
        if party is None:
            logger.info("a connection of %s was refused: no party's token", socket.remote_address)
            return socket.respond(HTTPStatus.UNAUTHORIZED, "the token is no party's of this run\n")
        of_party = sum(one.username == party for one in socket.server.connections)
        if of_party >= MOST_CONNECTIONS:
            return socket.respond(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections\n")
        socket.username = party
        return None

    async def _converse(self, socket: ServerConnection) -> None:
        party = socket.username
        reader: ContentReader | None = None
        joined, room = False, asyncio.Semaphore(QUEUED_OF_PARTY)
        try:
            async with asyncio.timeout(JOIN_TIMEOUT) as until:
                async for frame in socket:
                    self.traffic = self.traffic.plus(received=len(frame))
                    if isinstance(frame, str):
                        message = decode_from_party(frame)
                        most = self.engine.most_bytes(message) if joined else 0
                        reader = ContentReader(message, most)
                    elif reader is not None:
                        reader.add(frame)
                    if reader is None or not reader.is_complete:
                        continue
                    said: Any = reader.message
                    content, reader = reader.content(), None
                    if joined:
                        await room.acquire()
                        await self._events.put(_Said(party, socket, said, content, room))
                    elif isinstance(said, PartyJoin):
                        joined = True
                        until.reschedule(None)
                        await self._events.put(_Joined(party, socket, said))
                    else:
                        raise ProtocolError(Code.BAD_MESSAGE, "the first message is not join")
        except ProtocolError as error:
            logger.warning("%s breaks the protocol: %s", party, error.text)
            await self._send(socket, VerticalRefusal(clip(error.text)))
        except (TimeoutError, ConnectionClosed):
            pass
        finally:
            if joined:
                await self._events.put(_Left(party, socket))

    async def _send(
        self,
        socket: ServerConnection,
        message: ToParty,
        frames: Iterator[str | bytes] | None = None,
    ) -> None:
        """Send a message, and what follows it. A party that takes nothing loses its connection."""
        try:
            for frame in frames or _frames(message):
                async with asyncio.timeout(SEND_TIMEOUT):
                    await socket.send(frame)
                    self.traffic = self.traffic.plus(sent=len(frame))
        except TimeoutError:
            logger.warning("%s took nothing for %g s", socket.username, SEND_TIMEOUT)
            socket.transport.abort()
        except ConnectionClosed:
            pass
        if isinstance(message, VerticalRefusal):
            await socket.close(1008)

    def tell_status(self) -> None:
        """Write what `status` shows."""
        self._work.tell_status(self.traffic)

    # Events

    async def _handle_events(self) -> None:
        try:
            while True:
                event = await self._next_event()
                await self._carry_out(
                    self.engine.waited() if event is None else self._handled(event)
                )
                if isinstance(event, _Said):
                    event.room.release()
                # Not with each of a step's messages: that would cost as much as a small step.
                if self._work.notable != self._told:
                    self._told = self._work.notable
                    self._work.tell_status(self.traffic)
        except FleetError as error:
            told = self.engine.phase == "failed"
            self.engine.phase, self.engine.why = "failed", error.text
            # What parties are told of it, before their connections are ended.
            await asyncio.gather(*self._unsent())
            if not told:
                refusal = VerticalRefusal(clip(error.text))
                await asyncio.gather(*(self._send(one, refusal) for one in self._sockets.values()))
            raise
        finally:
            # Whatever it was, such as a full disk: nobody would handle what parties say.
            self.over.set()

    async def _forget_events(self) -> None:
        while True:
            event = await self._events.get()
            if isinstance(event, _Said):
                event.room.release()

    async def _next_event(self) -> _Joined | _Said | _Left | None:
        """Return the next event, or None where the run has waited long enough."""
        now = asyncio.get_running_loop().time()
        if self.engine.waits_for != self._waits:
            self._waits, self._waits_since = self.engine.waits_for, now
        if self._waits is None:
            return await self._events.get()
        try:
            async with asyncio.timeout_at(self._waits_since + self._place.patience):
                return await self._events.get()
        except TimeoutError:
            self._waits = None
            return None

    def _handled(self, event: _Joined | _Said | _Left) -> Sequence[Any]:
        """Return what is to be done after an event. Of a party the newest connection counts."""
        current = self._sockets.get(event.party)
        match event:
            case _Joined(party, socket, message):
                if current is not None and current is not socket:
                    current.transport.abort()
                self._sockets[party] = socket
                logger.info("%s is there", party)
                return self.engine.joined(party, message)
            case _Left(party, socket):
                if current is not socket:
                    return []
                del self._sockets[party]
                logger.info("%s is gone", party)
                return self.engine.left(party)
            case _Said(party, socket, message, content, _):
                if current is not socket:
                    return []
                try:
                    return self.engine.said(party, message, content)
                except ProtocolError as error:
                    logger.warning("%s breaks the protocol: %s", party, error.text)
                    refusal = TellParty(party, VerticalRefusal(clip(error.text)))
                    return [refusal, *self.engine.left(party)]

    async def _carry_out(self, commands: Sequence[Any]) -> None:
        """Carry commands out in their order, and those that follow from them."""
        waiting = [*commands]
        while waiting:
            command = waiting.pop(0)
            match command:
                case TellParty(party, message, content):
                    self._tell(party, message, content)
                case DropDevice(party):
                    logger.warning("%s was silent for %g s", party, self._place.patience)
                    if (socket := self._sockets.pop(party, None)) is not None:
                        socket.transport.abort()
                case EndServing():
                    self.over.set()
                case StopRun(text):
                    raise VerticalRunError(Code.BAD_MESSAGE, text)
                case _:
                    try:
                        waiting = [*await self._work.do(command), *waiting]
                    except TopLostError:
                        # What was to be said of its step is not said any more.
                        waiting = [*await self._top_lost()]

    async def _top_lost(self) -> Sequence[Any]:
        self._deaths = 1 if self._work.steps_done > self._steps_at_death else self._deaths + 1
        self._steps_at_death = self._work.steps_done
        if self._deaths == MAX_DEATHS:
            text = f"the top's process died {MAX_DEATHS} times without a step in between"
            raise VerticalRunError(Code.BAD_MESSAGE, text)
        logger.warning("the top's process died; everybody goes back to the last checkpoint")
        await asyncio.sleep(PAUSE)
        return self._work.top_lost()

    def _tell(self, party: str, message: ToParty, content: bytes) -> None:
        """Begin to send a message, when those before it are sent."""
        socket = self._sockets.get(party)
        if socket is None:
            return
        unsent = [one for one in self._sending.get(party, ()) if not one.done()]
        if len(unsent) >= MOST_UNSENT:
            logger.warning("%s does not read what it is sent: its connection is ended", party)
            socket.transport.abort()
            return
        sending = self._send_to(party, socket, message, _frames(message, content), unsent[-1:])
        self._sending[party] = [*unsent, asyncio.create_task(sending)]

    def _unsent(self) -> list[asyncio.Task[None]]:
        return [task for tasks in self._sending.values() for task in tasks]

    async def _send_to(
        self,
        party: str,
        socket: ServerConnection,
        message: ToParty,
        frames: Iterator[str | bytes],
        before: Sequence[asyncio.Task[None]],
    ) -> None:
        await asyncio.gather(*before)
        await self._send(socket, message, frames)
        if isinstance(message, VerticalFinished):
            self._told_of_end.add(party)
            if len(self._told_of_end) == len(self.engine.parties):
                self.over.set()


def _frames(message: ToParty, content: bytes = b"") -> Iterator[str | bytes]:
    """Return the frames. The message is encoded here, not in the task that sends it: one that
    cannot be said is an error of the run."""
    return chain([encode_to_party(message)], pack_chunks(0, content))


def serve_run(make: Callable[[], PartyServer]) -> None:
    """Serve until the training is over, or a signal comes. ``make``: called within the event loop.
    Raises FleetError (it cannot be served, or the run cannot go on), OSError."""
    asyncio.run(_serve(make))


async def _serve(make: Callable[[], PartyServer]) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    server = make()

    def stop(number: signal.Signals) -> None:
        logger.info("stopped by %s", number.name)
        notify_systemd(STOPPING)
        stopped.set()

    with stop_signals(loop, stop):
        async with server.listening():
            notify_systemd(READY)
            waiting = {
                asyncio.ensure_future(server.over.wait()),
                asyncio.ensure_future(stopped.wait()),
            }
            try:
                while not server.over.is_set() and not stopped.is_set():
                    notify_systemd(ALIVE)
                    server.tell_status()
                    await asyncio.wait(
                        waiting, timeout=ALIVE_EVERY, return_when=asyncio.FIRST_COMPLETED
                    )
            finally:
                for task in waiting:
                    task.cancel()
