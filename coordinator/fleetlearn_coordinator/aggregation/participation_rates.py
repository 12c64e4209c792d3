"""Weights by inverse participation rate: an update weighs less, the more updates of its device
count.

Asynchronously a device that is ten times as fast has ten times as many updates, and the model goes
where fast devices want it. With n updates of a device in the last WINDOW rounds, its next one
weighs 1 / (n + 1), so that all updates of the device together weigh about as much as those of any
other. This is inverse probability weighting (Horvitz and Thompson, "A Generalization of Sampling
Without Replacement From a Finite Universe", Journal of the American Statistical Association
47(260), 1952) with the rates that are observed.

A weight depends on the rounds before the one for which the update counts, and not on that round
itself: it is the same in whatever order the round's updates come. Weights are whole numbers, so
that the mean stays exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 100
"""Rounds whose updates are counted, before the one for which an update counts. The ledger keeps the
reports of as many."""
FULL_WEIGHT = 2**20
"""The weight of an update whose device has no other."""


class ParticipationRates:
    """How many updates of each device counted lately."""

    def __init__(self) -> None:
        self.rounds: dict[int, Counter[str]] = {}
        """Round -> device -> updates that count for it. Older rounds than anybody asks for are
        forgotten."""

    def add(self, round: int, device: str) -> None:
        """An update of the device counts for this round."""
        if round not in self.rounds:
            self.rounds[round] = Counter()
            for old in [number for number in self.rounds if number < round - WINDOW]:
                del self.rounds[old]
        self.rounds[round][device] += 1

    def weight(self, round: int, device: str) -> int:
        """Return the weight of an update of the device that counts for this round."""
        rows = self.rounds.items()
        count = 1 + sum(
            counts[device] for number, counts in rows if round - WINDOW <= number < round
        )
        return max(1, (2 * FULL_WEIGHT + count) // (2 * count))  # rounded to the nearest


class UpdateWeights:
    """What the updates of a run's devices weigh in the mean, and what that depends on."""

    def __init__(self, most: int, rates: ParticipationRates | None = None) -> None:
        """``most``: the most that an update weighs. ``rates``: weights follow them; None: they
        follow the examples."""
        self.most, self.rates = most, rates

    def of(
        self, round: int, devices: Sequence[str], examples: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the weights of n updates that count for this round, (n,). ``examples``: the
        devices', (n,)."""
        if self.rates is None:
            return np.minimum(examples, self.most)
        return np.array([self.rates.weight(round, device) for device in devices], np.int64)

    def of_one(self, round: int, device: str, examples: int) -> int:
        """Return the weight of one update."""
        if self.rates is None:
            return min(examples, self.most)
        return self.rates.weight(round, device)

    def count(self, round: int, devices: Sequence[str]) -> None:
        """Updates of these devices are accepted, and count for this round."""
        if self.rates is not None:
            for device in devices:
                self.rates.add(round, device)
