"""Oort's arithmetic: Lai et al., "Oort: Efficient Federated Learning via Guided Participant
Selection" (OSDI 2021, arXiv 2010.06081), Algorithm 1 and equation 1.

The paper's statistical utility is |B| sqrt(1/|B| sum(loss^2)) over a device's examples. A training
step here gives the mean loss of a batch, not the loss of each example, so a report has the mean:
the utility is |B| * mean(loss). This is the paper's where all examples have the same loss, and less
where they differ (Jensen's inequality).

The temporal bonus of the paper, sqrt(0.1 ln R / L), is near 1 at most, and utilities are of any
size. Therefore utilities are divided by their limit first, as the authors' code does (it also
subtracts the smallest).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, log, sqrt

from fleetlearn_coordinator.rounds.selection_rules import Oort
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceRecord


def statistical_utility(record: DeviceRecord, most_examples: int) -> float:
    """Return |B| * mean loss of a device's last report. Examples above ``most_examples`` do not
    count; a loss below 0, which some losses can have, counts as 0."""
    if record.loss is None or record.examples is None:
        return 0.0
    return min(record.examples, most_examples) * max(0.0, record.loss)


def limit(utilities: Iterable[float], clip: float) -> float:
    """Return the quantile ``clip`` of the utilities: the largest one that counts. With at least two
    of them the greatest never counts in full if ``clip`` is below 1."""
    ordered = sorted(utilities)
    return ordered[int(clip * (len(ordered) - 1))] if ordered else 0.0


def utilities(
    records: Mapping[str, DeviceRecord],
    round: int,
    preferred: float,
    rules: Oort,
    most_examples: int,
) -> dict[str, float]:
    """Return the utility of each device, which have all reported.

    (min(U, limit) / limit + sqrt(0.1 ln R / L)) * (T / t)^alpha, with the last factor only for t >
    T. R: ``round``; L: the round of its last report; T: ``preferred``; t: the seconds of its last
    task.
    """
    statistical = {
        device: statistical_utility(record, most_examples) for device, record in records.items()
    }
    most = limit(statistical.values(), rules.clip)
    bonus = 0.1 * log(max(1, round))
    found: dict[str, float] = {}
    for device, record in records.items():
        value = min(statistical[device], most) / most if most else 0.0
        value += sqrt(bonus / (record.reported or 1))
        if record.seconds is not None and record.seconds > preferred:
            value *= (preferred / record.seconds) ** rules.penalty
        found[device] = value
    return found


def admitted(found: Mapping[str, float], count: int, cutoff: float) -> dict[str, float]:
    """Return the devices that may be drawn for ``count`` tasks: those with at least ``cutoff``
    times the utility of the one that comes next after the best ``count``, in the order of their
    names."""
    ordered = sorted(found.values(), reverse=True)
    least = cutoff * ordered[min(count, len(ordered) - 1)] if ordered else 0.0
    return {device: value for device, value in sorted(found.items()) if value >= least}


def sampling_order(found: Mapping[str, float], numbers: Sequence[int]) -> list[str]:
    """Return the devices as they are drawn one after the other, in proportion to their utilities:
    sorted by -ln(u) / utility, with u uniform on (0, 1] (Efraimidis and Spirakis, 2006).
    ``numbers``: 64 random bits for each."""
    keys = [
        (-log((number + 1) / 2**64) / max(value, 1e-300), device)
        for number, (device, value) in zip(numbers, found.items(), strict=True)
    ]
    return [device for _, device in sorted(keys)]


def exploration(round: int, rules: Oort) -> float:
    """Return epsilon: the share of a round's tasks for devices that have not reported yet."""
    return max(
        rules.exploration * rules.decay ** (round - 1),
        min(rules.exploration, rules.least_exploration),
    )


@dataclass(slots=True)
class Pacer:
    """The pacer of T. Where a window's utility is less than that of the window before, longer tasks
    are let in."""

    rules: Oort
    preferred: float = field(init=False)
    """T: the seconds that a task may take without a penalty."""
    history: deque[float] = field(init=False)
    """The statistical utilities of the last committed rounds, those of each added up, the newest
    last."""

    def __post_init__(self) -> None:
        self.preferred, self.history = self.rules.preferred, deque(maxlen=2 * self.rules.window)

    def end_round(self, version: int, utility: float) -> None:
        """A round was committed that made this model version."""
        self.history.append(utility)
        window = self.rules.window
        if version % window == 0 and len(self.history) == 2 * window:
            rows = [*self.history]
            if fsum(rows[:window]) > fsum(rows[window:]):
                self.preferred += self.rules.step
