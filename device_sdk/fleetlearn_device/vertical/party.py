"""A party of a vertical run: its bottom, its rows, and what it does when the machine says so."""

from __future__ import annotations

import asyncio
import logging
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.manifest import GRADIENT, Input
from fleetlearn_protocol.vector import checksum
from fleetlearn_protocol.vertical.alignment import digest_of, hashes_as_bytes
from fleetlearn_protocol.vertical.arrays import decode_arrays, encode_arrays
from fleetlearn_protocol.vertical.kept_part import KeptPart, PartKey
from fleetlearn_protocol.vertical.messages import (
    CommonRows,
    FromParty,
    PartyActivations,
    PartyGradients,
    PartyRows,
    PartyState,
    ToParty,
    VerticalTerms,
)
from fleetlearn_protocol.vertical.schedule import rows_of_step, seed_of_step
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.split import Bottom
from fleetlearn_device.vertical.party_connection import SendMessage
from fleetlearn_device.vertical.party_folder import KnownRows, PartyFolder
from fleetlearn_device.vertical.party_machine import (
    Command,
    KeepBottom,
    KeepCommonRows,
    LoadBottom,
    PartyMachine,
    SayActivations,
    SayRows,
    SayState,
    StepBottom,
    TakeTerms,
)
from fleetlearn_device.vertical.party_table import PartyTable

log = logging.getLogger("fleetlearn.device")


class Party:
    """One party: its bottom, its rows, and what it keeps."""

    def __init__(self, bundle: Bundle, table: PartyTable, folder: Path, threads: int = 1) -> None:
        """``folder``: the state directory. Raises BundleError, StateError."""
        self.bundle, self._table, self._where = bundle, table, folder
        self.bottom = Bottom(bundle, threads)
        self._folder = PartyFolder(folder)
        self._own = digest_of(table.hashes)
        self._terms: VerticalTerms | None = None
        self._loss: float | None = None
        """Of the newest step."""
        self._places: NDArray[np.int64] | None = None
        """Number of a common row -> its place in the table. None: not known yet."""
        self._alignment: str | None = None
        self._targets: list[NDArray[Any]] = []

    def machine(self) -> PartyMachine:
        """Return what decides about the messages of a new connection."""
        return PartyMachine()

    def most_bytes(self, message: ToParty) -> int:
        """Return the most bytes that may follow a message."""
        if isinstance(message, CommonRows):
            return (len(self._table.hashes) + 7) // 8
        if isinstance(message, PartyGradients) and self._terms is not None:
            elements = self._terms.batch_size * prod(self.bottom.cut.activations.shape)
            return find_encoding(self._terms.encoding).size(elements)
        return 0

    async def do(self, command: Command, send: SendMessage) -> None:
        """Carry a command out. What computes runs in another thread, since the connection's pings
        are answered meanwhile."""
        match command:
            case TakeTerms(terms):
                await asyncio.to_thread(self._take_terms, terms)
            case SayState():
                await send(await asyncio.to_thread(self._state))
            case SayRows():
                content = hashes_as_bytes(self._table.hashes)
                log.info("sending the hashes of %d rows' ids", len(self._table.hashes))
                await send(PartyRows(len(content), checksum(content)), content)
            case KeepCommonRows(message, content):
                await asyncio.to_thread(self._keep_common, message, content)
            case LoadBottom(step):
                await asyncio.to_thread(self._load, step)
            case SayActivations(attempt, step):
                await send(*await asyncio.to_thread(self._activations, attempt, step))
            case StepBottom(message, content):
                await asyncio.to_thread(self._step, message, content)
            case KeepBottom(step):
                await asyncio.to_thread(self._keep, step)

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
            self.bottom.resume(self.bundle.parameters(), self.bundle.state())
        else:
            part = self._folder.load(self._key(), step)
            if part is None:
                raise DataError(f"{self._where} has lost the bottom after step {step}")
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
        return PartKey(self._present().run, self.bundle.sha256, self._alignment)


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
