"""Which accepted updates of the open round other processes add up, and their partial sums until
these are merged."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbits
from typing import Any

import numpy as np
from fleetlearn_protocol.messages import BUFFERS
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.partial_sum import (
    Adders,
    PartialSum,
    PartToAdd,
    SumsToMake,
    UpdateToAdd,
    make_sums,
    sums_to_make,
)
from fleetlearn_coordinator.aggregation.regional_round import AnyRound, RegionalRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_sums import RoundSums
from fleetlearn_coordinator.service.training_run.spooled_report import SpooledReport
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.spooled_update import SpooledUpdate
from fleetlearn_coordinator.storage.store import SPOOL_FILES_HELD
from fleetlearn_coordinator.storage.sum_file import read_sum

SMALLEST = 2**20
"""Bytes of a model from which on its updates are added elsewhere. Measured: adding an update of
1 MiB takes 1.0 to 1.3 ms, one of 256 KiB 0.09 ms, which is about what saying so takes."""
FEWEST = 8
"""Updates that a process must have to add until its partial sum is collected. Measured: to read and
merge a partial sum takes as long as to add 8 updates."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pays_off(goal: int, adders: int, regions: int = 1) -> bool:
    """Return whether ``adders`` other processes are to add: rounds of ``goal`` updates give them
    enough to do, also where they are of this many ``regions``, and each has a core beside that of
    the run. Altogether partial sums cost a fifth more time of the processor than adding in one
    process: without free cores a round takes longer."""
    return cores() > adders and min(goal, SPOOL_FILES_HELD) >= FEWEST * max(adders, regions)


def most_apart(goal: int) -> int:
    """Return how many processes on other machines are to add at most, in rounds of ``goal``
    updates. They spare the process of the run fetching each update, whoever has how many cores."""
    return min(goal, SPOOL_FILES_HELD) // FEWEST


@dataclass(slots=True, eq=False)
class GivenReports:
    """The reports that one process adds to one partial sum."""

    adder: int
    round: OpenRound
    """Whose sums it is a part of: of a round with regions one of theirs."""
    reports: dict[str, SpooledReport] = field(default_factory=dict)
    """By task."""
    size: int = 0
    """Bytes of their updates."""
    asked: bool = False
    """Whether the partial sum was asked for."""


@dataclass(slots=True, eq=False)
class ArrivedSum:
    """A partial sum that is to be merged."""

    file: Path
    round: OpenRound
    """Whose sums it is a part of."""
    made: PartialSum
    reports: list[SpooledReport]


def sums_round(whole: AnyRound, reports: ReportColumns) -> OpenRound | None:
    """Return the round to whose sums these reports are added: of a round with regions their
    region's. None: a family's, whose updates are added by the process of the run."""
    if isinstance(whole, RegionalRound):
        return whole.part_of(reports)
    return whole if isinstance(whole, OpenRound) else None


