"""Metrics that are released with noise: stop rules and the best versions go by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from answering import Fleet, leases
from fleetlearn_coordinator import Plan, read_status
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.service.recorded_runs import recorded_runs
from fleetlearn_coordinator.service.views.local_views import LocalViews
from fleetlearn_protocol.messages import Evaluation
from peers import plan_text, update_of

SETTINGS: dict[str, Any] = {
    "privacy__noise": 0.001,  # next to none, so that the values can be compared
    "privacy__metrics_noise": 0.002,
    "privacy__delta": 1e-6,
    "privacy__population": 1000,
    "privacy__clip": 1.0,
    "privacy__metrics": "noised",
    "round__goal": 2,
    "stop__metric": "accuracy",
    "stop__target": 0.8,
    "models__best": 1,
    "models__last": 1,
}


@pytest.fixture
def plan(tmp_path: Path, bundle_path: Path) -> Plan:
    text = plan_text(bundle_path, tmp_path / "run", "dp-fedavg", **SETTINGS)
    bounds = "metrics_bounds = { accuracy = [0.0, 1.0], loss = [0.0, 4.0] }"
    return Plan.parse(text.replace("[privacy]", f"[privacy]\n{bounds}"), tmp_path)


def test_a_run_stops_by_what_is_released(plan: Plan) -> None:
    """The mean of two devices' means, whatever their numbers of examples: 0.5, 0.75 and 0.85."""
    fleet = Fleet(plan)
    tasks, commands = leases(fleet.check_in("a", "b")), list[Any]()
    for accuracies in ((0.25, 0.75), (0.7, 0.8), (0.8, 0.9)):
        assert not any(isinstance(each, Finish) for each in commands)
        commands = []
        for examples, (lease, accuracy) in enumerate(zip(tasks, accuracies, strict=True), 5):
            sums = Evaluation(examples, examples * 8.0, {"accuracy": examples * accuracy})
            commands += fleet.report(lease, update_of(1.0), evaluation=sums)
        tasks = leases(commands)
    (finish,) = [each for each in commands if isinstance(each, Finish)]
    assert (finish.rule, finish.metric, finish.version) == ("metric", "accuracy", 2)
    assert "on the devices' training examples, with noise; the target is 0.8" in finish.reason
    fleet.store.close()
    (recorded,) = recorded_runs(LocalViews(plan=plan)).values()
    assert recorded.values["about"]["private"] == "noised"
    shown = [row.summary["metrics"] for row in read_status(plan.data_dir).rounds]
    assert [row["accuracy"] for row in shown] == pytest.approx([0.5, 0.75, 0.85], abs=0.01)
    assert [row["loss"] for row in shown] == pytest.approx([4.0] * 3, abs=0.04), "limited to 4"


def test_a_round_of_few_is_nearer_to_the_middle(plan: Plan) -> None:
    """Of the two that are wanted one comes, with an accuracy of 1: 1/2 + 1/2 / 2."""
    fleet = Fleet(plan)
    here, gone = leases(fleet.check_in("a", "b"))
    fleet.carry_out(fleet.run.engine.disconnect(gone.device, 0.0))
    fleet.report(here, update_of(1.0), evaluation=Evaluation(5, 0.0, {"accuracy": 5.0}))
    fleet.carry_out(fleet.run.engine.tick(1000.0))
    fleet.store.close()
    (row,) = read_status(plan.data_dir).rounds
    assert row.summary["metrics"]["accuracy"] == pytest.approx(0.75, abs=0.01)
