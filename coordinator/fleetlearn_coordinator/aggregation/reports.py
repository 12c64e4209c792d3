"""The reports of devices as columns: one report, or as many as came together.

The server has one report at a time, its parts in a spool file; the simulator has blocks of them,
their parts in arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from fleetlearn_protocol.messages import Evaluation, Report
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.updates import (
    ArrayUpdate,
    MaskedArray,
    SumsArray,
    Update,
)
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported

PartColumn: TypeAlias = NDArray[Any] | Sequence[Update]
"""One part of n reports: an array of shape (n, elements), float32; of masked updates uint32, (n, P
+ 1); of sums int64, (n, S). Or n updates that are read where they are."""


@dataclass(slots=True, eq=False)  # nobody changes it; frozen, each would take longer to make
class ReportColumns:
    """n reports, in the order in which they came."""

    weights: NDArray[np.int64]
    """Of the updates in the mean, shape (n,)."""
    examples: NDArray[np.int64]
    """Of the devices, shape (n,)."""
    steps: NDArray[np.int64]
    """Optimizer steps that were done, shape (n,)."""
    complete: NDArray[np.bool_]
    """Whether these were all steps of the task, shape (n,)."""
    loss: NDArray[np.float64]
    """Means over the examples seen in training, shape (n,)."""
    metrics: Mapping[str, NDArray[np.float64]]
    """The same for each metric, shape (n,). NaN: the device does not have the metric."""
    largest: Mapping[str, NDArray[np.float64]]
    """Part -> the largest magnitudes of its elements, shape (n,)."""
    parts: Mapping[str, PartColumn]
    """Part -> its elements. A part that is not there is not added."""
    staleness: Sequence[int] = ()
    """Of each update; empty: all are fresh."""
    evaluations: Sequence[Evaluation | None] = ()
    """What each device measured of the model before it trained; empty: nobody did."""
    personal: Sequence[Evaluation | None] = ()
    """What each device measured of its personal model; empty: nobody did."""
    lost_tied: Sequence[bool] = ()
    """Whether each device lost what it kept; empty: nobody did."""
    clipped: Sequence[bool | None] = ()
    """Whether each device says that it had to shorten its update to the clip norm of its task; None
    where it says nothing. Empty: nobody does."""
    weighed: Sequence[Reported] = ()
    """What the weighing of each update depends on; empty: it is not known yet, or nothing is to be
    known."""
    member: int = 0
    """The place of the member that all of them are of, in a family (family_round.py)."""
    region: str | None = None
    """The region that all of them are of (regional_round.py). None: rounds have no regions."""

    def __len__(self) -> int:
        return len(self.weights)

    def first(self, count: int) -> ReportColumns:
        """Return the first ``count`` reports. The columns share memory."""
        if count == len(self):
            return self
        columns = (field.name for field in fields(self) if field.name not in ("member", "region"))
        cut = {name: _first(getattr(self, name), count) for name in columns}
        return ReportColumns(**cut, member=self.member, region=self.region)

    def update(self, part: str, row: int) -> Update:
        """Return one part of one report."""
        column = self.parts[part]
        if not isinstance(column, np.ndarray):
            return column[row]
        elements = column[row]
        if elements.dtype == np.uint32:
            return MaskedArray(elements)
        if elements.dtype == np.int64:
            return SumsArray(elements)
        return ArrayUpdate(elements)


def _first(column: Any, count: int) -> Any:
    """Return the first elements of a column, or of each column of a mapping."""
    if isinstance(column, Mapping):
        return {name: each[:count] for name, each in column.items()}
    return column[:count]


def columns_of(
    report: Report,
    metrics: Sequence[str],
    weight: int,
    largest: Mapping[str, float],
    parts: Mapping[str, Update],
    staleness: int = 0,
    member: int = 0,
    region: str | None = None,
) -> ReportColumns:
    """Return the columns of one report. ``metrics``: names of the metrics that are kept.
    ``weight``: of its update in the mean. ``largest``: part -> the largest magnitude of its
    elements. ``member``, ``region``: as in ``ReportColumns``."""
    # One array of each kind, cut into columns: an array for each column takes 5 us more.
    integers = np.array([weight, report.examples, report.steps], np.int64)
    own = [report.metrics.get(name, np.nan) for name in metrics]
    floats = np.array([report.loss, *own, *largest.values()])
    loss, *columns = [floats[place : place + 1] for place in range(len(floats))]
    return ReportColumns(
        weights=integers[:1],
        examples=integers[1:2],
        steps=integers[2:],
        complete=np.array([report.complete]),
        loss=loss,
        metrics=dict(zip(metrics, columns, strict=False)),
        largest=dict(zip(largest, columns[len(metrics) :], strict=True)),
        parts={part: [update] for part, update in parts.items()},
        staleness=[staleness],
        evaluations=[report.evaluation],
        personal=[report.personal],
        lost_tied=[report.lost_tied],
        clipped=[report.clipped],
        member=member,
        region=region,
    )
