"""What the devices measured in a round: the losses and metrics of their reports and evaluations,
put together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import fsum, inf
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.messages import Evaluation, Report
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.commit import weights_of

Bounds = Mapping[str, tuple[float, float]]
"""Name of a metric -> the least and the greatest that it can be for one example."""
MEMBERS = "members"
"""Key of a family's summary: name of each member -> its own summary."""
REGIONS = "regions"
"""Key of the summary of a round with regions: name of each -> how many reports it had, and whether
it is done."""
PERSONAL = "personal."
"""What the names of metrics of the devices' personal models begin with."""
BEFORE, WHILE = "before they trained", "while they trained"
"""When devices measured a round's metrics."""
SLACK = 1e-6
"""How far rounding in float32 may take a mean beyond its bounds: this times the bound's size, or
times 1."""


class Measurements(NamedTuple):
    """What n devices measured, as columns."""

    weights: NDArray[np.int64]
    """Shape (n,): for how many examples each device counts, at most the plan's ``max_weight``."""
    sums: Mapping[str, NDArray[np.float64]]
    """Name of a metric -> its sums over that many examples, shape (n,). NaN: the device does not
    have the metric."""


NOTHING = Measurements(np.zeros(0, np.int64), {})
"""The measurements of devices that measured nothing."""


def training_of(reports: Collection[Report], names: Iterable[str], max_weight: int) -> Measurements:
    """Return what devices measured in their training. Metrics not in ``names`` are left out."""
    weights = weights_of(np.array([report.examples for report in reports], np.int64), max_weight)
    rows = [{**report.metrics, "loss": report.loss} for report in reports]
    return Measurements(
        weights, {name: weights * column for name, column in _columns(rows, names).items()}
    )


def evaluation_of(
    evaluations: Sequence[Evaluation | None],
    names: Sequence[str],
    max_weight: int,
    personal: Sequence[Evaluation | None] = (),
) -> Measurements:
    """Return what devices measured when they evaluated the round's model, or NaN for those that did
    not.

    ``personal``: what they measured of their personal models, for each device or for none. These
    metrics are named personal.NAME, and a device weighs as much in them as in the others. However
    many examples a device says it has, it has no more say here than in the model.
    """
    weights = weights_of(_examples_of(evaluations), max_weight)
    sums = _scaled_sums(evaluations, names, weights)
    # A device that measured its personal model alone would have no weight.
    both = [own if shared else None for own, shared in zip(personal, evaluations, strict=False)]
    if any(both):
        sums |= {
            f"{PERSONAL}{name}": column
            for name, column in _scaled_sums(both, names, weights).items()
        }
    return Measurements(weights, sums)


def _examples_of(evaluations: Sequence[Evaluation | None]) -> NDArray[np.int64]:
    return np.array([0 if own is None else own.examples for own in evaluations], np.int64)


