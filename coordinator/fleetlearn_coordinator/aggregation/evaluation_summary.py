"""What devices measured in an evaluation, put together: means per example, and quantiles over
devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fleetlearn_protocol.messages import Evaluation
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.round_summary import (
    NOTHING,
    Bounds,
    Measurements,
    evaluation_of,
    possible,
    summarise,
)

QUANTILES = {"p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9}
FEWEST_DEVICES = 20
"""A quantile says something of single devices. With fewer devices than this, a group has no
quantiles, and of a tier only the number of its devices is shown."""


def summarise_evaluation(
    results: Sequence[Evaluation],
    tiers: Sequence[str],
    names: Sequence[str],
    max_weight: int,
    bounds: Bounds,
) -> dict[str, Any]:
    """Return an evaluation's summary. ``results`` and ``tiers`` have a row for each device, in any
    order.

    ``devices``, ``examples``: how many. ``metrics``: the mean of each per example, where a device
    counts for at most ``max_weight`` examples, and devices whose mean is beyond the metric's bounds
    are left out. ``behind``, ``left_out``: how many devices each metric has, and lacks for that
    reason. ``quantiles``: of the devices' own means, each device counting once. ``tiers``: the same
    for the devices of each tier.
    """
    measured = evaluation_of(results, names, max_weight)
    groups = np.array(tiers, dtype=object)
    found = summarise(NOTHING, measured, bounds)
    return {
        "devices": len(results),
        "examples": int(measured.weights.sum()),
        **{key: found[key] for key in ("metrics", "behind", "left_out")},
        "quantiles": quantiles_of(measured, bounds),
        "tiers": {
            tier: _of_tier(_select(measured, groups == tier), bounds) for tier in sorted({*tiers})
        },
    }


def summarise_members(
    results: Sequence[Evaluation],
    members: Sequence[str],
    names: Sequence[str],
    max_weight: int,
    bounds: Bounds,
) -> dict[str, Any]:
    """Return for each member of a family what the devices measured that train it: ``devices``, and
    the ``metrics`` as ``summarise_evaluation`` has them. ``members``: the member of each result;
    the others as there."""
    found = {}
    for member in sorted({*members}):
        own = [each for each, of in zip(results, members, strict=True) if of == member]
        measured = evaluation_of(own, names, max_weight)
        metrics = summarise(NOTHING, measured, bounds)["metrics"]
        found[member] = {"devices": len(own), "metrics": metrics}
    return found


def quantiles_of(measured: Measurements, bounds: Bounds) -> dict[str, dict[str, float]]:
    """Return the quantiles of the devices' means of each metric that at least FEWEST_DEVICES have,
    interpolated linearly (Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996),
    definition 7; numpy's default)."""
    found = {}
    for name, sums in measured.sums.items():
        means = sums / np.maximum(measured.weights, 1)
        means = means[np.isfinite(means) & possible(bounds, name, means)]
        if len(means) >= FEWEST_DEVICES:
            values = np.quantile(means, list(QUANTILES.values())).tolist()
            found[name] = dict(zip(QUANTILES, values, strict=True))
    return found


def _of_tier(measured: Measurements, bounds: Bounds) -> dict[str, Any]:
    devices = len(measured.weights)
    if devices < FEWEST_DEVICES:
        return {"devices": devices}
    return {
        "devices": devices,
        "examples": int(measured.weights.sum()),
        "metrics": summarise(NOTHING, measured, bounds)["metrics"],
        "quantiles": quantiles_of(measured, bounds),
    }


def _select(measured: Measurements, rows: NDArray[np.bool_]) -> Measurements:
    return Measurements(
        measured.weights[rows], {name: sums[rows] for name, sums in measured.sums.items()}
    )
