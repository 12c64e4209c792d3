"""Results as points of curves: what TensorBoard, MLflow and Weights & Biases draw."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from fleetlearn_coordinator.results.result_table import ResultRow
from fleetlearn_coordinator.results.run_results import RunResults

WHERE = ("round", "evaluation", "outcome", "time")
"""Columns that say which row it is, and when."""


class RowsSent(NamedTuple):
    """The last rows that a tool has."""

    round: int = 0
    evaluation: int = 0


class Point(NamedTuple):
    """A value of a curve."""

    curve: str
    """``train/loss``, ``lost/late``, ``round/reports``, ``fleet-evaluation/accuracy`` and so on."""
    step: int
    """The round; of an evaluation the version that was measured."""
    time: float
    """In seconds (``run_results``)."""
    value: float


def rows_after(results: RunResults, sent: RowsSent) -> list[ResultRow]:
    """Return the rows that a tool does not have yet, rounds and evaluations, by their time."""
    rows = [
        *(row for row in results.round_rows if row["round"] > sent.round),
        *(row for row in results.evaluation_rows if row["evaluation"] > sent.evaluation),
    ]
    return sorted(rows, key=lambda row: row["time"])


def points_of(row: ResultRow) -> Iterator[Point]:
    """Yield a row's points. A value that is not finite has none: a diverged run's curve ends."""
    step = row["version"] if "evaluation" in row else row["round"]
    for curve, value in curves_of(row).items():
        if isfinite(value):
            yield Point(curve, step, row["time"], value)


def curves_of(row: ResultRow) -> dict[str, float]:
    """Return the row's numbers by the name of their curve."""
    found = {}
    of_fleet = "evaluation" in row
    for name, value in row.items():
        if name in WHERE or value is None:
            continue
        group, _, rest = name.rpartition("/")
        group = "fleet-evaluation" if of_fleet else group or "round"
        found[f"{group}/{rest}"] = float(value)
    return found


def last_of(results: RunResults, sent: RowsSent) -> RowsSent:
    """Return the last rows that a tool has after ``rows_after`` were added."""
    return RowsSent(
        max([sent.round, *(row["round"] for row in results.round_rows[-1:])]),
        max([sent.evaluation, *(row["evaluation"] for row in results.evaluation_rows[-1:])]),
    )
