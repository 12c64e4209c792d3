"""Which spool files the engine process has lent to which gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleetlearn_coordinator.gateways.wire import LentFile
from fleetlearn_coordinator.storage.lent_spool import LendableSpool


class LentFiles:
    """The lent spool files of a run, ``each`` for a gateway at a time."""

    def __init__(
        self, spool: LendableSpool, each: int, releases: Callable[[int], bool] | None = None
    ) -> None:
        """``releases``: lets the run part from the begun upload in this spool file, whose bytes are
        still coming, and returns whether the run had it. Raises OSError."""
        self._spool, self._each = spool, each
        self._releases = releases or (lambda number: False)
        self._lent: dict[int, int] = {}
        """Number -> the gateway that has it."""
        spool.begin_lending()

    def lend(self, gateway: int) -> list[LentFile]:
        """Return the files that the gateway may write from now on too: as many as it lacks and
        there is room for. Raises OSError."""
        lacking = self._each - sum(one == gateway for one in self._lent.values())
        lent = []
        while lacking > 0 and self._spool.has_room():
            lent.append(self.hand_over(gateway, self._spool.take_spool_file()))
            lacking -= 1
        return lent

    def claim(self, gateway: int, files: Iterable[LentFile]) -> list[int]:
        """The gateway, which has just said hello, has these files. Returns the numbers of those
        that are others' by now."""
        lost = []
        for file in files:
            number, mark = file.number, file.mark
            # A start took up what a checkpoint says of an upload that went on meanwhile.
            if self._spool.claim_spool_file(number, mark) or (
                number not in self._lent
                and self._spool.has_spool_file(number, mark)
                and self._releases(number)
            ):
                self._lent[number] = gateway
            else:
                lost.append(file.number)
        return lost

    def hand_over(self, gateway: int, number: int) -> LentFile:
        """Lend a file that the run has."""
        self._lent[number] = gateway
        return LentFile(number, self._spool.mark_spool_file(number))

    def has(self, gateway: int, number: int) -> bool:
        """Return whether this file is lent to the gateway."""
        return self._lent.get(number) == gateway

    def take_back(self, number: int) -> None:
        """The file, with its bytes, is the run's again."""
        del self._lent[number]

    def take_back_all(self, gateway: int) -> list[int]:
        """The gateway is lost. Returns the files that it had, which are the run's again."""
        numbers = [number for number, one in self._lent.items() if one == gateway]
        for number in numbers:
            del self._lent[number]
            self._spool.distrust_spool_file(number)
        return numbers
