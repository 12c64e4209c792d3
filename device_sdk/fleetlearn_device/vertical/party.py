"""A party of a vertical run as a process: keeps a connection to the coordinator, and does what the
machine says."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import FleetError, ProtocolError, clip
from fleetlearn_protocol.frames import MAX_FRAME_BYTES, pack_chunks
from fleetlearn_protocol.manifest import GRADIENT, Input
from fleetlearn_protocol.vector import checksum
from fleetlearn_protocol.vertical.alignment import digest_of, hashes_as_bytes
from fleetlearn_protocol.vertical.arrays import decode_arrays, encode_arrays
from fleetlearn_protocol.vertical.kept_part import KeptPart, PartKey
from fleetlearn_protocol.vertical.messages import (
    VERTICAL_PROTOCOL,
    VERTICAL_VERSION,
    CommonRows,
    ContentReader,
    FromParty,
    PartyActivations,
    PartyGradients,
    PartyJoin,
    PartyRows,
    PartyState,
    PartyStops,
    ToParty,
    VerticalTerms,
    decode_to_party,
    encode_from_party,
)
from fleetlearn_protocol.vertical.schedule import rows_of_step, seed_of_step
from numpy.typing import NDArray
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
from fleetlearn_device.runtimes.split import Bottom
from fleetlearn_device.vertical.party_folder import KnownRows, PartyFolder
from fleetlearn_device.vertical.party_machine import (
    Command,
    EndParty,
    KeepBottom,
    KeepCommonRows,
    LoadBottom,
    PartyMachine,
    Say,
    SayActivations,
    SayRows,
    SayState,
    StepBottom,
    TakeTerms,
    Wait,
)
from fleetlearn_device.vertical.party_table import PartyTable

log = logging.getLogger("fleetlearn.device")


class PartyRefusedError(Exception):
    """The coordinator does not let this party take part."""


class PartySettings(NamedTuple):
    """What a party is started with."""

    address: Address
    party: str
    """Its name in the run."""
    token: str | None
    """What the coordinator knows it by."""
    folder: Path
    """Its state directory."""
    threads: int = 1
    timing: Timing = Timing()


class Party:
    """One party: its bottom, its rows, and what it keeps."""

    def __init__(self, settings: PartySettings, bundle: Bundle, table: PartyTable) -> None:
        """Raises BundleError, StateError."""
        self._settings, self._bundle, self._table = settings, bundle, table
        self.bottom = Bottom(bundle, settings.threads)
        self._folder = PartyFolder(settings.folder)
        self._own = digest_of(table.hashes)
        self._terms: VerticalTerms | None = None
        self._loss: float | None = None
        """Of the newest step."""
        self._places: NDArray[np.int64] | None = None
        """Number of a common row -> its place in the table. None: not known yet."""
        self._alignment: str | None = None
        self._targets: list[NDArray[Any]] = []
        self._dice = random.SystemRandom()
        self._trouble = RepeatedLine()

    async def run(self) -> None:
        """Take part until the training is over. Raises PartyRefusedError; ProtocolError, DataError,
        StepError, FleetError where this party cannot go on."""
        failures = 0
        while True:
            machine = PartyMachine()
            if await self._converse(machine, failures):
                return
            failures = 0 if machine.terms is not None else failures + 1
            delay = seconds_to_wait(self._settings.timing, failures, None, self._dice)
            log.log(self._trouble.level(logging.INFO), "connecting again in %.1f s", delay)
            await asyncio.sleep(delay)

    async def _converse(self, machine: PartyMachine, failures: int) -> bool:
        """Open a connection, and take part until it ends. Returns whether the training is over."""
        settings, url = self._settings, self._settings.address.url
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
                self._trouble.clear()
                log.info("connected to %s as %s", url, settings.party)
                return await self._take_part(machine, socket)
        except ConnectionClosed as error:
            self._trouble.warn(f"the connection is lost: {printable(str(error))}")
        except InvalidStatus as error:
            answer = printable(clip(refusal(error.response)))
            if error.response.status_code in (400, 401, 403):
                raise PartyRefusedError(f"{url} refuses the connection: {answer}") from None
            self._trouble.warn(f"{url} refuses the connection: {answer}")
        except (OSError, WebSocketException, EOFError) as error:
            self._trouble.warn(f"cannot connect to {url}: {printable(explain(error, uri, way))}")
        finally:
            if isinstance(way, Way):
                way.close()
        return False

    async def _take_part(self, machine: PartyMachine, socket: ClientConnection) -> bool:
        settings = self._settings
        join = PartyJoin(VERTICAL_VERSION, settings.party, self._bundle.sha256)
        try:
            await self._send(socket, join)
            reader: ContentReader | None = None
            async for frame in socket:
                if isinstance(frame, str):
                    message = decode_to_party(frame)
                    reader = ContentReader(message, self._most(message))
                elif reader is not None:
                    reader.add(frame)
                if reader is None or not reader.is_complete:
                    continue
                commands = machine.received(reader.message, reader.content())  # type: ignore[arg-type]
                reader = None
                for command in commands:
                    if await self._do(command, socket):
                        return True
        except (ProtocolError, DataError, StepError, FleetError) as error:
            text = error.text if isinstance(error, FleetError) else str(error)
            with suppress(ConnectionClosed):
                await self._send(socket, PartyStops(clip(text)))
            raise
        raise ConnectionClosed(None, None)

    def _most(self, message: ToParty) -> int:
        """Return the most bytes that may follow a message."""
        if isinstance(message, CommonRows):
            return (len(self._table.hashes) + 7) // 8
        if isinstance(message, PartyGradients) and self._terms is not None:
            elements = self._terms.batch_size * prod(self.bottom.cut.activations.shape)
            return find_encoding(self._terms.encoding).size(elements)
        return 0

    async def _send(
        self, socket: ClientConnection, message: FromParty, content: bytes = b""
    ) -> None:
        for frame in _frames(message, content):
            async with timeout(self._settings.timing.send):
                await socket.send(frame)

    async def _do(self, command: Command, socket: ClientConnection) -> bool:
        """Carry out a command. Returns whether the training is over."""
        match command:
            case Say(message):
                await self._send(socket, message)
            case TakeTerms(terms):
                await asyncio.to_thread(self._take_terms, terms)
            case SayState():
                await self._send(socket, await asyncio.to_thread(self._state))
            case SayRows():
                content = hashes_as_bytes(self._table.hashes)
                log.info("sending the hashes of %d rows' ids", len(self._table.hashes))
                await self._send(socket, PartyRows(len(content), checksum(content)), content)
            case KeepCommonRows(message, content):
                await asyncio.to_thread(self._keep_common, message, content)
            case LoadBottom(step):
                await asyncio.to_thread(self._load, step)
            case SayActivations(attempt, step):
                await self._send(socket, *await asyncio.to_thread(self._activations, attempt, step))
            case StepBottom(message, content):
                await asyncio.to_thread(self._step, message, content)
            case KeepBottom(step):
                await asyncio.to_thread(self._keep, step)
            case Wait(text):
                log.info("waiting: %s", printable(text))
            case EndParty(refused):
                if refused:
                    raise PartyRefusedError(printable(refused))
                log.info("the training is over; the bottom is in %s", self._settings.folder)
                return True
        return False

    # What the commands do; in another thread, since the connection's pings are answered meanwhile

    def _take_terms(self, terms: VerticalTerms) -> None:
        find_encoding(terms.encoding)  # raises ProtocolError
        self._terms = terms
        self._targets = self._table.targets(terms.targets)
        known = self._folder.known_rows(terms.run, self._own)
        self._alignment = self._places = None
        if known is not None:
            bits = np.unpackbits(np.frombuffer(known.membership, np.uint8), bitorder="little")
            message = CommonRows(int(bits.sum()), known.digest, len(known.membership), 0)
            self._places = self._table.common(message, known.membership)
            self._alignment = known.digest

    def _state(self) -> PartyState:
        kept = [] if self._alignment is None else self._folder.checkpoints(self._key())
        return PartyState(len(self._table.hashes), self._alignment, (0, *kept))

    def _keep_common(self, message: CommonRows, content: bytes) -> None:
        self._places = self._table.common(message, content)
        self._alignment = message.digest
        run = self._present().run
        self._folder.keep_rows(KnownRows(run, self._own, message.digest, content))
        log.info("%d of %d rows are common to all parties", message.rows, len(self._table.hashes))

    def _load(self, step: int) -> None:
        if step == 0:
            self.bottom.resume(self._bundle.parameters(), self._bundle.state())
        else:
            part = self._folder.load(self._key(), step)
            if part is None:
                raise DataError(f"{self._settings.folder} has lost the bottom after step {step}")
            self.bottom.resume(part.local, part.state)
        log.info("going on from step %d of %d", step, self._present().steps)

    def _activations(self, attempt: int, step: int) -> tuple[FromParty, bytes]:
        terms, places = self._present(), self._rows(step)
        seed = seed_of_step(step, terms.seed, terms.part)
        made = self.bottom.activations([array[places] for array in self._table.arrays], seed=seed)
        arrays: list[tuple[str, NDArray[Any]]] = [(self.bottom.cut.activations.name, made)]
        pairs = zip(terms.targets, self._targets, strict=True)
        arrays += [(row.name, values[places]) for row, values in pairs]
        parts, content = encode_arrays(arrays, terms.encoding, seed)
        rows = digest_of(self._table.hashes[places])
        return PartyActivations(attempt, step, rows, parts), content

    def _step(self, message: PartyGradients, content: bytes) -> None:
        terms, places = self._present(), self._rows(message.step)
        row = Input(GRADIENT, "float32", self.bottom.cut.activations.shape)
        (gradient,) = decode_arrays(message.arrays, content, [row], len(places), terms.encoding)
        self.bottom.step(
            [array[places] for array in self._table.arrays],
            gradient,
            seed=seed_of_step(message.step, terms.seed, terms.part),
            **terms.hyper,
        )
        log.debug("step %d: loss %.6g", message.step, message.loss)
        self._loss = message.loss

    def _keep(self, step: int) -> None:
        part = KeptPart(step, self.bottom.local, self.bottom.state)
        self._folder.keep(self._key(), part)
        if self._loss is not None:
            log.info("step %d of %d: loss %.4g", step, self._present().steps, self._loss)

    def _rows(self, step: int) -> NDArray[np.int64]:
        """Return the places of a step's rows in the table."""
        terms = self._present()
        if self._places is None:
            raise DataError("the coordinator began before the common rows were known")
        chosen = rows_of_step(step, len(self._places), terms.batch_size, terms.seed)
        places: NDArray[np.int64] = self._places[chosen]
        return places

    def _present(self) -> VerticalTerms:
        assert self._terms is not None  # the machine says nothing before
        return self._terms

    def _key(self) -> PartKey:
        if self._alignment is None:
            raise DataError("the coordinator began before the common rows were known")
        return PartKey(self._present().run, self._bundle.sha256, self._alignment)


def _frames(message: FromParty, content: bytes) -> Iterator[str | bytes]:
    yield encode_from_party(message)
    yield from pack_chunks(0, content)


def newest_bottom(bundle_path: str, folder: Path) -> tuple[bytes, int]:
    """Return the newest bottom that a party keeps, as an ONNX model of its activations, and after
    how many steps it is that. Raises BundleError, StateError, DataError."""
    from fleetlearn_protocol.bundle import write_inference_model
    from fleetlearn_protocol.vertical.joined_model import PartOrigin, with_origin

    bundle = open_bundle(bundle_path)
    part = PartyFolder(folder).newest(bundle.sha256)
    if part is None:
        raise DataError(f"{folder} keeps no trained part of the bundle {bundle_path}")
    origin = PartOrigin(bundle.sha256, part.step)
    return with_origin(write_inference_model(bundle, part.local), origin), part.step