class PreSums:
    """The reports that were given away, of one round at a time. All calls but ``read`` are made in
    the thread of the run."""

    def __init__(
        self, adders: Adders, changed: Callable[[], None], most: int | None = None
    ) -> None:
        """``changed``: called where something can go on that waited. ``most``: as
        ``CollectsSums.most_apart``."""
        self._adders, self._changed = adders, changed
        self.most_apart = most
        self._next = randbits(48)  # an earlier process's partial sums have other numbers
        self._given: dict[int, GivenReports] = {}
        """Number of a partial sum -> what is in it."""
        self._wanted: dict[OpenRound, SumsToMake | None] = {}
        """What is to be made of each round's, or region's, updates. None: nothing."""
        self.returned: deque[SpooledReport] = deque()
        """Reports whose partial sum is lost: they are to be added here."""
        self.arrived: deque[ArrivedSum] = deque()

    def give(self, whole: AnyRound, report: SpooledReport, columns: ReportColumns) -> bool:
        """Have the process that stored the report's update add it. ``columns``: with the parts that
        are to be added. Returns whether it does. While partial sums are collected none does, so
        that the collection ends."""
        round = sums_round(whole, columns)
        if round is None or any(each.asked for each in self._given.values()):
            return False
        wanted = self._wanted_of(round)
        adder = self._adders.adder_of(report.spool_file)
        if wanted is None or adder is None:
            return False
        update = _update_of(round, report, columns)
        own = adder, round
        rows = self._given.items()
        number = next((key for key, each in rows if (each.adder, each.round) == own), None)
        if number is None:
            number = self._next
            self._next += 1
            self._given[number] = GivenReports(adder, round)
            self._adders.begin(adder, number, wanted)
        given = self._given[number]
        given.reports[report.task] = report
        given.size += sum(each.part.size for each in update.parts)
        self._adders.add(adder, number, update)
        return True

    def _wanted_of(self, round: OpenRound) -> SumsToMake | None:
        if round not in self._wanted:
            large = round.state.model.nbytes >= SMALLEST
            self._wanted[round] = sums_to_make(round) if large else None
        return self._wanted[round]

    def collect(self) -> bool:
        """Ask for all partial sums that were not asked for. Returns whether any is missing."""
        for number, given in self._given.items():
            if not given.asked:
                given.asked = True
                self._adders.collect(given.adder, number, given.size)
        return bool(self._given)

    def collected(self, number: int, made: PartialSum | None) -> None:
        """A process has written its partial sum. None: it cannot, or it takes too long. Harmless
        where nobody waits for it any more."""
        given = self._given.pop(number, None)
        if given is None:
            return
        file = Path(self._adders.file_of(number))
        if made is not None and sorted(made.tasks) == sorted(given.reports):
            reports = list(given.reports.values())
            self.arrived.append(ArrivedSum(file, given.round, made, reports))
        else:
            file.unlink(missing_ok=True)
            self._adders.forget(given.adder, number)
            self.returned.extend(given.reports.values())
        self._changed()

    def lost(self, adder: int) -> None:
        """This process is gone, with its partial sums."""
        for number in [key for key, each in self._given.items() if each.adder == adder]:
            self.collected(number, None)

    def forget(self) -> None:
        """The round is over."""
        for number, given in self._given.items():
            self._adders.forget(given.adder, number)
        for arrived in self.arrived:
            arrived.file.unlink(missing_ok=True)
        self._given.clear()
        self.arrived.clear()
        self.returned.clear()
        self._wanted.clear()

    def read(self, arrived: ArrivedSum) -> RoundSums | None:
        """Return the partial sum of the file, which is removed; None: it is damaged. In any
        thread."""
        wanted = sums_to_make(arrived.round)
        assert wanted is not None
        sums = make_sums(wanted)
        try:
            like = _room_for(arrived)
            tensors = read_sum(arrived.file, like, arrived.made.crc32)
            if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
                return None
            sums.load_tensors(tensors)
        except (StoreError, OSError, ValueError, KeyError, TypeError):
            return None
        finally:
            arrived.file.unlink(missing_ok=True)
        return sums


def _room_for(arrived: ArrivedSum) -> dict[str, NDArray[Any]]:
    """Return tensors like those of the file. Raises ValueError, TypeError where its layout is none:
    a gateway on another machine may say anything; OSError."""
    layout = [(name, np.dtype(dtype), size) for name, dtype, size in arrived.made.layout]
    if any(dtype.kind not in "fiu" or size < 0 for _, dtype, size in layout):
        raise ValueError("a partial sum has numbers alone")
    if sum(dtype.itemsize * size for _, dtype, size in layout) != arrived.file.stat().st_size:
        raise ValueError("the partial sum's file has another size than its layout")
    return {name: np.empty(size, dtype) for name, dtype, size in layout}


def _update_of(round: OpenRound, report: SpooledReport, columns: ReportColumns) -> UpdateToAdd:
    """Return how a report is added to the sums of its round."""
    factors, values = round.terms(columns)
    parts, largest = {}, columns.largest
    for part in round.rules.aggregators:
        if part in columns.parts:
            spooled = columns.update(part, 0)
            assert isinstance(spooled, SpooledUpdate)
            parts[part] = PartToAdd(
                spooled.part, spooled.begin, spooled.elements, float(largest[part][0])
            )
    return UpdateToAdd(
        report.task,
        report.spool_file,
        tuple(parts.values()),
        int(columns.weights[0]),
        float(factors[0]) if factors else 1.0,
        values.rows.tobytes() if BUFFERS in columns.parts else b"",
        float(values.factors[0]),
    )
