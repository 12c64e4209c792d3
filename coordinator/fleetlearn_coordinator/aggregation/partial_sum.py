"""Partial sums: what another process adds up of a round, for the process that has the round.

The process of the run says which sums are wanted (``SumsToMake``) and which updates go into them
(``UpdateToAdd``), and merges what comes back (``RoundSums.merge``): the result has the same bits as
if it had added the updates itself. Everything here is names and numbers, so that it can travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from fleetlearn_protocol.messages import UPDATE, Part

from fleetlearn_coordinator.aggregation import aggregators, exact_sums
from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.round_sums import RoundSums
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Update, Values

MOST_DEVICES = 2**31
"""Devices whose sums may be in a partial one: the process of the run counts them."""


class PartSums(NamedTuple):
    """How one part of the reports is added up."""

    part: str
    kind: str
    """The aggregator's name."""
    buffers: tuple[tuple[int, int], ...]
    """Where the model's elements begin and end that are no trained parameters."""


class SumsToMake(NamedTuple):
    """Sums without reports."""

    size: int
    """Elements of the model; of computations, how many sums a device sends."""
    parts: tuple[PartSums, ...]
    present: bytes
    """The values of the buffers in the model that the round changes, float32, (B,)."""


class PartToAdd(NamedTuple):
    """One part of an update."""

    part: Part
    begin: int
    """The byte of the spool file at which it begins."""
    elements: int
    largest: float
    """The largest magnitude of its elements."""


class UpdateToAdd(NamedTuple):
    """An accepted update that is to be added to a partial sum."""

    task: str
    spool_file: int
    parts: tuple[PartToAdd, ...]
    weight: int
    factor: float
    values: bytes
    """Of the model's buffers, as in ``Values``: float32, (B,)."""
    values_factor: float


class PartialSum(NamedTuple):
    """A partial sum that is in a file."""

    tasks: tuple[str, ...]
    """Whose updates are in it."""
    layout: tuple[tuple[str, str, int], ...]
    """Name, dtype and elements of each tensor, in the file's order."""
    crc32: int


class Adders(Protocol):
    """Other processes that add accepted updates. All of it is one-way: what they say of a partial
    sum, or that they are gone, is told to whoever gave them the updates."""

    def adder_of(self, spool_file: int) -> int | None:
        """Return the process that stored what is in this spool file; None: it is not there."""

    def begin(self, adder: int, number: int, sums: SumsToMake) -> None:
        """Have a process begin a partial sum. ``number``: of no other one."""

    def add(self, adder: int, number: int, update: UpdateToAdd) -> None:
        """Have it add an update."""

    def collect(self, adder: int, number: int, size: int) -> None:
        """Have it write the partial sum, of ``size`` bytes of updates, into ``file_of(number)``."""

    def forget(self, adder: int, number: int) -> None:
        """The partial sum is not needed any more."""

    def file_of(self, number: int) -> str:
        """Return where a partial sum is written."""


def sums_to_make(round: OpenRound) -> SumsToMake | None:
    """Return the sums that a part of this round's updates can be added to elsewhere. None: the
    process of the run adds all, since it needs each update: to keep it, to take it off again
    (masked updates), or to mix it into the model by itself; or updates are small (rows of
    tables); or the aggregator is of another package, which gateways do not have."""
    rules = round.rules
    ours = {*aggregators.AGGREGATORS, exact_sums.NAME, exact_sums.PRIVATE}
    kept = any(each.keeps_updates or each.name not in ours for each in rules.aggregators.values())
    if kept or rules.has_rows or rules.secure is not None or rules.mixing_rate is not None:
        return None
    buffers = tuple((place.start, place.stop) for place in rules.buffers)
    parts = tuple(
        PartSums(part, aggregator.name, buffers if part == UPDATE else ())
        for part, aggregator in rules.aggregators.items()
    )
    size = max(_elements(state, round.state.model.size) for state in round.sums.states.values())
    return SumsToMake(size, parts, round.present.tobytes())


def _elements(state: Any, model: int) -> int:
    return state.total.size if isinstance(state, exact_sums.ExactSums) else model


def make_sums(wanted: SumsToMake) -> RoundSums:
    """Return sums without reports. Raises ValueError on an aggregator that is not known."""
    return RoundSums(
        {each.part: _aggregator(each, wanted.size) for each in wanted.parts}, wanted.size
    )


def _aggregator(of: PartSums, size: int) -> Aggregator[Any]:
    if of.kind in (exact_sums.NAME, exact_sums.PRIVATE):
        private = of.kind == exact_sums.PRIVATE
        return exact_sums.exact_sums(size, MOST_DEVICES, private=private)
    return aggregators.make(of.kind, buffers=[slice(*edges) for edges in of.buffers])


def add_update(
    sums: RoundSums, update: UpdateToAdd, parts: Mapping[str, Update], present: bytes
) -> None:
    """Add an update to a partial sum. ``parts``: what its parts hold, by name. ``present``: the
    buffers' values. Raises ProtocolError, StoreError, OSError: part of it may be added then."""
    values = NO_VALUES
    if present:
        values = Values(
            np.frombuffer(update.values, np.float32).reshape(1, -1),
            np.array([update.values_factor]),
            np.frombuffer(present, np.float32),
        )
    for each in update.parts:
        part, elements = each.part.name, parts[each.part.name]
        aggregator, state = sums.aggregators[part], sums.states[part]
        if part == UPDATE:
            aggregator.add(state, elements, update.weight, each.largest, update.factor, values)
        else:  # what is no update counts whole
            aggregator.add(state, elements, 1, each.largest, 1.0, NO_VALUES)
