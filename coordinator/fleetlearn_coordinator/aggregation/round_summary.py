"""What the devices measured in a round, put together: the losses and metrics of their reports and evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from math import fsum, inf
from typing import Any

from fleetlearn_protocol.messages import Evaluation, Report

Row = tuple[int, Mapping[str, float]]
"""What one device measured: examples, name of a metric -> its sum over them."""
Bounds = Mapping[str, tuple[float, float]]
"""Name of a metric -> the least and the greatest that it can be for one example."""
UNBOUNDED: Bounds = {}
SLACK = 1e-6
"""How far rounding in float32 may take a mean beyond its bounds: of the bound's size, or of 1."""


def summarise(reports: Collection[Report], known: Collection[str], max_weight: int, bounds: Bounds) -> dict[str, Any]:
    """A round's reports as they are kept and shown. ``metrics``: of the round's model before training where the devices
    evaluated it, else of their training; ``behind``: how many devices each is of; ``left_out``: how many were not
    counted in it, since what they say is beyond the ``bounds``. ``known`` are the bundle's metrics; ``max_weight`` caps
    a device's weight."""
    train: list[Row] = []
    evaluation: list[Row] = []
    left_out: Counter[str] = Counter()
    for report in reports:
        weight = min(report.examples, max_weight)
        means = {name: value for name, value in report.metrics.items() if name in known} | {"loss": report.loss}
        rows: list[Row] = [(weight, {name: weight * value for name, value in means.items()})]
        if report.evaluation is not None:
            rows.append(row_of(report.evaluation, known, max_weight))
        beyond = {name for row in rows for name in outside(row, bounds)}
        left_out.update(beyond)
        for into, row in zip((train, evaluation), rows, strict=False):
            into.append(without(row, beyond))
    return {
        "reports": len(reports),
        "partial": sum(not report.complete for report in reports),
        "train": pooled(train),
        "evaluation": pooled(evaluation),
        "metrics": pooled(train) | pooled(evaluation),
        "behind": devices_of(train) | devices_of(evaluation),
        "left_out": dict(left_out),
    }


def deciding(summary: Mapping[str, Any], minimum: int) -> dict[str, float]:
    """The metrics of a round that may stop the run: at least ``minimum`` devices measured them."""
    behind = summary.get("behind", {})  # a round of an earlier version has none
    return {name: value for name, value in summary["metrics"].items() if behind.get(name, minimum) >= minimum}


def row_of(own: Evaluation, known: Collection[str], max_weight: int) -> Row:
    """What a device's evaluation adds to the round's. However many examples a device claims, it has no more say here
    than in the model."""
    share = min(1.0, max_weight / own.examples)
    sums = {name: value for name, value in own.metric_sums.items() if name in known} | {"loss": own.loss_sum}
    return min(own.examples, max_weight), {name: share * value for name, value in sums.items()}


def outside(row: Row, bounds: Bounds) -> list[str]:
    """The names of the metrics that have a mean which no examples can have."""
    examples, sums = row
    found = []
    for name in bounds:
        low, high = limits(bounds, name)
        if name in sums and not low <= sums[name] / examples <= high:
            found.append(name)
    return found


def without(row: Row, names: Collection[str]) -> Row:
    """The row without the metrics of these names."""
    return (row[0], {name: value for name, value in row[1].items() if name not in names}) if names else row


def limits(bounds: Bounds, name: str) -> tuple[float, float]:
    """The least and the greatest mean of a metric that is taken, rounding allowed for."""
    low, high = bounds.get(name, (-inf, inf))
    return low - SLACK * max(1.0, abs(low)), high + SLACK * max(1.0, abs(high))


def devices_of(rows: Sequence[Row]) -> dict[str, int]:
    """How many devices have each name."""
    return dict(Counter(chain.from_iterable(sums for _, sums in rows)))


def pooled(rows: Sequence[Row]) -> dict[str, float]:
    """Means from (examples, name -> sum over them), of those that have the name. fsum is exact: the rows' order does
    not matter."""
    found = {}
    for name in dict.fromkeys(chain.from_iterable(sums for _, sums in rows)):
        having = [(sums[name], examples) for examples, sums in rows if name in sums]
        found[name] = fsum(value for value, _ in having) / sum(examples for _, examples in having)
    return found


def describe(summary: Mapping[str, Any]) -> str:
    """A round's summary in one line."""
    dropped = ", ".join(f"{count} {cause}" for cause, count in sorted(summary["dropped"].items())) or "none"
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items()) or "no metrics"
    return (
        f"{summary['reports']} reports ({summary['partial']} partial), dropped: {dropped}; {metrics}; "
        f"change {summary['change']:.3g}; {summary['seconds']:.2f} s"
    )
