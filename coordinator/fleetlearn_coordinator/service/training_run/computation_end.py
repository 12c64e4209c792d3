"""When a run of a computation is over. The simulator asks too: nothing here needs a service."""

from __future__ import annotations

from fleetlearn_coordinator.aggregation.computations.registry import RunComputation
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.rounds.commands import Finish


def computation_done(computation: RunComputation | None, newest: ModelState) -> Finish | None:
    """Return why a run of a computation is over; None: it is not, or it trains."""
    if computation is None or not computation.is_done(newest.model):
        return None
    reason = f"the computation is done: {computation.progress(newest.model)}"
    return Finish(reason, "computation", newest.version, newest.version)
