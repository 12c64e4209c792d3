"""What an earlier process measured of the metric whose improvement is watched (``stop.patience``).

Nothing is kept for it: the engine is told what the summaries of rounds and evaluations and the
results on held-out data say, in the order of the versions."""

from __future__ import annotations

from fleetlearn_coordinator.aggregation.round_summary import deciding, possible
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.service.training_run.kept_models import metrics_of
from fleetlearn_coordinator.storage.store import Store


def restore_improvement(plan: Plan, engine: Engine, store: Store, rolled_back: int) -> None:
    """Tell the engine what was measured of the models since the last roll back, which made version
    ``rolled_back``; 0: there was none. Raises StoreError (damaged)."""
    if plan.stop.patience is None:
        return
    found = _measured(plan, store, rolled_back, engine.version)
    for version in sorted(found):
        if version >= rolled_back:
            engine.note_measured(found[version], version)


def _measured(plan: Plan, store: Store, since: int, newest: int) -> dict[int, dict[str, float]]:
    by = plan.stop.measured_by
    if by == "held-out":
        results = store.storage.held_out.read_all()
        return {version: result["metrics"] for version, result in results.items()}
    if by == EVALUATION:
        found = metrics_of(plan, range(since, newest + 1), EVALUATION)
    else:
        rows = store.ledger.committed_rounds(newest - since)
        minimum = plan.round.minimum
        # Devices measure the model with which their round begins.
        found = {made - 1: deciding(summary, minimum) for made, summary in rows}
    return {version: _possible(plan, metrics) for version, metrics in found.items()}


def _possible(plan: Plan, metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that the plan's bounds allow, which may be others than at that time."""
    return {name: mean for name, mean in metrics.items() if possible(plan.bounds, name, mean)}
