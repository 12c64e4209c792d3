"""The reports of simulated devices, as the columns that the coordinator's round takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from fleetlearn_coordinator.aggregation.reports import PartColumn, ReportColumns
from fleetlearn_protocol.messages import UPDATE, Evaluation
from numpy.typing import NDArray

from fleetlearn_simulator.fleet.clipped_updates import CLIPPED
from fleetlearn_simulator.fleet.update_file import UpdateFile
from fleetlearn_simulator.training.trained_devices import LARGE_UPDATE, TrainedDevices


class Measured(NamedTuple):
    """What a device measured on its own data before it trained. None: it has not, or its loss was
    not finite."""

    model: Evaluation | None
    """Of the model that its task began from."""
    personal: Evaluation | None
    """Of its personal model, where the algorithm has one."""


def reports_of(
    found: TrainedDevices,
    beside: Collection[str],
    weights: NDArray[np.int64],
    staleness: Sequence[int] = (),
    measured: Sequence[Measured] = (),
) -> ReportColumns:
    """Return the reports of these devices. ``beside``: names of the parts beside the update.
    ``weights``: of the updates in the mean, (n,). ``staleness``: nothing where no update is stale.
    ``measured``: nothing where devices do not evaluate."""
    parts = {UPDATE: found.updates, **{part: found.vectors[part] for part in beside}}
    return ReportColumns(
        weights=weights,
        examples=found.examples,
        steps=found.steps,
        complete=found.complete,
        loss=found.loss,
        metrics=found.metrics,
        largest={UPDATE: found.largest, **{part: _largest(parts[part]) for part in beside}},
        parts=parts,
        staleness=staleness,
        evaluations=[row.model for row in measured],
        personal=[row.personal for row in measured],
        clipped=found.vectors[CLIPPED][:, 0].astype(bool).tolist()
        if CLIPPED in found.vectors
        else (),
    )


def _largest(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the greatest magnitude of each row, (n,)."""
    largest: NDArray[np.float64] = np.abs(rows).max(axis=1, initial=0.0).astype(np.float64)
    return largest


def parts_to_add(reports: ReportColumns, kept: UpdateFile | None) -> dict[str, PartColumn]:
    """Return the parts in the form in which they are added. Large ones are added at once: to
    collect them would only cost memory. ``kept``: where updates are kept until the round ends, if
    the aggregator needs each of them."""
    updates = reports.parts.get(UPDATE)
    if updates is None or (isinstance(updates, np.ndarray) and updates.shape[1] < LARGE_UPDATE):
        return dict(reports.parts)
    parts: dict[str, PartColumn] = {
        part: [reports.update(part, row) for row in range(len(reports))] for part in reports.parts
    }
    if kept is not None:
        parts[UPDATE] = [kept.keep(update.read(0, kept.size)) for update in parts[UPDATE]]
    return parts
