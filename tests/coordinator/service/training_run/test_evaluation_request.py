"""A private run is not asked to measure on devices' own data."""

from __future__ import annotations

import pytest
from answering import Fleet
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.service.training_run.evaluation_request import ask_to_evaluate
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol.errors import FleetError
from peers import PlanMaker

PRIVATE = {
    "privacy__noise": 1.0,
    "privacy__delta": 1e-6,
    "privacy__population": 1000,
    "privacy__clip": 1.0,
}


def test_a_private_run_is_not_evaluated(make_plan: PlanMaker) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE)
    fleet = Fleet(plan)
    with pytest.raises(FleetError, match="is a private run: what devices measure"):
        ask_to_evaluate(plan.data_dir)
    fleet.store.close()


def test_a_run_with_clusters_is_not_evaluated(make_plan: PlanMaker) -> None:
    plan = make_plan("ifca", clusters__count=2)
    fleet = Fleet(plan)
    with pytest.raises(FleetError, match="is a run with clusters: an evaluation measures one"):
        ask_to_evaluate(plan.data_dir)
    find_storage(plan.data_dir).requests.ask_for_evaluation()
    assert not fleet.run.exchanges[EVALUATION].look_for_request()
    fleet.store.close()


def test_a_request_of_before_is_not_answered_by_a_private_run(make_plan: PlanMaker) -> None:
    plain = make_plan(round__weighting="uniform", local__evaluate=False)
    fleet = Fleet(plain)
    ask_to_evaluate(plain.data_dir)
    assert fleet.run.exchanges[EVALUATION].look_for_request()
    fleet.store.close()
    fleet = Fleet(make_plan("dp-fedavg", **PRIVATE))
    assert not fleet.run.engine.exchanges[EVALUATION].requested
    assert find_storage(plain.data_dir).requests.evaluation() is None
    fleet.store.close()
