"""Serves a vertical run: its connections, its top, and what it keeps."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
from fleetlearn_protocol.command_line import stop_signals
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError, clip
from fleetlearn_protocol.frames import MAX_FRAME_BYTES, pack_chunks
from fleetlearn_protocol.systemd import ALIVE, READY, STOPPING, notify_systemd
from fleetlearn_protocol.vertical.alignment import digest_of, read_membership
from fleetlearn_protocol.vertical.kept_part import KeptPart, PartKey
from fleetlearn_protocol.vertical.messages import (
    VERTICAL_PROTOCOL,
    ContentReader,
    FromParty,
    PartyJoin,
    ToParty,
    VerticalFinished,
    VerticalRefusal,
    VerticalTerms,
    decode_from_party,
    encode_to_party,
)
from numpy.typing import NDArray
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from fleetlearn_coordinator.network.tls import Certificates
from fleetlearn_coordinator.service.vertical.engine import (
    FinishRun,
    KeepAlignment,
    KeepTop,
    KeptRun,
    LoadTop,
    RunCommand,
    StepTop,
    StopRun,
    TellParty,
    VerticalEngine,
)
from fleetlearn_coordinator.service.vertical.labels import OwnLabels, read_labels
from fleetlearn_coordinator.service.vertical.settings import VerticalPlan, hash_of_token
from fleetlearn_coordinator.service.vertical.top import TopProcess
from fleetlearn_coordinator.service.worker_process import MAX_DEATHS, PAUSE, check_installed
from fleetlearn_coordinator.storage.vertical_folder import VerticalFolder, VerticalStatus

logger = logging.getLogger("fleetlearn.vertical")

SEND_TIMEOUT = 30.0
"""Seconds that a party may take nothing; then its connection is ended."""
JOIN_TIMEOUT = 15.0
"""Seconds until the first message of a connection."""
MOST_CONNECTIONS = 64
"""Open at a time. A run has at most 32 parties, each with one that counts."""
QUEUED = 64
"""Messages that wait to be handled; then no more is read."""
ALIVE_EVERY = 1.0
"""Seconds between what `status` shows, and signs of life to systemd."""
LAST_WORDS = 5.0
"""Seconds in which parties may read the last message, before the process ends."""


class VerticalRunError(FleetError):
    """The run cannot go on; nothing will change that by itself."""


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


@dataclass(frozen=True)
class _Left:
    party: str
    socket: ServerConnection


class VerticalServer:
    """One run. ``work`` handles one event after the other."""

    def __init__(self, plan: VerticalPlan) -> None:
        """Raises FleetError: the plan, the bundle or the data directory cannot be used."""
        check_installed("a vertical run", "run the coordinator where it is installed")
        self._plan = plan
        self._bundle, split = plan.open_top()
        manifest = self._bundle.manifest
        targets = manifest.batch[len(split.cuts) :]
        self._labels: OwnLabels | None = None
        if plan.labels_file is not None:
            self._labels = read_labels(plan.labels_file, targets)
        self.folder = VerticalFolder(plan.data_dir, plan.digest(self._bundle))
        record = self.folder.record
        self._find_own_rows()
        checkpoints = () if record.alignment is None else self.folder.checkpoints(self._key())
        kept = KeptRun(record.alignment, record.rows, checkpoints, record.finished)
        terms = VerticalTerms(
            record.run,
            1,
            (),
            plan.seed,
            plan.batch_size,
            plan.steps,
            plan.checkpoint_every,
            plan.hyper,
            plan.encoding,
        )
        own = None if self._labels is None else self._labels.hashes
        self.engine = VerticalEngine(terms, split.cuts, targets, plan.labels, kept, own)
        self._top = TopProcess(plan.bundle, manifest, plan.threads)
        self._events: asyncio.Queue[_Joined | _Said | _Left] = asyncio.Queue(QUEUED)
        self._sockets: dict[str, ServerConnection] = {}
        self._tokens = {
            section.token_sha256: name for name, section in sorted(plan.parties.items())
        }
        self._told_of_end: set[str] = set()
        """Parties that were told that the training is over."""
        self._told: tuple[object, ...] = ()
        self._deaths = 0
        """Of the top's process, since the last step."""
        self._top_died = False
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}
        self.over = asyncio.Event()
        """Set when all parties know that the training is finished, or the run has failed."""

    # Connections

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Accept parties until the block is left. Yields the address. Raises FleetError,
        OSError."""
        plan = self._plan
        tls = None if plan.tls is None else Certificates(plan.tls).context
        server = await serve(
            self._converse,
            plan.host,
            plan.port,
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
        work = asyncio.create_task(self._work())
        try:
            host, port = server.sockets[0].getsockname()[:2]
            address = f"{'ws' if tls is None else 'wss'}://{host}:{port}"
            logger.info("run %s listens on %s", self.folder.record.run, address)
            if self.engine.phase == "finished":
                logger.info("its training is finished: parties that come are told so")
            yield address
            if work.done():
                await work
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, FleetError):
                await work
            self.tell_status(serving=False)
            server.close()
            await server.wait_closed()
            await self._top.close()
            self.folder.close()

    def _admit(self, socket: ServerConnection, request: Request) -> Response | None:
        """Refuse whoever shows no party's token."""
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        digest, party = hash_of_token(shown), None
        for known, name in self._tokens.items():
            if hmac.compare_digest(known, digest):
                party = name
        if party is None:
            logger.info("a connection of %s was refused: no party's token", socket.remote_address)
            return socket.respond(HTTPStatus.UNAUTHORIZED, "the token is no party's of this run\n")
        if len(socket.server.connections) > MOST_CONNECTIONS:
            return socket.respond(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections\n")
        socket.username = party
        return None

    async def _converse(self, socket: ServerConnection) -> None:
        party = socket.username
        reader: ContentReader | None = None
        joined = False
        try:
            async with asyncio.timeout(JOIN_TIMEOUT) as until:
                async for frame in socket:
                    until.reschedule(None)
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
                        await self._events.put(_Said(party, socket, said, content))
                    elif isinstance(said, PartyJoin):
                        joined = True
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

    async def _send(self, socket: ServerConnection, message: ToParty, content: bytes = b"") -> None:
        """Send a message. A party that takes nothing loses its connection."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT):
                for frame in _frames(message, content):
                    await socket.send(frame)
        except TimeoutError:
            logger.warning("%s took nothing for %g s", socket.username, SEND_TIMEOUT)
            socket.transport.abort()
        except ConnectionClosed:
            pass
        if isinstance(message, VerticalRefusal):
            await socket.close(1008)

    # Events

    async def _work(self) -> None:
        try:
            while True:
                event = await self._events.get()
                await self._carry_out(self._handled(event))
                # Not with each of a step's messages: that would cost as much as a small step.
                engine = self.engine
                now = (engine.phase, engine.missing, engine.kept.checkpoints)
                if now != self._told:
                    self._told = now
                    self.tell_status()
        except FleetError as error:
            told = self.engine.phase == "failed"
            self.engine.phase, self.engine.why = "failed", error.text
            if not told:
                refusal = VerticalRefusal(clip(error.text))
                await asyncio.gather(*(self._send(one, refusal) for one in self._sockets.values()))
            raise
        finally:
            # Whatever it was, such as a full disk: nobody would handle what parties say.
            self.over.set()

    def _handled(self, event: _Joined | _Said | _Left) -> Sequence[RunCommand]:
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
            case _Said(party, socket, message, content):
                if current is not socket:
                    return []
                try:
                    return self.engine.said(party, message, content)
                except ProtocolError as error:
                    logger.warning("%s breaks the protocol: %s", party, error.text)
                    refusal = TellParty(party, VerticalRefusal(clip(error.text)))
                    return [refusal, *self.engine.left(party)]

    async def _carry_out(self, commands: Sequence[RunCommand]) -> None:
        """Carry commands out in their order, and those that follow from them."""
        waiting = [*commands]
        while waiting:
            more = await self._do(waiting.pop(0))
            if self._top_died:
                self._top_died, waiting = False, []
            waiting = [*more, *waiting]

    async def _do(self, command: RunCommand) -> Sequence[RunCommand]:
        match command:
            case TellParty(party, message, content):
                socket = self._sockets.get(party)
                if socket is not None:
                    await self._send(socket, message, content)
                if isinstance(message, VerticalFinished):
                    self._told_of_end.add(party)
                    if len(self._told_of_end) == len(self.engine.cuts):
                        self.over.set()
            case LoadTop(step):
                part = None if step == 0 else self.folder.load(self._key(), step)
                if step and part is None:
                    raise VerticalRunError(
                        Code.UNKNOWN_CONTENT, f"the top after step {step} is lost"
                    )
                logger.info("everybody is there: going on from step %d", step)
                if await self._top.load(part) is None:
                    return await self._lost()
            case StepTop():
                return await self._step(command)
            case KeepTop(step):
                part = await self._top.part(step)
                if part is None:
                    return await self._lost()
                await asyncio.to_thread(self._keep, part)
                self._say_progress(part.step)
            case KeepAlignment(digest, rows, own):
                record = self.folder.record
                record.alignment, record.rows, record.own = digest, rows, own
                self.folder.save_record()
                self._find_own_rows()
                logger.info("%d rows are common to all parties", rows)
            case FinishRun():
                self.folder.record.finished = True
                self.folder.save_record()
                logger.info("the training is finished after %d steps", self.engine.step)
            case StopRun(text):
                raise VerticalRunError(Code.BAD_MESSAGE, text)
        return []

    def _say_progress(self, step: int) -> None:
        """Write a line of the log at each checkpoint, from the first step on."""
        if self._loss is None:
            return
        metrics = "".join(f", {name} {value:.4g}" for name, value in self._metrics.items())
        logger.info("step %d of %d: loss %.4g%s", step, self._plan.steps, self._loss, metrics)

    async def _step(self, command: StepTop) -> Sequence[RunCommand]:
        arrays = [*command.arrays, *self._own_labels(command)]
        found = await self._top.step(command.step, command.seed, self._plan.hyper, arrays)
        if found is None:
            return await self._lost()
        self._loss, self._metrics, self._deaths = found.loss, found.metrics, 0
        return self.engine.top_done(command.step, found.gradients, found.loss)

    def _own_labels(self, command: StepTop) -> list[NDArray[Any]]:
        if self._labels is None:
            return []
        places = self._own_rows[command.rows]
        return [array[places] for array in self._labels.arrays]

    def _find_own_rows(self) -> None:
        """Find the common rows among the coordinator's labels. Raises VerticalRunError where they
        are not those of the alignment any more."""
        record = self.folder.record
        if self._labels is None or record.alignment is None:
            return
        hashes = self._labels.hashes
        with suppress(ProtocolError):
            self._own_rows = np.flatnonzero(read_membership(record.own, len(hashes)))
            if digest_of(hashes[self._own_rows]) == record.alignment:
                return
        raise VerticalRunError(
            Code.WRONG_HASH,
            f"the rows of {self._plan.labels_file} have changed since the run began: put the file "
            "back, or begin a run of its own with another data_dir",
        )

    async def _lost(self) -> Sequence[RunCommand]:
        """The top's process died. What was to be said of its step is not said any more."""
        self._deaths, self._top_died = self._deaths + 1, True
        if self._deaths == MAX_DEATHS:
            text = f"the top's process died {MAX_DEATHS} times without a step in between"
            raise VerticalRunError(Code.BAD_MESSAGE, text)
        logger.warning("the top's process died; everybody goes back to the last checkpoint")
        await asyncio.sleep(PAUSE)
        return self.engine.top_lost(self.folder.checkpoints(self._key()))

    def _keep(self, part: KeptPart) -> None:
        self.folder.keep(self._key(), part)

    def _key(self) -> PartKey:
        record = self.folder.record
        return PartKey(record.run, self._bundle.sha256, record.alignment or "0" * 64)

    def tell_status(self, *, serving: bool = True) -> None:
        """Write what `status` shows."""
        engine = self.engine
        self.folder.write_status(
            VerticalStatus(
                self.folder.record.run,
                engine.phase,
                engine.step,
                self._plan.steps,
                max(engine.kept.checkpoints, default=0),
                engine.kept.rows,
                engine.attempt,
                {party: serving and party in engine.seats for party in engine.parties},
                self._loss,
                self._metrics,
                engine.why,
            )
        )


def _frames(message: ToParty, content: bytes) -> Iterator[str | bytes]:
    yield encode_to_party(message)
    yield from pack_chunks(0, content)


def serve_vertical(plan: VerticalPlan) -> None:
    """Serve until the training is over, or a signal comes. Raises FleetError (it cannot be served,
    or the run cannot go on), OSError."""
    asyncio.run(_serve(plan))


async def _serve(plan: VerticalPlan) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    server = VerticalServer(plan)

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
