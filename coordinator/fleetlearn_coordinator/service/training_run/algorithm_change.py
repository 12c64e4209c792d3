"""What becomes of the vectors beside the model, and of what devices keep, when a run starts with
another algorithm."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from fleetlearn_protocol.encodings import RESIDUAL
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import STALE
from fleetlearn_coordinator.storage.ledger import (
    Ledger,
    Metadata,
    Row,
    TaskEnded,
    TiedVectorsForgotten,
)


def devices_factor(plan: Plan, ledger: Ledger) -> float:
    """Return what SCAFFOLD's c and FedDyn's h of the newest model are to be multiplied by: N_before
    / N.

    Both are sums over the devices that took part, divided by the number N of all devices
    (``server.devices``): those that never took part keep zeros. So a sum that was divided by
    N_before is divided by N after this.
    """
    before, devices = ledger.get("devices"), plan.server.devices
    return 1.0 if not before or devices is None else float(before) / devices


def begin_algorithm(
    plan: Plan, ledger: Ledger, version: int, model: Vector, vectors: Mapping[str, Vector]
) -> tuple[dict[str, Vector], list[Row]]:
    """Return the vectors that devices fetch beside the model, and what is to be written at this
    start.

    What is here and what devices keep must belong together. So both begin from zeros, unless this
    run has gone on with the same tied vectors so far. What devices did since the newest model, of
    this ``version``, then belongs to neither, and is given up. ``vectors``: those in the file of
    the newest model.
    """
    tied = " ".join(plan.tied)
    before = ledger.get("tied") or ""
    # in an earlier process; the model's file is older than that
    began_here = ledger.get("tied_since") == version
    if tied == before and not began_here and vectors.keys() == {*plan.vectors}:
        return dict(vectors), []
    zeros = {name: np.zeros_like(model) for name in plan.vectors}
    if tied == before and began_here:
        return zeros, []
    rows: list[Row] = [
        Metadata("tied", tied),
        Metadata("tied_since", version),
        TiedVectorsForgotten(),
    ]
    if {*plan.tied, *before.split()} <= {RESIDUAL}:  # reports are the same without it
        return zeros, rows
    return zeros, [*rows, *give_up_rows(ledger)]


def give_up_rows(ledger: Ledger) -> list[Row]:
    """Return the rows that end all tasks, and give up all reports, since the newest model."""
    found = ledger.unfinished(0)
    early = [row.task for row in found.reports if row.round != found.round]
    ended = [
        TaskEnded(task, STALE)
        for task in (*early, *(row.task for row in (*found.leases, *found.lost)))
    ]
    return [*ended, Metadata("given_up", ledger.last_round())]
