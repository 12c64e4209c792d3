"""Quotas: how many tasks of a round go to devices with a label at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(slots=True)
class Quotas:
    """The tasks that were given in the open round, by label."""

    shares: Mapping[str, float]
    """Label -> largest share of the round's tasks."""
    size: int
    """Tasks of a usual round. A quota is a share of this number, or of the tasks that were given if
    they are more."""
    given: Counter[str] = field(default_factory=Counter)
    total: int = 0
    """Tasks that were given, to any device."""
    exact: dict[str, Fraction] = field(init=False)
    """The shares as they are written: 0.29 of 100 is 29."""

    def __post_init__(self) -> None:
        self.exact = {label: Fraction(str(share)) for label, share in self.shares.items()}

    def labels_of(self, labels: Collection[str]) -> tuple[str, ...]:
        """Return those of a device's labels that have a quota."""
        return tuple(label for label in self.shares if label in labels) if self.shares else ()

    def left(self, label: str) -> int:
        """Return how many tasks devices with this label may be given next."""
        share = self.exact[label]
        most = max(self.size, self.total + 1)
        return share.numerator * most // share.denominator - self.given[label]

    def has_room(self, labels: Iterable[str]) -> bool:
        """Return whether a device with these labels may be given a task."""
        return all(self.left(label) > 0 for label in labels)

    def count(self, labels: Iterable[str]) -> None:
        """A device with these labels is given a task."""
        self.total += 1
        self.given.update(labels)

    def begin_round(self) -> None:
        """Forget the tasks of the round before."""
        self.given.clear()
        self.total = 0