def _scaled_sums(
    evaluations: Sequence[Evaluation | None], names: Iterable[str], weights: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return the sums of each metric as if each device had ``weights`` examples."""
    rows = [{} if own is None else {**own.metric_sums, "loss": own.loss_sum} for own in evaluations]
    shares = weights / np.maximum(_examples_of(evaluations), 1)
    return {name: shares * column for name, column in _columns(rows, names).items()}


def _columns(
    rows: Sequence[Mapping[str, float]], names: Iterable[str]
) -> dict[str, NDArray[np.float64]]:
    return {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in names}


def summarise(training: Measurements, evaluation: Measurements, bounds: Bounds) -> dict[str, Any]:
    """Return a round's metrics as they are kept and shown.

    Row k of both measurements is of the same device, unless one is NOTHING. ``metrics`` are those
    of the round's model before training where the devices evaluated it, else of their training.
    ``behind``: how many devices measured each. ``left_out``: how many devices are not counted in a
    metric because they say what no examples can have.
    """
    impossible = {
        name: _outside(training, bounds, name) | _outside(evaluation, bounds, name)
        for name in bounds
    }
    training, evaluation = _without(training, impossible), _without(evaluation, impossible)
    train, evaluated = pooled(training), pooled(evaluation)
    return {
        "train": train,
        "evaluation": evaluated,
        "metrics": train | evaluated,
        "behind": _devices_of(training) | _devices_of(evaluation),
        "left_out": {name: int(rows.sum()) for name, rows in impossible.items() if rows.any()},
    }


def summarise_staleness(staleness: Collection[int]) -> dict[str, float]:
    """Return how stale a round's updates are. ``staleness``: of each of them."""
    mean = sum(staleness) / max(1, len(staleness))
    return {"mean": mean, "max": max(staleness, default=0), "stale": sum(map(bool, staleness))}


def pooled(measured: Measurements) -> dict[str, float]:
    """Return the means of each metric over the examples of the devices that have it. fsum is exact:
    the order of the devices does not matter."""
    means = {}
    for name, sums in measured.sums.items():
        having = np.isfinite(sums)
        if having.any():
            means[name] = fsum(sums[having].tolist()) / int(measured.weights[having].sum())
    return means


def possible(bounds: Bounds, name: str, mean: Any) -> Any:
    """Return whether a metric can have this mean, a number or an array of them. Allows for
    rounding."""
    low, high = bounds.get(name, (-inf, inf))
    return (mean >= low - SLACK * max(1.0, abs(low))) & (mean <= high + SLACK * max(1.0, abs(high)))


def _outside(measured: Measurements, bounds: Bounds, name: str) -> NDArray[np.bool_]:
    """Return which devices have a mean of this metric that no examples can have."""
    if name not in measured.sums:
        return np.zeros(1, np.bool_)
    sums = measured.sums[name]
    outside: NDArray[np.bool_] = ~possible(
        bounds, name, sums / np.maximum(measured.weights, 1)
    ) & ~np.isnan(sums)
    return outside


def _without(measured: Measurements, left_out: Mapping[str, NDArray[np.bool_]]) -> Measurements:
    """Return the measurements without these devices' values of these metrics."""
    replaced = {
        name: np.where(left_out[name], np.nan, sums)
        for name, sums in measured.sums.items()
        if name in left_out
    }
    return measured._replace(sums={**measured.sums, **replaced})


def _devices_of(measured: Measurements) -> dict[str, int]:
    """Return how many devices have each metric."""
    counts = {name: int(np.isfinite(sums).sum()) for name, sums in measured.sums.items()}
    return {name: count for name, count in counts.items() if count}


def deciding(summary: Mapping[str, Any], minimum: int) -> dict[str, float]:
    """Return the metrics of a round that may stop the run: at least ``minimum`` devices measured
    them."""
    behind = summary.get("behind", {})  # a round of an earlier version has none
    return {
        name: value
        for name, value in summary["metrics"].items()
        if behind.get(name, minimum) >= minimum
    }


def measured_when(summary: Mapping[str, Any]) -> str:
    """Return when the devices of a round measured its metrics: BEFORE if they evaluated the model
    that they were sent, else WHILE."""
    return BEFORE if summary.get("evaluation") else WHILE


def has_noise(summary: Mapping[str, Any]) -> bool:
    """Return whether a round's metrics are those of a private round, with noise."""
    return "metrics_noise" in summary.get("privacy", {})


def describe_dropped(summary: Mapping[str, Any]) -> str:
    """Return how many tasks of a round or an evaluation were dropped, by cause."""
    causes = sorted(summary["dropped"].items())
    return ", ".join(f"{count} {cause}" for cause, count in causes) or "none"


def describe_metrics(summary: Mapping[str, Any]) -> str:
    """Return the metrics of a round or an evaluation with their values; empty if it has none."""
    return ", ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items())


def describe(summary: Mapping[str, Any]) -> str:
    """Return a round's summary in one line."""
    dropped, metrics = describe_dropped(summary), describe_metrics(summary)
    reports = f"{summary['reports']} reports"
    if "goal" in summary:
        reports = f"{summary['reports']} of {summary['goal']} reports"
    if "computation" in summary:
        return (
            f"{reports}, dropped: {dropped}; {summary['computation']}; {summary['seconds']:.2f} s"
        )
    if metrics:
        noisy = ", with noise" if has_noise(summary) else ""
        metrics += f" on the devices' training examples, {measured_when(summary)}{noisy}"
    else:
        metrics = "no metrics"
    whole = (
        f"{reports} ({summary['partial']} partial), dropped: {dropped}; "
        f"{metrics}; change {summary['change']:.3g}; {summary['seconds']:.2f} s"
    )
    return "; ".join([whole, *describe_members(summary), *describe_regions(summary)])


def describe_regions(summary: Mapping[str, Any]) -> list[str]:
    """Return a line on the regions: how many reports each had, and which have failed. Empty: the
    round had none."""
    regions = summary.get(REGIONS, {})
    said = [
        f"{name} {own['reports']}{'' if own['done'] else ' (failed)'}"
        for name, own in regions.items()
    ]
    return [f"reports of regions: {', '.join(said)}"] if said else []


def describe_members(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each member of a family: how many devices reported, what they measured, and
    how far the model moved. Empty: the run has one model."""
    lines = []
    for name, own in summary.get(MEMBERS, {}).items():
        reports, metrics = own["reports"], describe_metrics(own) or "no metrics"
        word = "report" if reports == 1 else "reports"
        lines.append(f"{name}: {reports} {word}, {metrics}, change {own['change']:.3g}")
    return lines
