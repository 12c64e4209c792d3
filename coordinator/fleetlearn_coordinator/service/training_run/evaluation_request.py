"""Asking a run, in whatever process, for an evaluation of its newest model."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.service.training_run.participations import RULES
from fleetlearn_coordinator.service.training_run.plan_changes import PLAN, WHAT
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.stored_json import decode


def ask_to_evaluate(place: str | os.PathLike[str]) -> None:
    """Ask the run in a data directory for an evaluation, within a second or at its next start.
    ``place``: as for ``find_storage``. Raises FleetError where there is no run yet, or as
    ``refuse_private`` does."""
    refuse_private(place)
    find_storage(place).requests.ask_for_evaluation()


def refuse_private(place: str | os.PathLike[str]) -> None:
    """Raise FleetError where the run was served last with [privacy] or [secure]: devices would
    measure on their own data, without noise; where it trains no model; and where nobody says
    which of several models is a device's."""
    storage, private, has_model, clusters = find_storage(place), False, True, None
    with suppress(StoreError), storage.read_ledger() as ledger:  # there may be no run yet
        known = ledger.metadata()
        private = known.get(RULES) is not None
        plan = decode(known.get(PLAN) or "{}", dict[str, Any], WHAT)
        algorithm = ALGORITHMS.get(plan.get("local", {}).get("algorithm"))
        has_model = algorithm is None or algorithm.has_model
        clusters = plan.get("clusters")
    if clusters is not None:
        raise FleetError(
            Code.BAD_MESSAGE,
            f"{storage.where} is a run with clusters: an evaluation measures one model on a "
            "device, and which one is the device's is known once it has measured all of them, "
            "before a round. The rounds' metrics (local.evaluate = true) are of each device's own "
            "cluster",
        )
    if not has_model:
        raise FleetError(
            Code.BAD_MESSAGE,
            f"{storage.where} is a run without a model: there is nothing that devices could "
            "measure. `fleetlearn-coordinator result` shows what a computation found; where "
            "devices tell class scores, local.evaluate = true has them measure their own models",
        )
    if not private:
        return
    raise FleetError(
        Code.BAD_MESSAGE,
        f"{storage.where} is a private run: what devices measure in an evaluation tells about "
        "their data, and no noise is added to it. Measure on held-out data of the coordinator's "
        "own (evaluation.data), or, in a plan with [privacy] and without [secure], let the rounds "
        'measure with privacy.metrics = "noised"',
    )
