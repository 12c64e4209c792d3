"""What devices' updates were worth over rounds, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, sqrt
from statistics import mean, stdev

import msgspec
from msgspec.structs import replace

from fleetlearn_coordinator.quality.outliers import corrected
from fleetlearn_coordinator.quality.student import log10_two_sided

FEWEST_ROUNDS = 3
"""Rounds from which on it is said how sure a device's worth is."""


class ContributionFinding(msgspec.Struct, frozen=True):
    """What a device's updates were worth, in the loss on held-out data: above 0, the loss fell."""

    device: str
    rounds: int
    """Rounds in which that was measured."""
    shapley: float
    """The mean of its Shapley values."""
    error: float
    """The standard error of that mean, from round to round; 0 of one round."""
    left_out: float
    """By how much the round's model is better than the model of all other devices, on average."""
    log10_p: float
    """log10 of how probable a mean as far from 0 is by chance, corrected for all devices; 0 with
    fewer than three rounds."""


def worth_over_rounds(
    rows: Mapping[str, Sequence[tuple[float, float]]],
) -> list[ContributionFinding]:
    """Return the worth of each device, the least first. ``rows``: device -> its Shapley value and
    by how much it is missed (``leave_one_out``), a row for each round."""
    found = []
    for device, values in rows.items():
        own, missed = ([pair[place] for pair in values] for place in (0, 1))
        count, middle = len(values), mean(own)
        error = stdev(own) / sqrt(count) if count > 1 else 0.0
        log10_p = 0.0
        if count >= FEWEST_ROUNDS and middle:
            log10_p = log10_two_sided(middle / error, count - 1) if error else -inf
        found.append(ContributionFinding(device, count, middle, error, mean(missed), log10_p))
    p_values = corrected([each.log10_p for each in found])
    most = 1e300  # JSON has no infinity
    judged = zip(found, p_values, strict=True)
    return sorted(
        (replace(each, log10_p=max(p, -most)) for each, p in judged), key=lambda each: each.shapley
    )
