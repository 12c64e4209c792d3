"""Early stopping in a run: over restarts, roll backs and changed plans, and the best model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.service.versions import choose_version
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import ExchangeBegun, ExchangeEnded
from fleetlearn_protocol.messages import Evaluation
from peers import SIZE, PlanMaker, update_of

PATIENT: dict[str, Any] = {
    "round__goal": 1,
    "stop__metric": "accuracy",
    "stop__patience": 3,
    "models__last": 1,
    "stop__rounds": 50,
}


def train(fleet: Fleet, *accuracies: float) -> None:
    """A round for each value, which its device measures of the model that the round begins with."""
    for value in accuracies:
        assert fleet.run.finished is None
        own = Evaluation(10, 1.0, {"accuracy": 10 * value})
        fleet.report(leases(fleet.check_in("a"))[0], update_of(1.0), evaluation=own)


def restarted(fleet: Fleet, plan: Plan) -> Fleet:
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    return fleet


@pytest.mark.parametrize("restarts", [False, True])
def test_the_best_model_is_named_and_kept(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture, restarts: bool
) -> None:
    """0.3, 0.5, then three that are no better: version 1 is the best of five, and of version 5
    nobody knows."""
    plan = make_plan(**PATIENT)
    fleet = Fleet(plan)
    for value in (0.3, 0.5, 0.5, 0.4, 0.45):
        train(fleet, value)
        if restarts:
            fleet = restarted(fleet, plan)
    reason = (
        "accuracy on the devices' training examples is best, 0.5, at model version 1: 3 measured "
        "models have not improved it"
    )
    assert (fleet.run.finished, fleet.run.met_by) == (reason, 1)
    fleet.store.close()
    status = read_status(plan.data_dir)
    assert status.finished_by == {
        "reason": reason,
        "rule": "patience",
        "value": 0.5,
        "limit": 3,
        "metric": "accuracy",
        "version": 1,
    }
    assert choose_version(plan, None) == (1, f"the best that was measured: {reason}")
    assert find_storage(plan.data_dir).models.model_versions() == [0, 1, 4, 5]
    known = read_model(plan.data_dir, 1)[1]
    first = read_model(plan.data_dir, 0)[1]
    np.testing.assert_allclose(known - first, np.ones(SIZE), atol=1e-6)


def test_a_finished_run_goes_on_with_more_patience_and_counts_on(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(**PATIENT))
    train(fleet, 0.5, 0.4, 0.4, 0.4)
    assert fleet.run.met_by == 0
    more = make_plan(**PATIENT | {"stop__patience": 5})
    fleet = restarted(fleet, more)
    train(fleet, 0.4, 0.4)
    assert fleet.run.met_by == 0
    fleet = restarted(fleet, make_plan(**PATIENT | {"stop__patience": 7}))
    train(fleet, 0.6)
    fleet = restarted(fleet, make_plan(**PATIENT))
    train(fleet, 0.6, 0.6, 0.6)
    assert (fleet.run.met_by, fleet.run.engine.version) == (6, 10)
    fleet.store.close()
    fleet = Fleet(make_plan(**PATIENT | {"stop__least": 0.5}))
    assert fleet.run.met_by == 6, "the best, though no improvement of more than a half"
    fleet.store.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_after_a_roll_back_it_counts_from_the_beginning(
    make_plan: PlanMaker, restarts: bool
) -> None:
    """What was measured of the models that were given up ends no training."""
    plan = make_plan(**PATIENT | {"models__last": 9})
    fleet = Fleet(plan)
    train(fleet, 0.9, 0.2, 0.2)
    find_storage(plan.data_dir).requests.ask_for_roll_back(1, "command")
    assert fleet.run.roll_backs.look(NOW.wall)
    fleet.run.work.do_work(NOW)
    assert fleet.run.engine.version == 4
    for value in (0.3, 0.4, 0.4, 0.4, 0.4):
        if restarts:
            fleet = restarted(fleet, plan)
        train(fleet, value)
    assert (fleet.run.met_by, fleet.run.engine.version) == (5, 9)
    fleet.store.close()


def test_held_out_results_count_by_version(make_plan: PlanMaker, tmp_path: Path) -> None:
    """What bounds devices does not bound held-out data: values above 1 are no mistake."""
    np.savez(tmp_path / "held_out.npz", x=np.zeros((1, 1), np.float32))
    settings = {
        **PATIENT,
        "stop__metric": "loss",
        "stop__direction": "above",
        "stop__measured_by": "held-out",
        "evaluation__data": "held_out.npz",
    }
    plan = make_plan(**settings)
    fleet = Fleet(plan)
    train(fleet, 0.1, 0.1, 0.1, 0.1, 0.1)
    for version, value in enumerate((21.0, 24.0, 23.0, 23.5)):
        fleet.store.storage.held_out.write(version, {"examples": 1, "metrics": {"loss": value}})
    fleet = restarted(fleet, plan)
    assert fleet.run.finished is None
    commands = fleet.run.record(fleet.run.engine.measured({"loss": 24.0}, 4, 0.0), NOW)
    assert (commands[-1].value, commands[-1].version) == (24.0, 1)  # type: ignore[union-attr]
    assert fleet.run.finished is not None
    assert "on held-out data is best, 24, at model version 1" in fleet.run.finished
    fleet.store.close()


def test_held_out_results_of_models_that_were_given_up_do_not_count(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    np.savez(tmp_path / "held_out.npz", x=np.zeros((1, 1), np.float32))
    measured: dict[str, Any] = {
        "stop__measured_by": "held-out",
        "evaluation__data": "held_out.npz",
        "models__last": 9,
    }
    plan = make_plan(**PATIENT | measured)
    fleet = Fleet(plan)
    train(fleet, 0.1, 0.1, 0.1)
    find_storage(plan.data_dir).requests.ask_for_roll_back(1, "command")
    assert fleet.run.roll_backs.look(NOW.wall)
    fleet.run.work.do_work(NOW)
    train(fleet, 0.1)
    for version, value in enumerate((0.5, 0.9, 0.4, 0.4, 0.4, 0.3)):
        result = {"examples": 1, "metrics": {"accuracy": value}}
        fleet.store.storage.held_out.write(version, result)
    fleet = restarted(fleet, plan)
    assert fleet.run.finished is None
    assert fleet.run.engine.improvement.values == {4: 0.4, 5: 0.3}
    fleet.store.close()


def test_evaluations_count_from_the_ledger(make_plan: PlanMaker) -> None:
    """The last evaluation of a version counts, and only those that were valid."""
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=50))
    train(fleet, 0.1, 0.1, 0.1, 0.1)
    told = [(1, 0.5, True), (2, 0.9, False), (2, 0.4, True), (3, 0.7, True), (3, 0.4, True)]
    for number, (version, accuracy, valid) in enumerate(told, 1):
        summary = {"metrics": {"accuracy": accuracy}, "behind": {"accuracy": 1}, "dropped": {}}
        outcome = "valid" if valid else "invalid"
        fleet.store.write([ExchangeBegun(EVALUATION, number, 1, version, None, None, 5.0)])
        fleet.store.write([ExchangeEnded(EVALUATION, number, 1, outcome, summary, 6.0)])
    settings = PATIENT | {"stop__measured_by": "evaluation", "evaluation__every": 1}
    fleet = restarted(fleet, make_plan(**settings))
    assert fleet.run.engine.improvement.values == {1: 0.5, 2: 0.4, 3: 0.4}
    assert fleet.run.finished is None
    fleet = restarted(fleet, make_plan(**settings | {"stop__patience": 2}))
    finishing = fleet.run.engine.finishing  # when the last model is measured
    assert finishing is not None
    assert (finishing.rule, finishing.version) == ("patience", 1)
    fleet.store.close()
