"""Whose features are unlike the fleet's, from the moments of each feature on each device."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_coordinator.quality.outliers import DeviceFigure, Unlikeness, corrected, unlikeness

FEWEST_ROWS = 8
"""Rows of a device below which its features are not judged."""
What = Literal["mean", "spread", "missing"]


class FeatureMoments(NamedTuple):
    """What a device says of its features, each (F,). Values that are missing (not finite) are
    counted, and are in no moment."""

    rows: int
    missing: NDArray[np.int64]
    means: NDArray[np.float64]
    variances: NDArray[np.float64]
    """Of the population: means of squared distances from the mean."""
    fourths: NDArray[np.float64]
    """Means of the fourth powers of these distances."""


class Drift(NamedTuple):
    """A feature of a device that is unlike the same feature of the others."""

    device: str
    feature: int
    what: What
    """``spread``: the standard deviation."""
    found: Unlikeness
    """With the p-value corrected for all devices and features."""


def feature_drifts(fleet: Mapping[str, FeatureMoments], alarm: float) -> list[Drift]:
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
        if p < log10(alarm)
    ]
    return sorted(drifts, key=lambda each: (each.found.log10_p, -abs(each.found.deviations)))


def _looked_at(fleet: Mapping[str, FeatureMoments]) -> list[What]:
    """Return what of the features is judged. Each number that is looked at makes all p-values
    larger: where no value is missing anywhere, that is not looked at."""
    if any(each.missing.any() for each in fleet.values()):
        return ["mean", "spread", "missing"]
    return ["mean", "spread"]


def _numbers(fleet: Mapping[str, FeatureMoments], what: What) -> list[dict[str, DeviceFigure]]:
    """Return feature -> device -> its number."""
    features = max((len(each.means) for each in fleet.values()), default=0)
    return [_numbers_of(fleet, feature, what) for feature in range(features)]


def _numbers_of(
    fleet: Mapping[str, FeatureMoments], feature: int, what: What
) -> dict[str, DeviceFigure]:
    rows = {
        device: each.rows - (0 if what == "missing" else int(each.missing[feature]))
        for device, each in fleet.items()
        if feature < len(each.means)
    }
    judged = {device: fleet[device] for device, count in rows.items() if count >= FEWEST_ROWS}
    if what == "missing":
        shares = {device: each.missing[feature] / each.rows for device, each in judged.items()}
        return {
            device: DeviceFigure(share, sqrt(share * (1 - share) / rows[device]))
            for device, share in shares.items()
        }
    if what == "mean":
        return {
            device: DeviceFigure(
                float(each.means[feature]), sqrt(each.variances[feature] / (rows[device] - 1))
            )
            for device, each in judged.items()
        }
    return _spreads(judged, rows, feature)


def _spreads(
    judged: Mapping[str, FeatureMoments], rows: Mapping[str, int], feature: int
) -> dict[str, DeviceFigure]:
    """Return the standard deviations. The error of one follows from the fleet's kurtosis k: s
    sqrt((k - 1) / n) / 2 (the delta method). So a value that is rare, as ink is in the corner of an
    image, accuses nobody who has none of it. Empty where most devices always have the same value:
    nobody knows then how much is usual."""
    variances = {device: float(each.variances[feature]) for device, each in judged.items()}
    if sum(each > 0 for each in variances.values()) <= len(variances) / 2:
        return {}
    every = sum(rows[device] for device in judged)
    within = sum(rows[device] * variances[device] for device in judged) / every
    fourth = sum(rows[device] * float(judged[device].fourths[feature]) for device in judged) / every
    if not within:
        return {}
    kurtosis = max(1.0, fourth / within / within)  # within^2 may be too small for a double
    return {
        device: DeviceFigure(sqrt(variance), sqrt(within * (kurtosis - 1) / rows[device]) / 2)
        for device, variance in variances.items()
    }
