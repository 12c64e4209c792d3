"""Why a run's training is over: the stop rule that was met before this process, and its rows."""

from __future__ import annotations

from math import inf

import msgspec

from fleetlearn_coordinator.aggregation.computations.registry import RunComputation
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.round_summary import deciding, possible
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.service.held_out import means_of_newest
from fleetlearn_coordinator.service.training_run.computation_end import computation_done
from fleetlearn_coordinator.storage.ledger import Metadata, Row
from fleetlearn_coordinator.storage.store import Store


def met_before(
    plan: Plan,
    engine: Engine,
    store: Store,
    rolled_back: int,
    computation: RunComputation | None,
    newest: ModelState,
) -> Finish | None:
    """Return the stop rule that the last committed round meets, or None. The plan's rules may be
    others than at the last start. ``rolled_back``: the newest version that a roll back made, or
    0. ``computation``: what the run computes; None: it trains. ``newest``: at the newest model."""
    if (done := computation_done(computation, newest)) is not None:
        return done
    ledger = store.ledger
    summary = ledger.last_committed()
    if summary is None or rolled_back == engine.version > 0:  # no round has made the newest model
        summary = {"change": inf, "metrics": {}}
    if plan.stop.measured_by == EVALUATION:
        measured = ledger.last_valid_exchange(EVALUATION, rolled_back)
        version, found = measured or (0, {"metrics": {}})
        metrics = deciding(found, plan.evaluation.minimum)
    elif plan.stop.measured_by == "held-out":
        results = store.storage.held_out.read_all().items()
        counting = {number: row for number, row in results if number >= rolled_back}
        version, metrics = max(counting, default=0), means_of_newest(counting)
    else:
        version, metrics = engine.version - 1, deciding(summary, plan.round.minimum)
    # An earlier version let one device's word pass.
    metrics = {name: mean for name, mean in metrics.items() if possible(plan.bounds, name, mean)}
    return engine.finish(summary["change"], metrics, version)


def finish_rows(finish: Finish | None) -> list[Row]:
    """Return the rows that say why training is over; None: it is not."""
    if finish is None:
        return [Metadata("finished", None), Metadata("finished_by", None)]
    rule = msgspec.json.encode(finish._asdict()).decode()
    return [Metadata("finished", finish.reason), Metadata("finished_by", rule)]
