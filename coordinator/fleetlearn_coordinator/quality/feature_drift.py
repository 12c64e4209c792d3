"""Whose features are unlike the fleet's, from sums alone: count, sum and sum of squares of each
feature on each device."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_coordinator.quality.outliers import DeviceFigure, Unlikeness, corrected, unlikeness

FEWEST_ROWS = 8
"""Rows of a device below which its features are not judged."""
What = Literal["mean", "spread", "missing"]


class FeatureSums(NamedTuple):
    """What a device says of its features. Missing values (NaN) are counted, and are in no sum."""

    rows: int
    missing: NDArray[np.int64]
    """(F,)"""
    sums: NDArray[np.float64]
    """(F,)"""
    squares: NDArray[np.float64]
    """(F,)"""


class Drift(NamedTuple):
    """A feature of a device that is unlike the same feature of the others."""

    device: str
    feature: int
    what: What
    """``spread``: the natural logarithm of the standard deviation."""
    found: Unlikeness
    """With the p-value corrected for all devices and features."""


def feature_drifts(fleet: Mapping[str, FeatureSums], alarm: float) -> list[Drift]:
    """Return the features whose corrected p-value is below ``alarm``, the surest first."""
    looked = [
        Drift(device, feature, what, unlike)
        for what in _looked_at(fleet)
        for feature, numbers in enumerate(_numbers(fleet, what))
        for device, unlike in unlikeness(numbers).items()
    ]
    p_values = corrected([each.found.log10_p for each in looked])
    drifts = [
        each._replace(found=each.found._replace(log10_p=p))
        for each, p in zip(looked, p_values, strict=True)
        if p < log(alarm) / log(10.0)
    ]
    return sorted(drifts, key=lambda each: (each.found.log10_p, -abs(each.found.deviations)))


def _looked_at(fleet: Mapping[str, FeatureSums]) -> list[What]:
    """Return what of the features is judged. Each number that is looked at makes all p-values
    larger: where no value is missing anywhere, that is not looked at."""
    if any(each.missing.any() for each in fleet.values()):
        return ["mean", "spread", "missing"]
    return ["mean", "spread"]


def _numbers(fleet: Mapping[str, FeatureSums], what: What) -> list[dict[str, DeviceFigure]]:
    """Return feature -> device -> its number."""
    features = max((len(each.sums) for each in fleet.values()), default=0)
    found: list[dict[str, DeviceFigure]] = [{} for _ in range(features)]
    for device, sums in fleet.items():
        for feature in range(len(sums.sums)):
            number = _number(sums, feature, what)
            if number is not None:
                found[feature][device] = number
    return found


def _number(sums: FeatureSums, feature: int, what: What) -> DeviceFigure | None:
    missing = int(sums.missing[feature])
    rows = sums.rows - missing
    if what == "missing":
        if sums.rows < FEWEST_ROWS:
            return None
        share = missing / sums.rows
        return DeviceFigure(share, sqrt(share * (1 - share) / sums.rows))
    if rows < FEWEST_ROWS:
        return None
    mean = float(sums.sums[feature]) / rows
    variance = max(0.0, float(sums.squares[feature]) / rows - mean * mean) * rows / (rows - 1)
    if what == "mean":
        return DeviceFigure(mean, sqrt(variance / rows))
    # A sensor that always says the same has no spread: as far below the others as float32 tells.
    deviation = max(sqrt(variance), 1e-7 * max(1.0, abs(mean)))
    return DeviceFigure(log(deviation), 1 / sqrt(2 * (rows - 1)))
