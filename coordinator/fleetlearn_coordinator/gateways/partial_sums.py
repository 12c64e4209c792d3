"""The partial sums of a gateway: what the engine process had it add up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from fleetlearn_protocol.errors import FleetError, in_words

from fleetlearn_coordinator.aggregation.partial_sum import (
    PartialSum,
    UpdateToAdd,
    add_update,
    make_sums,
)
from fleetlearn_coordinator.aggregation.round_sums import RoundSums
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.storage.lent_spool import SpoolFolder
from fleetlearn_coordinator.storage.spooled_update import SpooledUpdate
from fleetlearn_coordinator.storage.sum_file import write_sum

SumsMessage: TypeAlias = wire.BeginSums | wire.AddToSums | wire.CollectSums | wire.ForgetSums


@dataclass(slots=True, eq=False)
class OwnSum:
    """A partial sum in memory."""

    sums: RoundSums
    present: bytes
    """As in ``SumsToMake``."""
    tasks: list[str] = field(default_factory=list)
    """Whose updates are in it."""
    broken: str = ""
    """Why it cannot be used; empty: it can be."""


class PartialSums:
    """All partial sums of this process. One thread does one thing after the other, in the order in
    which they were said."""

    def __init__(
        self,
        answer: Callable[[wire.PartialSumMade], None],
        added: Callable[[int], None] = lambda spool_file: None,
    ) -> None:
        """``answer``, ``added``: called in that thread; ``added`` with the number of each spool
        file whose update was added."""
        self._answer, self._added = answer, added
        self._thread = ThreadPoolExecutor(1, "partial sums")
        self._closed = False
        self._sums: dict[int, OwnSum] = {}
        self._spool = SpoolFolder(Path())
        self._folder = Path()

    def begin(self, spool: Path, folder: Path) -> None:
        """Another engine process, or this one again, knows of no partial sum. ``spool``: the folder
        of the spool files. ``folder``: where partial sums are written."""
        self._thread.submit(self._begin, spool, folder)

    def _begin(self, spool: Path, folder: Path) -> None:
        self._sums.clear()
        self._spool, self._folder = SpoolFolder(spool), folder

    def do(self, message: SumsMessage) -> None:
        """Do what the engine process says. What goes wrong is said in the answer."""
        if not self._closed:
            self._thread.submit(self._do, message)

    def close(self) -> None:
        """Do nothing more."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _do(self, message: SumsMessage) -> None:
        match message:
            case wire.BeginSums(number, wanted):
                self._sums[number] = OwnSum(make_sums(wanted), wanted.present)
            case wire.AddToSums(number, update):
                if (own := self._sums.get(number)) is not None and not own.broken:
                    self._add(own, update)
            case wire.CollectSums(number):
                self._answer(self._collect(number))
            case wire.ForgetSums(number):
                self._sums.pop(number, None)

    def _add(self, own: OwnSum, update: UpdateToAdd) -> None:
        parts = {
            each.part.name: SpooledUpdate(
                self._spool, update.spool_file, each.part, each.begin, each.elements
            )
            for each in update.parts
        }
        try:
            add_update(own.sums, update, parts, own.present)
        except (FleetError, OSError, ValueError) as error:
            own.broken = f"the update of {update.task}: {in_words(error)}"
        else:
            own.tasks.append(update.task)
            self._added(update.spool_file)

    def _collect(self, number: int) -> wire.PartialSumMade:
        own = self._sums.pop(number, None)
        if own is None or own.broken:
            text = "it is not there" if own is None else own.broken
            return wire.PartialSumMade(number, None, text)
        try:
            return wire.PartialSumMade(number, self._write(number, own), "")
        except OSError as error:
            return wire.PartialSumMade(number, None, in_words(error))

    def _write(self, number: int, own: OwnSum) -> PartialSum:
        tensors = own.sums.to_tensors()
        layout = tuple((name, each.dtype.str, each.size) for name, each in tensors.items())
        crc32 = write_sum(self._folder / str(number), tensors)
        return PartialSum(tuple(own.tasks), layout, crc32)
