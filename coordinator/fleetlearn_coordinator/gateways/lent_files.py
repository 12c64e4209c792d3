"""Which spool files the engine process has lent to which gateway, and which objects gateways on
other machines put."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.gateways.wire import LentFile
from fleetlearn_coordinator.storage.arrived import (
    HELLOS,
    PUTS,
    first_number,
    is_arrived,
)
from fleetlearn_coordinator.storage.lent_spool import ArrivedSpool, LendableSpool


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
        self._hellos = 0
        self._puts: dict[int, range] = {}
        """Gateway on another machine -> numbers of the objects that it may put."""
        self._used: dict[int, bytearray] = {}
        """The same gateway -> for each of those numbers, whether the run has the object."""
        spool.begin_lending()

    def begin_puts(self, gateway: int, spool: ArrivedSpool) -> int:
        """The gateway, which has just said hello, puts objects in place of writing files. Returns
        the first number of PUTS that it may use. Raises FleetError where there are no more."""
        if self._hellos == HELLOS:
            text = f"gateways have connected {HELLOS} times: start the coordinator again"
            raise FleetError(Code.BUSY, text)
        first = first_number(spool.generation, self._hellos)
        self._hellos += 1
        self._puts[gateway] = range(first, first + PUTS)
        self._used[gateway] = bytearray(PUTS)
        return first

    def may_be_put(self) -> PutNumbers:
        """Return the numbers of objects that gateways may be putting, now or after the next
        hellos."""
        spool = self._spool
        assert isinstance(spool, ArrivedSpool)
        return PutNumbers(list(self._puts.values()), first_number(spool.generation, self._hellos))

    def lend(self, gateway: int) -> list[LentFile]:
        """Return the files that the gateway may write from now on too: as many as it lacks and
        there is room for. Raises OSError."""
        if gateway in self._puts:
            return []
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
        """Return whether this file is lent to the gateway, or this object is one of its own that
        the run does not have: each is asked for once."""
        puts = self._puts.get(gateway)
        if puts is None:
            return self._lent.get(number) == gateway
        return number in puts and not self._used[gateway][number - puts.start]

    def take_back(self, number: int) -> None:
        """The file, with its bytes, is the run's again; or the object is."""
        if is_arrived(number):
            assert isinstance(self._spool, ArrivedSpool)
            self._spool.take_arrived(number)
            for gateway, puts in self._puts.items():
                if number in puts:
                    self._used[gateway][number - puts.start] = True
        else:
            del self._lent[number]

    def take_back_all(self, gateway: int) -> list[int]:
        """The gateway is lost. Returns the files that it had, which are the run's again. What it
        puts from now on counts for nothing."""
        self._puts.pop(gateway, None)
        self._used.pop(gateway, None)
        numbers = [number for number, one in self._lent.items() if one == gateway]
        for number in numbers:
            del self._lent[number]
            self._spool.distrust_spool_file(number)
        return numbers


class PutNumbers:
    """Numbers of objects: ranges, and all from one number on."""

    def __init__(self, ranges: list[range], rest: int) -> None:
        """``rest``: the first number that no gateway was given. Whoever looks takes a while, and
        gateways say hello meanwhile."""
        self._ranges, self._rest = ranges, rest

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return number >= self._rest or any(number in each for each in self._ranges)
