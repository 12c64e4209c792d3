"""The model of a round that is closed: made and written, before it counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from fleetlearn_protocol.messages import CONTROL, UPDATE
from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_coordinator.aggregation import round_sums
from fleetlearn_coordinator.aggregation.commit import Began, next_model
from fleetlearn_coordinator.aggregation.optimizers import State
from fleetlearn_coordinator.aggregation.sent_models import Forms, make_forms
from fleetlearn_coordinator.service.training_run.tied_sum import TiedSum
from fleetlearn_coordinator.storage.ledger import ModelMade, RoundClosed, Row, TiedVectorsCounted, TiedVectorsForgotten

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.training_run.run import Run


H = "h"
"""The slot of FedDyn's server."""


class WrittenModel(NamedTuple):
    """The model that a round made, its file written. It does not count before its step's end."""

    round: int
    model: Vector
    state: State
    """Of the server optimizer."""
    vectors: dict[str, Vector]
    """What devices fetch beside the model."""
    vector_digests: dict[str, str]
    """Their SHA-256."""
    sha256: str
    """Of the model's bytes."""
    forms: Forms
    """In which it travels beside float32."""
    rows: list[Row]
    """What makes it the newest model, and its round closed."""
    summary: dict[str, Any]
    """Of its round."""
    tied_sum: TiedSum | None
    """The state of c or h after the round, where the algorithm has one of them."""


def make_model(
    run: Run,
    round: int,
    summary: dict[str, Any],
    at: float,
    dropped: Iterable[int],
    began: Began | None,
    bases: Mapping[int, str],
) -> WrittenModel:
    """Make the open round's model and write its file, in any thread; nothing of the run changes.

    ``dropped``: the versions that are not kept any more. ``began``: where the task of its only update began, if the
    server mixes. ``bases``: as ``ModelDigests.bases_of`` returns them. Raises FleetError (not-finite: training has
    diverged), StoreError (the disk is full), OSError.
    """
    open_round, devices, tied_sum = run.open_round, run.plan.server.devices, run.tied_sum
    model, state, summary["change"] = next_model(
        open_round.aggregators[UPDATE],
        open_round.sums[UPDATE],
        run.optimizer,
        run.state,
        run.model,
        began,
        run.plan.share(len(open_round.reports)),
        open_round.scale(),
    )
    vectors = dict[str, Vector]()
    tied_rows: list[Row] = [TiedVectorsCounted(*pair) for pair in open_round.tied.items() if run.plan.tied]
    if tied_sum is not None and devices is not None:
        if CONTROL in run.plan.vectors:
            vectors[CONTROL] = round_sums.next_control(run.vectors[CONTROL], open_round.sums[CONTROL], devices)
        tied_sum = tied_sum.after(devices, open_round.reports.values(), round)
        if tied_sum.since == round:
            vectors = {name: np.zeros_like(model) for name in vectors}
            state = {name: np.zeros_like(model) if name == H else values for name, values in state.items()}
            tied_rows = [TiedVectorsForgotten()]
        tied_rows.append(tied_sum.row)
    digests = {name: digest(vector) for name, vector in vectors.items()}
    forms = make_forms(run.plan.encoding.down, model, run.digests.load(bases))
    row = ModelMade(run.engine.version + 1, digest(model), round, at)
    # Read when the files are removed: somebody may ask for a version while this thread computes.
    dropped = (version for version in dropped if version not in run.roll_backs.needed())
    rows = [
        *run.write_model(row, model, state | vectors, dropped),
        RoundClosed(round, "committed", summary, at),
        *tied_rows,
    ]
    return WrittenModel(round, model, state, vectors, digests, row.sha256, forms, rows, summary, tied_sum)
