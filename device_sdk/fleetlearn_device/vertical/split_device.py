"""A device of a split run: it trains the bottom that it is sent on rows of its own, and sends it
back."""

from __future__ import annotations

import asyncio
import logging
from math import prod
from time import monotonic
from typing import Any

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.manifest import GRADIENT, Input
from fleetlearn_protocol.vector import checksum
from fleetlearn_protocol.vertical.arrays import decode_arrays, encode_arrays, read_bottom
from fleetlearn_protocol.vertical.messages import (
    FromParty,
    PartyActivations,
    PartyGradients,
    PartyState,
    SplitBegin,
    SplitBottom,
    SplitTerms,
    ToParty,
)
from fleetlearn_protocol.vertical.schedule import rows_of_step, seed_of_step
from numpy.typing import NDArray

from fleetlearn_device.runtimes.split import Bottom
from fleetlearn_device.vertical.party_connection import SendMessage
from fleetlearn_device.vertical.party_machine import SayActivations, SayState, StepBottom
from fleetlearn_device.vertical.party_table import OwnRows
from fleetlearn_device.vertical.rounds_machine import (
    RoundsCommand,
    RoundsMachine,
    SayBottom,
    TakeBottom,
    TakeSplitTerms,
)

log = logging.getLogger("fleetlearn.device")

LINE_EVERY = 5.0
"""Seconds between two lines of the log about rounds: a round may be a single step."""
BOTTOM = 1
"""The part number of a device's bottom, from which its random numbers come: the seed is the
device's own."""


class SplitDevice:
    """One device: the bottom, and its rows."""

    def __init__(self, bundle: Bundle, rows: OwnRows, threads: int = 1) -> None:
        """Raises BundleError."""
        self.bundle, self._rows = bundle, rows
        self.bottom = Bottom(bundle, threads)
        self._terms: SplitTerms | None = None
        self._targets: list[NDArray[Any]] = []
        self._round = 0
        self._loss = 0.0
        """Of the newest step."""
        self._told = -LINE_EVERY
        """When the log last had a line."""

    def machine(self) -> RoundsMachine:
        """Return what decides about the messages of a new connection."""
        return RoundsMachine()

    def most_bytes(self, message: ToParty) -> int:
        """Return the most bytes that may follow a message."""
        if self._terms is None:
            return 0
        if isinstance(message, SplitBegin):
            return 4 * self._size
        if isinstance(message, PartyGradients):
            elements = self._terms.batch_size * prod(self.bottom.cut.activations.shape)
            return find_encoding(self._terms.encoding).size(elements)
        return 0

    async def do(self, command: RoundsCommand, send: SendMessage) -> None:
        """Carry a command out. What computes runs in another thread, since the connection's pings
        are answered meanwhile."""
        match command:
            case TakeSplitTerms(terms):
                self._take_terms(terms)
            case SayState():
                await send(PartyState(self._rows.size, None, ()))
            case TakeBottom(message, content):
                self._take_bottom(message, content)
            case SayActivations(attempt, step):
                await send(*await asyncio.to_thread(self._activations, attempt, step))
            case StepBottom(message, content):
                await asyncio.to_thread(self._step, message, content)
            case SayBottom(attempt):
                content = self._bottom()
                self._say_progress()
                await send(SplitBottom(attempt, len(content), checksum(content)), content)

    def _say_progress(self) -> None:
        """Write a line of the log, not more often than people read."""
        if monotonic() - self._told >= LINE_EVERY:
            self._told = monotonic()
            log.info("done: this device's part of round %d; loss %.4g", self._round + 1, self._loss)

    def _take_terms(self, terms: SplitTerms) -> None:
        find_encoding(terms.encoding)  # raises ProtocolError
        self._terms = terms
        self._targets = self._rows.targets(terms.targets)

    @property
    def _present(self) -> SplitTerms:
        assert self._terms is not None  # the machine says nothing before
        return self._terms

    @property
    def _size(self) -> int:
        """Elements of a bottom that travels."""
        manifest = self.bundle.manifest
        state = manifest.state_size if self._present.carries_state else 0
        return manifest.local_size + state

    def _take_bottom(self, message: SplitBegin, content: bytes) -> None:
        vector, size = read_bottom(content, self._size), self.bundle.manifest.local_size
        carried = self._present.carries_state
        self.bottom.resume(vector[:size], vector[size:] if carried else self.bundle.state())
        self._round = message.round

    def _bottom(self) -> bytes:
        parts = [self.bottom.local]
        if self._present.carries_state:
            parts.append(self.bottom.state)
        return np.concatenate(parts).astype("<f4").tobytes()

    def _batch(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of a step's rows."""
        terms = self._present
        return rows_of_step(step, self._rows.size, terms.batch_size, terms.seed)

    def _activations(self, attempt: int, step: int) -> tuple[FromParty, bytes]:
        terms, rows = self._present, self._batch(step)
        seed = seed_of_step(step, terms.seed, BOTTOM)
        made = self.bottom.activations([array[rows] for array in self._rows.arrays], seed=seed)
        arrays: list[tuple[str, NDArray[Any]]] = [(self.bottom.cut.activations.name, made)]
        pairs = zip(terms.targets, self._targets, strict=True)
        arrays += [(row.name, values[rows]) for row, values in pairs]
        parts, content = encode_arrays(arrays, terms.encoding, seed)
        return PartyActivations(attempt, step, None, parts), content

    def _step(self, message: PartyGradients, content: bytes) -> None:
        terms, rows = self._present, self._batch(message.step)
        row = Input(GRADIENT, "float32", self.bottom.cut.activations.shape)
        (gradient,) = decode_arrays(message.arrays, content, [row], len(rows), terms.encoding)
        self.bottom.step(
            [array[rows] for array in self._rows.arrays],
            gradient,
            seed=seed_of_step(message.step, terms.seed, BOTTOM),
            **terms.hyper,
        )
        self._loss = message.loss
        if not np.isfinite(self.bottom.local).all():
            raise ProtocolError(
                Code.NOT_FINITE,
                f"step {message.step} made weights of the bottom that are not finite",
            )
