"""Which devices are unlike the others, by one number of each, and how sure that is.

Devices' data are never alike: with enough examples any two devices differ "significantly". So a
device is held against how much the *others* differ among themselves, not against the error of its
own number alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, inf, log10, sqrt
from typing import NamedTuple

from fleetlearn_coordinator.quality.student import log10_two_sided

FEWEST = 4
"""Devices with a number below which nothing can be said: two others would have to tell both where
the middle is and how far is far."""


class DeviceFigure(NamedTuple):
    """One number of one device."""

    value: float
    error: float = 0.0
    """Its standard error, from the device's own examples."""


class Unlikeness(NamedTuple):
    """How a device's number lies among those of the others."""

    value: float
    others: float
    """The mean of the others' numbers."""
    deviations: float
    """How far it is from them, in standard deviations of the others' numbers."""
    log10_p: float
    """log10 of the probability of a number as far away, if the device were one of the others."""


def unlikeness(numbers: Mapping[str, DeviceFigure]) -> dict[str, Unlikeness]:
    """Return how each device lies among the others. Empty with fewer than FEWEST devices.

    The n - 1 others have the mean m and the sample standard deviation s. One more of them would lie
    at m + s sqrt(1 + 1 / (n - 1)) t, t with n - 2 degrees of freedom (the prediction interval of a
    normal sample; Grubbs 1950 is the same test without leaving the device out). A device whose own
    number has a larger error than the others differ is judged by that error.
    """
    if len(numbers) < FEWEST:
        return {}
    found = {}
    for device, own in numbers.items():
        others = [each.value for name, each in numbers.items() if name != device]
        count = len(others)
        mean = fsum(others) / count
        variance = fsum((each - mean) ** 2 for each in others) / (count - 1)
        spread = sqrt(max(variance * (1 + 1 / count), own.error**2 + variance / count))
        distance = own.value - mean
        if spread == 0.0:
            deviations, log10_p = (0.0, 0.0) if distance == 0.0 else (inf, -inf)
        else:
            deviations = distance / sqrt(variance) if variance > 0 else distance / spread
            log10_p = log10_two_sided(distance / spread, count - 1)
        found[device] = Unlikeness(own.value, mean, deviations, log10_p)
    return found


def corrected(log10_p: Sequence[float]) -> list[float]:
    """Return the logarithms of Holm's corrected p-values, in the same order (Holm, "A simple
    sequentially rejective multiple test procedure", 1979): with m numbers looked at, one of them is
    below p by chance with a probability of at most p."""
    m = len(log10_p)
    order = sorted(range(m), key=lambda place: log10_p[place])
    found, most = [0.0] * m, -inf
    for rank, place in enumerate(order):
        most = max(most, min(0.0, log10_p[place] + log10(m - rank)))
        found[place] = most
    return found
