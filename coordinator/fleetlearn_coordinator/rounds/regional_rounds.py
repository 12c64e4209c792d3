"""Hierarchical rounds: each region has a goal and a deadline of its own within the round, and what
its devices send goes on together or not at all.

After Liu et al., "Client-Edge-Cloud Hierarchical Federated Learning" (ICC 2020, arXiv 1905.06641),
with one aggregation in each region for each one of all regions (their kappa_2 = 1), and the rounds
of Bonawitz et al., "Towards Federated Learning at Scale" (arXiv 1902.01046), at both levels: of
devices in a region, and of regions in a round.

A *region* is a named set of devices. Its part of a round ends when it has its goal of reports, at
its deadline, or when it has its minimum and none of its devices has a task any more. With its
minimum it is *done*; with fewer reports it has *failed*, and contributes nothing. The round closes
when its goal of regions are done, when none is open any more, when too few can still be done, or at
its own deadline. A region that is open then is done if it has its minimum. So each straggling
region costs the round its own devices, and never more time than the region's deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.participation import (
    BufferedAsynchronous,
    SynchronousRounds,
    gathered,
)
from fleetlearn_coordinator.rounds.regional_book import RegionalBook
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.settings import RegionSettings, Settings
from fleetlearn_coordinator.rounds.strategies.regional_selection import RegionalSelection

End = Literal["goal", "deadline", "nobody", "round"]
"""Why a region's part of a round ends: it has its goal; its deadline has passed; it has its minimum
and no device has a task; the round closes."""
IN_WORDS: dict[End, str] = {
    "goal": "it has its goal",
    "deadline": "its deadline has passed",
    "nobody": "it has its minimum, and none of its devices has a task",
    "round": "the round is over",
}


class DueRegion(NamedTuple):
    """A region whose part of the open round is to end now."""

    name: str
    why: End


class RegionNow(NamedTuple):
    """How a region is doing, for people."""

    name: str
    reports: int
    """Of the open round."""
    goal: int
    minimum: int
    tasks: int
    """That run."""
    waiting: int
    """Connected devices that may be given a task."""
    done: bool | None
    """Whether its part of the open round is done, or has failed. None: it is not over."""
    seconds: float | None
    """Until its part of the open round ends at the latest. None: no round is open."""


@dataclass(slots=True)
class RegionalRounds:
    """Synchronous rounds with regions. The arguments named ``book`` are always the attribute's."""

    settings: Settings
    book: RegionalBook
    selection: RegionalSelection
    gather_until: float | None = None
    """When a round opens with fewer devices than the goals of all regions. None: fewer regions than
    needed have their minimum."""
    rules: dict[str, RegionSettings] = field(init=False)
    """By name, in the plan's order."""
    _goal: int = field(init=False)
    minimum: int = field(init=False)
    """Fewest regions that are done in a round that is committed."""

    def __post_init__(self) -> None:
        regions = self.settings.regions
        assert regions is not None
        self.rules = {rule.name: rule for rule in regions.regions}
        self._goal, self.minimum = regions.goal, regions.minimum

    # --- the round ---

    def may_open(self, idle: int, waiting: int, now: float) -> bool:
        """Return whether a round may open now: at once where each region has devices for its goal,
        else once enough regions have had their minimum for ``Settings.gather`` seconds."""
        here, rules = self.selection, self.rules.values()
        full = all(here.ready_in(rule.name) >= rule.goal for rule in rules)
        able = sum(here.waiting_in(rule.name) >= rule.minimum for rule in rules)
        return gathered(self, full, able >= self.minimum, now)

    def parts(self) -> Sequence[str | None]:
        """Return the regions that are open."""
        return [name for name in self.rules if name not in self.book.over]

    def done(self) -> list[str]:
        """Return the regions that are done, in the plan's order."""
        return [name for name in self.rules if self.book.over.get(name)]

    def wanted_reports(self, book: LeaseBook) -> int:
        """Return how many more reports the round takes. With 0 it closes."""
        opened, done = self.parts(), len(self.done())
        if done >= self._goal or done + len(opened) < self.minimum:
            return 0
        return sum(self._wanted(name) for name in opened if name is not None)

    def reports_together(self, book: LeaseBook) -> int:
        """Return how many reports may be counted together: with the last of them alone, a region
        may have its goal."""
        return min((self._wanted(name) for name in self.parts() if name is not None), default=0)

    def only_waits(self, book: LeaseBook) -> bool:
        return all(
            self.book.running[name] > 0 and self._wanted(name) > 0
            for name in self.parts()
            if name is not None
        )

    def nobody_is_left(self, book: LeaseBook) -> bool:
        """Return whether the round closes: what ended with its devices were regions."""
        return self.wanted_reports(book) <= 0

    def may_commit(self, book: LeaseBook) -> bool:
        return len(self.done()) >= self.minimum

    def too_few(self) -> str:
        """Return why the round is abandoned, for people."""
        done = self.done()
        which = f" ({', '.join(done)})" if done else ""
        are = "region is" if len(done) == 1 else "regions are"
        return f"{len(done)} {are} done{which}, {self.minimum} are the minimum"

    def goes_on(self, book: LeaseBook) -> bool:
        return False

    def ends_with_round(self, book: LeaseBook) -> Sequence[str]:
        return []  # they have ended with their regions

    def wake_at(self, deadline: float) -> float:
        ends = [self._deadline(name, deadline) for name in self.parts() if name is not None]
        return min(ends, default=deadline)

    # --- one region ---

    def free_slots(self, book: LeaseBook, region: str | None = None) -> int:
        assert region is not None
        there = self.book.running[region] + self.book.reported[region]
        return self.rules[region].cohort - there

    def lacking(self, book: LeaseBook, region: str | None = None) -> int:
        assert region is not None
        there = self.book.running[region] + self.book.reported[region]
        return min(self.rules[region].minimum - there, self.free_slots(book, region))

    def may_revive(self, book: LeaseBook, task: str) -> bool:
        region = book.lost[task][1].region
        return region not in self.book.over and self.free_slots(book, region) > 0

    def lease_ends(self, deadline: float, now: float, region: str | None = None) -> float:
        assert region is not None
        return self._deadline(region, deadline)

    def is_short(self, deadline: float, now: float, region: str | None = None) -> bool:
        assert region is not None
        return self._deadline(region, deadline) - now < self.rules[region].deadline / 2

    def due(self, deadline: float, now: float, *, filled: bool) -> list[DueRegion]:
        """Return the open regions that end now, in a round that ends at ``deadline``. ``filled``:
        free slots were given to whoever waits for one."""
        due = list[DueRegion]()
        for name in self.parts():
            assert name is not None
            if self._wanted(name) <= 0:
                due.append(DueRegion(name, "goal"))
            elif now >= self._deadline(name, deadline):
                due.append(DueRegion(name, "deadline"))
            elif filled and not self.book.running[name] and self._has_minimum(name):
                due.append(DueRegion(name, "nobody"))
        return due

    def end(self, name: str) -> bool:
        """End a region's part of the round. Returns whether it is done."""
        self.book.over[name] = self._has_minimum(name)
        return self.book.over[name]

    def in_numbers(self, deadline: float, now: float) -> list[RegionNow]:
        """Return how each region is doing, in the plan's order. ``deadline``: of the open round, or
        infinite where none is open."""
        return [
            RegionNow(
                name,
                self.book.reported[name],
                rule.goal,
                rule.minimum,
                self.book.running[name],
                self.selection.waiting_in(name),
                self.book.over.get(name),
                None if deadline == inf else max(0.0, self._deadline(name, deadline) - now),
            )
            for name, rule in self.rules.items()
        ]

    def _wanted(self, name: str) -> int:
        return self.rules[name].goal - self.book.reported[name]

    def _has_minimum(self, name: str) -> bool:
        return self.book.reported[name] >= self.rules[name].minimum

    def _deadline(self, name: str, deadline: float) -> float:
        """Return when a region's part ends of a round that ends at ``deadline``."""
        return deadline - (self.settings.deadline - self.rules[name].deadline)


Participation: TypeAlias = SynchronousRounds | BufferedAsynchronous | RegionalRounds


def book_of(settings: Settings) -> LeaseBook:
    """Return an empty lease book for the rounds that the settings ask for."""
    kind = LeaseBook if settings.regions is None else RegionalBook
    return kind(settings.grace, settings.stall, settings.outlive)


def participation_of(settings: Settings, book: LeaseBook, selection: Selection) -> Participation:
    """Return the policy that the settings ask for. Raises ValueError where they ask for regions in
    rounds whose leases outlive them."""
    if settings.regions is None:
        return (
            BufferedAsynchronous(settings) if settings.asynchronous else SynchronousRounds(settings)
        )
    if settings.outlive:
        raise ValueError("regions are for synchronous rounds that discard late updates")
    assert isinstance(book, RegionalBook)
    assert isinstance(selection, RegionalSelection)
    selection.book = book
    return RegionalRounds(settings, book, selection)
