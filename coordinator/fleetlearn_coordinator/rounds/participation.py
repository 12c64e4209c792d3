"""Participation: when a round opens and ends, how many tasks may be given, and which leases end with the round.

Participation is a policy over the lease book. It reads the book and changes nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.settings import Settings


@dataclass(slots=True)
class SynchronousRounds:
    """Synchronous rounds after Bonawitz et al., "Towards Federated Learning at Scale" (arXiv 1902.01046).

    More devices than the goal get tasks, the round closes at the goal or at its deadline, and below the minimum it is
    abandoned. All leases end with the round, so each update is of the round's own model and none is stale.
    """

    settings: Settings
    gather_until: float | None = None
    """When a round opens with fewer devices than its goal; None: fewer than the minimum are there."""

    def may_open(self, idle: int, waiting: int, now: float) -> bool:
        """Return whether a round may open now. ``waiting`` devices are there; ``idle`` of them are not in doubt."""
        if idle < self.settings.goal:  # else devices that check in later fill what is free
            if waiting < self.settings.minimum:
                self.gather_until = None
                return False
            if self.gather_until is None:
                self.gather_until = now + self.settings.gather
            if now < self.gather_until:
                return False
        self.gather_until = None
        return True

    def free_slots(self, book: LeaseBook) -> int:
        """Return how many tasks may be given now."""
        return self.settings.cohort - len(book.tasks) - len(book.accepted)

    def wanted_reports(self, book: LeaseBook) -> int:
        """Return how many more reports the round takes. With the last of them it closes."""
        return self.settings.goal - len(book.accepted)

    def nobody_is_left(self, book: LeaseBook) -> bool:
        """Return whether the round closes below its goal, since no device has a task any more."""
        return not book.tasks and self.may_commit(book)

    def may_commit(self, book: LeaseBook) -> bool:
        """Return whether the round has enough reports for a new model."""
        return len(book.accepted) >= self.settings.minimum

    def ends_with_round(self, book: LeaseBook) -> Sequence[str]:
        """Return the devices whose leases end when the round closes."""
        return list(book.tasks)
