"""What the coordinator gets of devices whose plan has [secure]: updates in fixed point, and nothing
that a single device measures.

No masks are added: their sum is taken off again before anybody looks at the sum of the updates, so
that the models are the same with them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.secure.fixed_point import Words

from fleetlearn_simulator.fleet.fixed_point_updates import weighted_rows
from fleetlearn_simulator.fleet.running_tasks import RunningTasks


class MaskedReports:
    """The reports of a plan's devices, and the masks of each round."""

    def __init__(self, numbers: FixedPoint, largest_weight: int, seed: int) -> None:
        """``largest_weight``: of an update. ``seed``: of the simulation."""
        self._numbers, self._largest_weight, self._seed = numbers, largest_weight, seed

    def of(
        self, reports: ReportColumns, tasks: RunningTasks, rows: slice, factors: Sequence[float]
    ) -> ReportColumns:
        """Return the reports as the coordinator gets them. ``tasks``, ``rows``: whose they are.
        ``factors``: what staleness leaves of each update; empty: none is stale."""
        updates = reports.parts[UPDATE]
        assert isinstance(updates, np.ndarray), "devices train into arrays"
        size = len(reports)
        words = weighted_rows(
            updates,
            reports.weights / self._largest_weight,
            np.array(factors) if factors else np.ones(size),
            self._numbers,
            self._seed,
            np.array(tasks.device[rows][:size], np.int64),
            np.array(tasks.seed[rows][:size], np.int64),
        )
        return withheld_columns(reports, words)

    def masks(self, size: int) -> Words:
        """Return the sum of the masks of the round's updates: uint32, shape (P + 1,). ``size``: of
        the model."""
        return np.zeros(size + 1, np.uint32)


def withheld_columns(reports: ReportColumns, words: Words) -> ReportColumns:
    """Return the reports with these words, and without anything that depends on the devices' data:
    as ``withheld`` of the device SDK has it. ``words``: of the updates, uint32, (n, P + 1)."""
    ones = np.ones(len(reports), np.int64)
    return replace(
        reports,
        weights=ones,
        examples=ones,
        steps=ones,
        complete=ones > 0,
        loss=np.zeros(len(reports)),
        metrics={},
        largest={UPDATE: np.zeros(len(reports))},
        parts={UPDATE: words},
        evaluations=(),
        personal=(),
        lost_tied=(),
        clipped=(),
    )
