"""A run without a network: commands carried out on the model and the data directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.engine import Assign, Command, Phase
from fleetlearn_coordinator.run import Clocks, Run, describe, pooled, settings_of
from fleetlearn_coordinator.store import Store
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector
from line_bundle import write_line_bundle
from peers import PERSONAL, SIZE, PlanMaker, plan_text, report_of, update_of, write_personal_bundle

NOW = Clocks(0.0, 1000.0)


class Fleet:
    """A run whose devices answer at once."""

    def __init__(self, plan: Plan) -> None:
        bundle = open_bundle(plan.bundle)
        self.store = Store(plan.data_dir, bundle.sha256)
        self.run = Run(plan, bundle, self.store, NOW)

    def check_in(self, *devices: str) -> list[Command]:
        return [
            command
            for device in devices
            for command in self.run.carry_out(self.run.engine.check_in(device, None, 0.0), NOW)
        ]

    def report(self, lease: Assign, update: Vector, **fields: Any) -> list[Command]:
        """Spool and accept the update; what the engine then wants, carried out."""
        slot = self.store.take_slot()
        self.store.write_slot(slot, 0, update.tobytes())
        report = report_of(lease, update, **fields)  # type: ignore[arg-type]
        self.run.accept(report, slot, float(np.abs(update).max()))
        return self.run.carry_out(self.run.engine.accept(lease.device, lease.task, 0.0), NOW)


def leases(commands: list[Command]) -> list[Assign]:
    return [command for command in commands if isinstance(command, Assign)]


def test_a_plan_becomes_the_engine_s_settings(make_plan: PlanMaker) -> None:
    stop = {"stop__metric": "loss", "stop__target": 0.5, "stop__epsilon": 1e-6, "stop__rounds": 7}
    plan = make_plan(round__goal=10, round__over_selection=1.25, **stop)
    settings = settings_of(plan)
    assert (settings.goal, settings.cohort, settings.minimum) == (10, 13, 1)
    assert (settings.rounds, settings.metric, settings.target, settings.below) == (7, "loss", 0.5, True)
    assert settings.epsilon == 1e-6
    assert settings_of(make_plan()).epsilon == 0.0


def test_the_optimizer_s_state_goes_on_over_a_restart(make_plan: PlanMaker) -> None:
    """Two rounds of momentum in one process, and in two: the same model. By hand: v = 1, then 0.9 + 1 = 1.9."""
    plan = make_plan(round__goal=1, server__optimizer="momentum", server__momentum=0.9, server__lr=1.0)
    fleet = Fleet(plan)
    initial = fleet.run.model.copy()
    (first,) = leases(fleet.check_in("a"))
    fleet.report(first, update_of(1.0))
    np.testing.assert_array_equal(fleet.run.model, initial + np.float32(1.0))
    fleet.store.close()
    fleet = Fleet(plan)
    assert fleet.run.engine.version == 1
    fleet.run.resume(NOW)
    (second,) = leases(fleet.check_in("a"))
    fleet.run.carry_out(fleet.run.engine.tick(0.0), NOW)
    fleet.report(second, update_of(1.0))
    np.testing.assert_allclose(fleet.run.model, initial + np.float32(2.9), rtol=0, atol=1e-6)


def test_the_model_is_what_travels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_personal_bundle(tmp_path / "personal.bundle")
    plan = Plan.parse(plan_text(path, tmp_path / "run", round__goal=1), tmp_path)
    fleet = Fleet(plan)
    initial = open_bundle(path).parameters()
    assert "adds a correction to the gradient (SCAFFOLD)" in caplog.text
    np.testing.assert_array_equal(fleet.run.model, initial[: SIZE - PERSONAL])
    (lease,) = leases(fleet.check_in("a"))
    fleet.report(lease, update_of(1.0, SIZE - PERSONAL))
    np.testing.assert_array_equal(fleet.run.model, initial[: SIZE - PERSONAL] + np.float32(1))
    fleet.store.close()
    version, model = read_model(tmp_path / "run")
    assert (version, model.shape) == (1, (SIZE - PERSONAL,))
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    np.testing.assert_array_equal(fleet.run.model, model)
    fleet.store.close()


@pytest.mark.parametrize("recipe", ["fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_buffers_take_the_mean_of_the_devices_whatever_the_server_optimizer(tmp_path: Path, recipe: str) -> None:
    """``seen`` of the line's bundle is 7. Two devices with 10 examples each count 20 and 40: 7 + 30, over a restart
    too."""
    bundle = write_line_bundle(tmp_path / "line.bundle", references=["anchor"])
    plan = Plan.parse(plan_text(bundle.path, tmp_path / "run", recipe, local__lr=0.1), tmp_path)
    for statistic in (37.0, 67.0):
        fleet = Fleet(plan)
        assert fleet.run.bundle.manifest.parameters[1].buffer
        fleet.run.resume(NOW)
        commands = leases([*fleet.check_in("a", "b"), *fleet.run.carry_out(fleet.run.engine.tick(0.0), NOW)])
        for lease, seen in zip(commands, (20.0, 40.0), strict=True):
            fleet.report(lease, np.array([0.5, -0.5, 0.25, seen, 0.125], np.float32))
        assert fleet.run.model[3] == statistic
        fleet.store.close()


def test_another_server_optimizer_begins_with_a_fresh_state(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    Fleet(make_plan(server__optimizer="momentum")).store.close()
    with caplog.at_level(logging.WARNING):
        fleet = Fleet(make_plan(server__optimizer="adam"))
    assert "the server optimizer is now adam: its state begins anew" in caplog.text
    assert set(fleet.run.state) == set(fleet.run.optimizer.init(fleet.run.model))


def test_a_finished_run_goes_on_when_the_plan_wants_more_rounds(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=1))
    (lease,) = leases(fleet.check_in("a"))
    fleet.report(lease, update_of(1.0))
    assert fleet.run.finished == "1 rounds done"
    fleet.store.close()
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=1))
    assert fleet.run.engine.phase is Phase.FINISHED
    fleet.store.close()
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=2))
    assert fleet.run.finished is None
    assert len(leases(fleet.check_in("a"))) == 1


def test_fewer_rounds_than_are_done_are_enough(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=5))
    commands = fleet.check_in("a")
    for _ in range(2):
        commands = fleet.report(leases(commands)[-1], update_of(1.0))
    fleet.store.close()
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=2))
    assert fleet.run.finished == "2 rounds done"
    assert fleet.run.resume(NOW) == []
    fleet.store.close()
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=3))
    fleet.run.resume(NOW)
    assert len(leases(fleet.check_in("a"))) == 1, "the round that was open goes on"


def test_a_device_has_no_more_say_in_the_metrics_than_in_the_model(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=2, round__max_weight=10))
    first, second = leases(fleet.check_in("a", "b"))
    fleet.report(first, update_of(0.0), evaluation=Evaluation(10, 20.0, {"accuracy": 5.0, "made-up": 1.0}))
    fleet.report(
        second,
        update_of(0.0),
        metrics={"accuracy": 1.0, "loss": 0.0},
        evaluation=Evaluation(1000, 0.0, {"accuracy": 1000.0}),
    )
    (row,) = read_status(fleet.run.plan.data_dir).rounds
    assert row.summary["evaluation"] == {"accuracy": 0.75, "loss": 1.0}
    assert row.summary["train"] == {"accuracy": 1.0, "loss": 0.5}


def test_a_device_s_weight_is_capped(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=2, round__max_weight=3))
    commands = leases(fleet.check_in("a", "b"))
    initial = fleet.run.model.copy()
    for lease, value in zip(commands, (0.0, 1.0), strict=True):
        fleet.report(lease, update_of(value))  # both claim 10 examples
    np.testing.assert_array_equal(fleet.run.model, initial + np.float32(0.5))
    assert fleet.run.model.shape == (SIZE,)


def test_metrics_are_pooled_by_examples() -> None:
    """(3 * 0.5 + 1 * 1.0) / 4; a metric that one device lacks is the others' mean."""
    rows = [(3, {"loss": 1.5, "accuracy": 3.0}), (1, {"loss": 1.0})]
    assert pooled(rows) == {"loss": 0.625, "accuracy": 1.0}
    assert pooled(rows) == pooled(rows[::-1])
    assert pooled([]) == {}


def test_a_round_in_one_line() -> None:
    summary = {
        "reports": 8,
        "partial": 1,
        "dropped": {"lost": 2, "late": 1},
        "metrics": {"loss": 0.25, "accuracy": 0.9},
        "change": 0.125,
        "seconds": 1.5,
    }
    line = "8 reports (1 partial), dropped: 1 late, 2 lost; loss 0.25, accuracy 0.9; change 0.125; 1.50 s"
    assert describe(summary) == line


def test_a_round_s_length_does_not_follow_the_wall_clock(make_plan: PlanMaker) -> None:
    """It is set back by an hour while the round is open."""
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=1))
    (lease,) = leases(fleet.check_in("a"))
    commands = fleet.run.engine.end("a", lease.task, "failed: diverged", 1.0)
    later = Clocks(31.0, NOW.wall - 3600.0)
    fleet.run.carry_out([*commands, *fleet.run.engine.tick(later.engine)], later)
    fleet.store.close()
    assert read_status(fleet.run.plan.data_dir).rounds[-1].summary["seconds"] == 31.0
