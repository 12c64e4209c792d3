"""Pace steering: a limited number of devices stays connected; the others are told when to come
back.

After Bonawitz et al., "Towards Federated Learning at Scale: System Design" (arXiv 1902.01046,
section 2.3). What they want of it, and how it is reached here:

- Few devices should come together, so that a round has enough. Up to ``PaceSettings.connected``
  devices stay, also after their tasks: a newcomer takes the place of one of them. So a round never
  waits for devices to return, and a population that is smaller than this limit is never sent away.
- Of many devices no more should come at a time than are needed. Each return is booked: bookings
  follow each other at a rate (``Bookings``), so that the time until the next free one grows with
  the population. Nobody has to count it.
- The choice must be fair. Who had a task since it came goes first, or who may have none. Else a
  device goes that is drawn at random, the newcomer among them. No device is remembered once it has
  gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

from fleetlearn_coordinator.rounds.commands import SendAway
from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.random_draws import picks
from fleetlearn_coordinator.rounds.settings import PaceSettings

MEMORY = 3600.0
"""Seconds after which what was seen counts 1/e of what is seen now. Longer than most rounds, whose
tasks are given at once."""
MARGIN = 1.25
"""Devices that are told to come for each one that is needed. Some are offline at that time, and
come later."""
SHORTEST = 0.01
"""The shortest wait, as a part of the longest."""
FINISHED_LONGEST = 3600.0
"""Seconds after which a device of a finished run is to come back at the latest."""
BIN = 300.0
"""Seconds for which bookings are counted together."""


@dataclass(slots=True)
class Bookings:
    """When those return that were sent away. Times are seconds on the engine's clock.

    Returns are booked one after the other, ``MARGIN`` times as many per second as devices are
    needed: one for each task that is given, and one for each device that leaves by itself. Where a
    device would have to wait for longer than ``longest``, as many are booked as ``check_ins``
    allows. A coordinator that has seen nothing yet books as many, too: those who are told to come
    late cannot be called back earlier.
    """

    rules: PaceSettings
    free_from: float = 0.0
    """The first moment that is not booked."""
    expected: Counter[int] = field(default_factory=Counter)
    """Number of a bin -> how many were told to come in it."""
    _needed: float = field(init=False)
    """Devices needed so far; earlier ones count less."""
    _counted_at: float | None = None
    """None: nothing has been seen yet."""

    def __post_init__(self) -> None:
        self._needed = self.rules.check_ins * MEMORY / MARGIN

    def need(self, devices: int, now: float) -> None:
        """Note that this many devices are needed, in the place of others."""
        self._needed = self._needed_at(now) + devices
        self._counted_at = now

    def _needed_at(self, now: float) -> float:
        return (
            self._needed
            if self._counted_at is None
            else self._needed * exp((self._counted_at - now) / MEMORY)
        )

    def rate(self, now: float) -> float:
        """Return how many returns are booked per second."""
        least = 1 / self.rules.longest
        return min(max(MARGIN * self._needed_at(now) / MEMORY, least), self.rules.check_ins)

    def book(self, now: float, not_before: float = 0.0) -> float:
        """Return how long a device that is sent away now is to wait, in seconds. ``not_before``:
        how long it is not needed in any case."""
        wait = max(self.free_from - now, SHORTEST * self.rules.longest)
        if not_before > wait:  # the next free return is for another device
            wait = max(wait, min(not_before, self.rules.longest))
            self.expected[int((now + wait) // BIN)] += 1
            return wait
        rate = self.rules.check_ins if wait >= self.rules.longest else self.rate(now)
        self.free_from = now + wait + 1 / rate
        self.expected[int((now + wait) // BIN)] += 1
        return wait

    def away(self, now: float) -> int:
        """Return how many devices were told to come later than now, to the accuracy of a bin."""
        for number in [number for number in self.expected if number < now // BIN]:
            del self.expected[number]
        return self.expected.total()

    def snapshot(self) -> list[Any]:
        """Return the state as plain values: for ``take_up``."""
        return [self.free_from, self._needed, self._counted_at, [*self.expected.items()]]

    def take_up(self, taken: Sequence[Any]) -> None:
        """Go on from what another object's ``snapshot`` returned, on the same clock: to the last
        bit."""
        self.free_from, self._needed, self._counted_at, expected = taken
        self.expected = Counter(dict(expected))

    def state(self, now: float) -> dict[str, Any]:
        """Return the state for ``restore``, with times that count from now."""
        self.away(now)  # forgets what has passed
        ahead = [[(number + 0.5) * BIN - now, count] for number, count in self.expected.items()]
        return {
            "free_from": self.free_from - now,
            "needed": self._needed_at(now),
            "expected": ahead,
        }

    def restore(self, state: Mapping[str, Any], now: float) -> None:
        """Go on from a state whose times count from ``now``."""
        self.free_from, self._needed, self._counted_at = (
            now + state["free_from"],
            state["needed"],
            now,
        )
        self.expected = Counter(
            {int((now + ahead) // BIN): count for ahead, count in state["expected"]}
        )


@dataclass(slots=True)
class FinishedReturns:
    """When devices of a finished run come back: soon, so that the run goes on with them if its stop
    rules are changed, and one a second at most, up to an hour. Nobody has to know how many there
    are."""

    soonest: float
    """Seconds."""
    free_from: float = 0.0
    """The first moment that is not booked."""

    def book(self, now: float) -> float:
        """Return how long a device is to wait, in seconds, about: a device waits 0.5 to 1.5 times
        as long."""
        due = min(
            max(self.free_from, now + self.soonest), now + max(FINISHED_LONGEST, self.soonest)
        )
        self.free_from = due + 1.0
        return due - now


class Names:
    """Names that one can be drawn of in constant time."""

    __slots__ = ("_names", "_places")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, place: int) -> str:
        return self._names[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def add(self, name: str) -> None:
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)

    def discard(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return
        last = self._names.pop()
        if last != name:
            self._names[place], self._places[last] = last, place


@dataclass(slots=True)
class Pace:
    """Who stays connected."""

    rules: PaceSettings
    seed: int
    bookings: Bookings = field(init=False)
    present: set[str] = field(default_factory=set)
    """Connected devices that were not sent away."""
    fresh: Names = field(default_factory=Names)
    """Those of them that had no task since they came. Some may have one now."""
    served: Names = field(default_factory=Names)
    """Those of them that had one, and may have one now, and those that the plan's rules give none.
    Both leave out who must stay: a device with a task, or with an update that it has not reported
    yet."""
    with_update: set[str] = field(default_factory=set)
    """Present devices that may have such an update."""
    needed: int = 0
    """Devices that were needed since the last check-in."""
    draws: int = 0
    sent_away: int = 0
    """How many devices were told to come back, since the process began."""

    def __post_init__(self) -> None:
        self.bookings = Bookings(self.rules)

    def snapshot(self) -> dict[str, Any]:
        """Return who is there and what is booked, as plain values: for ``take_up``."""
        return {
            "present": sorted(self.present),
            "fresh": [*self.fresh],
            "served": [*self.served],
            "needed": self.needed,
            "draws": self.draws,
            "sent_away": self.sent_away,
            "bookings": self.bookings.snapshot(),
        }

    def take_up(self, taken: Mapping[str, Any]) -> None:
        """Go on from what another object's ``snapshot`` returned."""
        self.present = {*taken["present"]}
        for names, saved in ((self.fresh, taken["fresh"]), (self.served, taken["served"])):
            for name in saved:
                names.add(name)
        self.needed, self.draws, self.sent_away = (
            taken["needed"],
            taken["draws"],
            taken["sent_away"],
        )
        self.bookings.take_up(taken["bookings"])

    def check_in(
        self,
        device: str,
        books: Sequence[LeaseBook],
        now: float,
        *,
        has_update: bool = False,
        may_serve: bool = True,
        not_before: Callable[[str], float] | None = None,
    ) -> list[SendAway]:
        """The device is connected. Returns who is to leave for it: nobody while there is room, or
        another device, or itself. ``books``: the tasks of rounds, then those of each kind of
        exchange. ``has_update``: whether the device brings a finished update. ``may_serve``:
        whether it may be given a task in the next round; if not, it is the first to leave.
        ``not_before``: returns in how many seconds, at the earliest, a device may be given one."""
        self._forget(device)
        self.present.add(device)
        # It may still be training on a task that was taken from it, and get it back with its
        # update.
        if has_update or books[0].lost_of[device]:
            self.with_update.add(device)
        else:
            (self.fresh if may_serve else self.served).add(device)
        self.bookings.need(self.needed, now)
        self.needed = 0
        leaving = list[SendAway]()
        while len(self.present) > self.rules.connected:
            chosen = self._choose(books)
            if chosen is None:
                break
            self._forget(chosen)
            self.sent_away += 1
            least = 0.0 if not_before is None else not_before(chosen)
            leaving.append(SendAway(chosen, self.bookings.book(now, least)))
        return leaving

    def _choose(self, books: Sequence[LeaseBook]) -> str | None:
        for names in (self.served, self.fresh):
            while names:
                self.draws += 1
                device = names[picks(self.seed, 0, self.draws, 1, "pace")[0] % len(names)]
                if not any(device in book.tasks for book in books):
                    return device
                names.discard(device)  # until its task ends
        return None

    def disconnect(self, device: str) -> None:
        """The device's connection is gone."""
        if device in self.present:
            self._forget(device)
            self.needed += 1

    def withdraw(self, device: str) -> None:
        """The device serves another run of its coordinator from now on. No other device is needed
        for it: it comes back."""
        self._forget(device)

    def free(self, devices: Iterable[str]) -> None:
        """The tasks of these connected devices ended."""
        devices = list(devices)
        self.with_update.difference_update(devices)
        self.measured(devices)

    def measured(self, devices: Iterable[str]) -> None:
        """The tasks of these connected devices ended, of rounds or exchanges."""
        for device in devices:
            if device in self.present and device not in self.with_update:
                self.fresh.discard(device)
                self.served.add(device)
                self.needed += 1

    def status(self, now: float) -> dict[str, float]:
        """Return what people want to know, as numbers: devices that were sent away since the
        process began, how many are away, and in how many seconds the last of them was told to
        come."""
        away = self.bookings.away(now)
        return {
            "sent_away": self.sent_away,
            "away": away,
            "all_back_in": max(0.0, self.bookings.free_from - now),
        }

    def _forget(self, device: str) -> None:
        self.present.discard(device)
        self.with_update.discard(device)
        self.fresh.discard(device)
        self.served.discard(device)
