"""Participation: when a round opens and ends, how many tasks may be given, and which leases end
with the round.

Participation is a policy over the lease book. It reads the book and changes nothing there. Each
policy has the same methods: the two here, and the one of rounds with regions (regional_rounds.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.settings import Settings

NO_REGIONS = (None,)
"""The parts of a round whose slots are given alike, where it has no regions."""
TOGETHER = 100
"""Asynchronously, slots that come free are given together as soon as one in this number is free. To
choose a device and to tell it its task alone costs several times as much as among a hundred, and
the others wait for a hundredth of the time that a task takes."""


class GatheringRounds(Protocol):
    """Rounds that wait for more devices than their minimum."""

    settings: Settings
    gather_until: float | None


def gathered(rounds: GatheringRounds, goal: bool, minimum: bool, now: float) -> bool:
    """Return whether a round may open: at once where the ``goal`` is there, else once the
    ``minimum`` has been there for ``Settings.gather`` seconds."""
    if not goal:
        if not minimum:
            rounds.gather_until = None
            return False
        if rounds.gather_until is None:
            rounds.gather_until = now + rounds.settings.gather
        if now < rounds.gather_until:
            return False
    rounds.gather_until = None
    return True


@dataclass(slots=True)
class SynchronousRounds:
    """Synchronous rounds after Bonawitz et al., "Towards Federated Learning at Scale" (arXiv
    1902.01046).

    More devices than the goal get tasks, the round closes at the goal or at its deadline, and below
    the minimum it is abandoned. All leases end with the round, so each update is of the round's own
    model and none is stale. With ``Settings.carry`` they go on for up to a deadline more: an update
    that comes late counts in the round that is open then, or in the next one to open.
    """

    settings: Settings
    gather_until: float | None = None
    """When a round opens with fewer devices than its goal; None: fewer than the minimum are
    there."""
    fleet_is_there: bool = False
    """Whether a round has opened, and none had to wait for its minimum since. After a start, and
    after such a wait, the devices that come first are no measure of the fleet
    (``Settings.share``)."""

    def may_open(self, idle: int, waiting: int, now: float) -> bool:
        """Return whether a round may open now. ``waiting`` devices are there; ``idle`` of them are
        not in doubt. Early reports and leases of the round before count for both."""
        rule = self.settings
        # Where the goal is there, devices that check in later fill what is free.
        is_full, share = idle >= rule.goal, rule.share
        if share is not None and rule.goal < share.most:  # later ones would make it larger
            is_full = is_full and self.fleet_is_there
        opens = gathered(self, is_full, waiting >= rule.minimum, now)
        self.fleet_is_there = opens or (self.fleet_is_there and waiting >= rule.minimum)
        return opens

    def parts(self) -> Sequence[str | None]:
        """Return the parts of the open round that take devices: its open regions, by name, or None
        for the whole of a round that has no regions."""
        return NO_REGIONS

    def free_slots(self, book: LeaseBook, region: str | None = None) -> int:
        """Return how many tasks may be given now, in this part of the round."""
        return self.settings.cohort - len(book.tasks) - len(book.accepted)

    def lacking(self, book: LeaseBook, region: str | None = None) -> int:
        """Return how many more tasks must run for the round, or this region of it, to have a
        model."""
        return min(
            self.settings.minimum - len(book.tasks) - len(book.accepted), self.free_slots(book)
        )

    def may_revive(self, book: LeaseBook, task: str) -> bool:
        """Return whether a lost device, which returns with the work of this task done, may have a
        slot again."""
        return self.free_slots(book) > 0

    def lease_ends(self, deadline: float, now: float, region: str | None = None) -> float:
        """Return when a lease that is given now ends at the latest, in a round that ends at
        ``deadline``."""
        return deadline + self.settings.deadline if self.settings.carry else deadline

    def is_short(self, deadline: float, now: float, region: str | None = None) -> bool:
        """Return whether a lease that is given now is short (``Terms.short``)."""
        return deadline - now < self.settings.deadline / 2

    def wake_at(self, deadline: float) -> float:
        """Return when the open round, which ends at ``deadline``, is next looked at."""
        return deadline

    def wanted_reports(self, book: LeaseBook) -> int:
        """Return how many more reports the round takes. With the last of them it closes."""
        return self.settings.goal - len(book.accepted)

    def reports_together(self, book: LeaseBook) -> int:
        """Return how many reports may be counted together, since nothing but the last of them has a
        consequence."""
        return self.wanted_reports(book)

    def only_waits(self, book: LeaseBook) -> bool:
        """Return whether the open round, whose reports alone have changed, goes on as it is: no
        device can be given a task, and the round does not close."""
        return len(book.tasks) > 0 and self.wanted_reports(book) > 0

    def nobody_is_left(self, book: LeaseBook) -> bool:
        """Return whether the round closes below its goal, since no device has a task any more."""
        return not book.tasks and self.may_commit(book)

    def may_commit(self, book: LeaseBook) -> bool:
        """Return whether the round has enough reports for a new model."""
        return len(book.accepted) >= self.settings.minimum

    def goes_on(self, book: LeaseBook) -> bool:
        """Return whether the round goes on after its deadline."""
        return False

    def ends_with_round(self, book: LeaseBook) -> Sequence[str]:
        """Return the devices whose leases end when the round closes."""
        return [] if self.settings.carry else list(book.tasks)


@dataclass(slots=True)
class BufferedAsynchronous:
    """Buffered asynchronous training after Nguyen et al., "Federated Learning with Buffered
    Asynchronous Aggregation" (arXiv 2106.06639), Algorithm 1.

    A round is the time that its buffer takes to fill. Tasks are given at any time, as many at a
    time as ``Settings.cohort`` (the paper's concurrency), and go on when a round ends. Where that
    is 200 or more, slots are given as soon as a hundredth of them is free (``TOGETHER``). With
    every ``Settings.goal`` updates (its K), from whatever versions they began, the round is
    committed. At its deadline a round is committed with the minimum, and goes on with fewer; it is
    never abandoned."""

    settings: Settings
    gather_until: float | None = None
    """Always None: no round waits for devices to gather."""

    def may_open(self, idle: int, waiting: int, now: float) -> bool:
        return waiting > 0

    def parts(self) -> Sequence[str | None]:
        return NO_REGIONS

    def free_slots(self, book: LeaseBook, region: str | None = None) -> int:
        free = self.settings.cohort - len(book.tasks)
        return free if free >= self.settings.cohort // TOGETHER else 0

    def lacking(self, book: LeaseBook, region: str | None = None) -> int:
        return min(
            self.settings.goal - len(book.tasks) - len(book.accepted),
            self.settings.cohort - len(book.tasks),
        )

    def may_revive(self, book: LeaseBook, task: str) -> bool:
        return True  # its work is done: it only has to be sent

    def lease_ends(self, deadline: float, now: float, region: str | None = None) -> float:
        return now + self.settings.deadline

    def is_short(self, deadline: float, now: float, region: str | None = None) -> bool:
        return False  # each has a deadline of its own

    def wake_at(self, deadline: float) -> float:
        return deadline

    def wanted_reports(self, book: LeaseBook) -> int:
        return self.settings.goal - len(book.accepted)

    def reports_together(self, book: LeaseBook) -> int:
        slots = len(book.tasks) + self.settings.cohort // TOGETHER - self.settings.cohort
        return min(self.wanted_reports(book), max(1, slots))

    def only_waits(self, book: LeaseBook) -> bool:
        return False

    def nobody_is_left(self, book: LeaseBook) -> bool:
        return False

    def may_commit(self, book: LeaseBook) -> bool:
        return len(book.accepted) >= self.settings.minimum

    def goes_on(self, book: LeaseBook) -> bool:
        return not self.may_commit(book)

    def ends_with_round(self, book: LeaseBook) -> Sequence[str]:
        return []
