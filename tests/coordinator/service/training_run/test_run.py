"""A run without a network: commands carried out on the model and the data directory."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.commands import Abandon, Commit, Finish
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_coordinator.storage import store
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.ledger import Metadata, RoundClosed
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import Evaluation
from line_bundle import write_line_bundle
from peers import PERSONAL, SIZE, PlanMaker, plan_text, update_of, write_personal_bundle


def test_a_plan_becomes_the_engine_s_settings(make_plan: PlanMaker) -> None:
    stop = {"stop__metric": "loss", "stop__target": 0.5, "stop__epsilon": 1e-6, "stop__rounds": 7}
    plan = make_plan(round__goal=10, round__over_selection=1.25, **stop)
    settings = plan.engine_settings(15.0)
    assert (settings.goal, settings.cohort, settings.minimum) == (10, 13, 1)
    assert (settings.rounds, settings.metric, settings.target, settings.below) == (
        7,
        "loss",
        0.5,
        True,
    )
    assert settings.epsilon == 1e-6
    assert make_plan().engine_settings(15.0).epsilon == 0.0


def test_a_lease_that_is_revived_is_running_in_the_data_directory_too(make_plan: PlanMaker) -> None:
    """Its device was lost and returns with its work done. After a restart its slot is still its
    own."""
    plan = make_plan(round__goal=2, round__minimum=2)
    fleet = Fleet(plan)
    first, _ = leases(fleet.check_in("a", "b"))
    grace = fleet.run.engine.settings.grace
    fleet.run.record(fleet.run.engine.disconnect(first.device, 0.0), NOW)
    fleet.run.record(fleet.run.engine.tick(grace), NOW)
    assert [row.state for row in read_tasks(plan.data_dir)[1] if row.task == first.task] == ["lost"]
    fleet.run.record(fleet.run.engine.check_in(first.device, None, grace), NOW)
    fleet.run.record(fleet.run.engine.announce(first.device, first.task, 1, 0.0), NOW)
    assert [row.state for row in read_tasks(plan.data_dir)[1] if row.task == first.task] == [
        "assigned"
    ]
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    assert fleet.run.engine.takes_report(first.device, first.task)
    fleet.store.close()


def test_whoever_listens_is_told_that_a_round_is_over(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=1))
    (lease,) = leases(fleet.check_in("a"))
    fleet.save_update(lease, update_of(1.0))
    (commit,) = fleet.run.record(fleet.run.engine.count_report("a", lease.task, 0.0), NOW)
    assert commit == Commit(1, {})
    (finish,) = fleet.run.commit(commit, NOW)
    assert isinstance(finish, Finish)
    fleet.store.close()


def test_a_save_of_an_abandoned_round_s_sum_does_not_count(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is abandoned while its sum is written: its spool files are free already, once."""
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 2)
    fleet = Fleet(make_plan(round__goal=3, round__minimum=3, round__deadline=60.0))
    first, second, _ = leases(fleet.check_in("a", "b", "c"))
    for lease in (first, second):
        fleet.save_update(lease, update_of(1.0), add=False)
        assert fleet.carry_out(fleet.run.engine.count_report(lease.device, lease.task, 0.0)) == []
    for _ in range(2):
        add = fleet.run.work.next_work()
        assert add is not None
        assert add.end(add.work(), NOW) == []
    save = fleet.run.work.next_work()
    assert save is not None
    written = save.work()
    commands = fleet.carry_out(fleet.run.engine.tick(60.0), Clocks(60.0, 1060.0))
    assert isinstance(commands[1], Abandon), commands
    assert save.end(written, NOW) == []
    assert fleet.store.ledger.get("sum") is None
    assert sorted(fleet.store.blobs.take_spool_file() for _ in range(3)) == [0, 1, 2]
    assert fleet.run.work.next_work() is None
    fleet.store.close()


def test_updates_of_an_abandoned_round_are_not_added(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=2, round__minimum=2, round__deadline=60.0))
    lease, _ = leases(fleet.check_in("a", "b"))
    fleet.save_update(lease, update_of(1.0), add=False)
    fleet.carry_out(fleet.run.engine.tick(60.0), Clocks(60.0, 1060.0))
    assert fleet.run.work.next_work() is None
    fleet.store.close()


def test_the_optimizer_s_state_goes_on_over_a_restart(make_plan: PlanMaker) -> None:
    """Two rounds of momentum in one process, and in two: the same model. By hand: v = 1, then 0.9 +
    1 = 1.9."""
    plan = make_plan(
        round__goal=1, server__optimizer="momentum", server__momentum=0.9, server__lr=1.0
    )
    fleet = Fleet(plan)
    initial = fleet.run.models.newest.model.copy()
    (first,) = leases(fleet.check_in("a"))
    fleet.report(first, update_of(1.0))
    np.testing.assert_array_equal(fleet.run.models.newest.model, initial + np.float32(1.0))
    fleet.store.close()
    fleet = Fleet(plan)
    assert fleet.run.engine.version == 1
    fleet.run.resume(NOW)
    (second,) = leases(fleet.check_in("a"))
    fleet.carry_out(fleet.run.engine.tick(0.0))
    fleet.report(second, update_of(1.0))
    np.testing.assert_allclose(
        fleet.run.models.newest.model, initial + np.float32(2.9), rtol=0, atol=1e-6
    )


def test_the_model_is_what_travels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_personal_bundle(tmp_path / "personal.bundle")
    plan = Plan.parse(plan_text(path, tmp_path / "run", round__goal=1), tmp_path)
    fleet = Fleet(plan)
    initial = open_bundle(path).parameters()
    assert "adds a correction to the gradient, and this plan has none" in caplog.text
    np.testing.assert_array_equal(fleet.run.models.newest.model, initial[: SIZE - PERSONAL])
    (lease,) = leases(fleet.check_in("a"))
    fleet.report(lease, update_of(1.0, SIZE - PERSONAL))
    np.testing.assert_array_equal(
        fleet.run.models.newest.model, initial[: SIZE - PERSONAL] + np.float32(1)
    )
    fleet.store.close()
    version, model = read_model(tmp_path / "run")
    assert (version, model.shape) == (1, (SIZE - PERSONAL,))
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    np.testing.assert_array_equal(fleet.run.models.newest.model, model)
    fleet.store.close()


@pytest.mark.parametrize("recipe", ["fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_buffers_take_the_mean_of_the_devices_whatever_the_server_optimizer(
    tmp_path: Path, recipe: str
) -> None:
    """``seen`` of the line's bundle is 7. Two devices with 10 examples each count 20 and 40: 7 +
    30, over a restart too."""
    bundle = write_line_bundle(tmp_path / "line.bundle", references=["anchor"])
    plan = Plan.parse(plan_text(bundle.path, tmp_path / "run", recipe, local__lr=0.1), tmp_path)
    for statistic in (37.0, 67.0):
        fleet = Fleet(plan)
        assert fleet.run.bundle.manifest.parameters[1].buffer
        fleet.run.resume(NOW)
        commands = leases([*fleet.check_in("a", "b"), *fleet.carry_out(fleet.run.engine.tick(0.0))])
        for lease, seen in zip(commands, (20.0, 40.0), strict=True):
            fleet.report(lease, np.array([0.5, -0.5, 0.25, seen, 0.125], np.float32))
        assert fleet.run.models.newest.model[3] == statistic
        fleet.store.close()


def test_another_server_optimizer_begins_with_a_fresh_state(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    Fleet(make_plan(server__optimizer="momentum")).store.close()
    with caplog.at_level(logging.WARNING):
        fleet = Fleet(make_plan(server__optimizer="adam"))
    assert "the server optimizer is now adam: its state starts from the beginning" in caplog.text
    assert set(fleet.run.models.newest.optimizer_state) == set(
        fleet.run.reports.rules.optimizer.init(fleet.run.models.newest.model)
    )


@pytest.mark.parametrize(
    ("before", "after"), [("adagrad", "adam"), ("adam", "yogi"), ("yogi", "adagrad")]
)
def test_a_state_is_never_read_as_another_optimizer_s(
    make_plan: PlanMaker, before: str, after: str
) -> None:
    """Their slots have the same names. A start that made no model changes no slot."""
    fleet = Fleet(make_plan(round__goal=1, server__optimizer=before))
    fleet.report(leases(fleet.check_in("a"))[0], update_of(1.0))
    earlier = fleet.run.models.newest.optimizer_state["v"].copy()
    fleet.store.close()
    for _ in range(2):
        fleet = Fleet(make_plan(round__goal=1, server__optimizer=after))
        fresh = fleet.run.reports.rules.optimizer.init(fleet.run.models.newest.model)
        assert {
            slot: values.tobytes()
            for slot, values in fleet.run.models.newest.optimizer_state.items()
        } == {slot: values.tobytes() for slot, values in fresh.items()}
        fleet.store.close()
    fleet = Fleet(make_plan(round__goal=1, server__optimizer=before))
    np.testing.assert_array_equal(fleet.run.models.newest.optimizer_state["v"], earlier)
    fleet.store.close()


def test_a_data_directory_without_the_optimizer_s_name_goes_on(make_plan: PlanMaker) -> None:
    """The version before left such a directory."""
    fleet = Fleet(make_plan(round__goal=1, server__optimizer="adagrad"))
    fleet.report(leases(fleet.check_in("a"))[0], update_of(1.0))
    earlier = fleet.run.models.newest.optimizer_state["v"].copy()
    for key in ("optimizer", "state_crc32"):
        fleet.store.write([Metadata(key, None)])
    fleet.store.close()
    fleet = Fleet(make_plan(round__goal=1, server__optimizer="adagrad"))
    np.testing.assert_array_equal(fleet.run.models.newest.optimizer_state["v"], earlier)
    fleet.store.close()


ACCURACY = {"stop__metric": "accuracy", "stop__target": 0.9}


def accurate(value: float, examples: int = 10) -> Evaluation:
    return Evaluation(examples, 1.0, {"accuracy": value * examples})


@pytest.mark.parametrize("value", [1e30 / 10, 1.01, 1e3])
def test_one_device_s_impossible_metric_does_not_stop_the_run(
    make_plan: PlanMaker, value: float
) -> None:
    fleet = Fleet(make_plan(round__goal=4, **ACCURACY))
    commands = leases(fleet.check_in("a", "b", "c", "d"))
    for lease, own in zip(commands, (value, 0.5, 0.5, 0.5), strict=True):
        fleet.report(lease, update_of(1.0), evaluation=accurate(own))
    assert fleet.run.finished is None
    (row,) = read_status(fleet.run.plan.data_dir).rounds
    assert row.summary["metrics"]["accuracy"] == 0.5
    assert row.summary["behind"] == {"accuracy": 3, "loss": 4}
    assert row.summary["left_out"] == {"accuracy": 1}
    fleet.store.close()


def test_a_mean_at_the_bound_counts(make_plan: PlanMaker) -> None:
    """Rounding in float32 may take it a little beyond; training's mean is measured too."""
    fleet = Fleet(make_plan(round__goal=2, **ACCURACY))
    for lease, own in zip(leases(fleet.check_in("a", "b")), (1.0, 1.0 + 2e-7), strict=True):
        fleet.report(lease, update_of(1.0), evaluation=accurate(own), metrics={"accuracy": 1.0})
    assert str(fleet.run.finished).startswith(
        "accuracy of model version 0 is 1 on the devices' training"
    )
    fleet.store.close()


def test_a_metric_needs_the_minimum_of_devices_to_stop_the_run(make_plan: PlanMaker) -> None:
    """Three devices report, of whom two do not evaluate: the third's accuracy is shown, and stops
    nothing."""
    fleet = Fleet(make_plan(round__goal=3, round__minimum=2, **ACCURACY))
    commands = fleet.check_in("a", "b", "c")
    for told in ([1.0, None, None], [1.0, 0.9, None]):
        assert fleet.run.finished is None
        for lease, own in zip(leases(commands), told, strict=True):
            commands = fleet.report(
                lease, update_of(1.0), evaluation=None if own is None else accurate(own)
            )
    assert fleet.run.finished == (
        "accuracy of model version 1 is 0.95 on the devices' training examples; the target is 0.9"
    )
    rounds = read_status(fleet.run.plan.data_dir).rounds
    assert [row.summary["metrics"]["accuracy"] for row in rounds] == [1.0, 0.95]
    fleet.store.close()


def stopped_by(plan: Plan) -> tuple[str | None, dict[str, Any] | None]:
    """Why a run is over at its start, and the rule as data."""
    fleet = Fleet(plan)
    fleet.store.close()
    status = read_status(plan.data_dir)
    assert fleet.run.finished == status.finished
    assert (fleet.run.engine.phase is Phase.FINISHED) == (status.finished is not None)
    return status.finished, status.finished_by


def test_a_run_that_reached_its_target_goes_on_when_the_target_is_raised(
    make_plan: PlanMaker,
) -> None:
    fleet = Fleet(make_plan(round__goal=1, **ACCURACY))
    fleet.report(leases(fleet.check_in("a"))[0], update_of(1.0), evaluation=accurate(0.92))
    fleet.store.close()
    reason = (
        "accuracy of model version 0 is 0.92 on the devices' training examples; the target is 0.9"
    )
    value = pytest.approx(0.92)
    rule = {
        "rule": "metric",
        "metric": "accuracy",
        "value": value,
        "limit": 0.9,
        "reason": reason,
        "version": 0,
    }
    assert stopped_by(make_plan(**ACCURACY)) == (reason, rule)
    assert stopped_by(make_plan(stop__rounds=5, **ACCURACY)) == (reason, rule)
    assert stopped_by(make_plan(**(ACCURACY | {"stop__target": 0.95}))) == (None, None)
    assert stopped_by(make_plan()) == (None, None), "the rule was removed"
    assert stopped_by(make_plan(stop__metric="loss", stop__target=0.01)) == (None, None)
    assert stopped_by(make_plan(**ACCURACY)) == (reason, rule)
    fleet = Fleet(make_plan(round__goal=1, **(ACCURACY | {"stop__target": 0.95})))
    assert len(leases(fleet.check_in("a"))) == 1
    fleet.store.close()


def test_a_run_that_hardly_moved_goes_on_when_epsilon_is_lowered(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=1, stop__epsilon=1.0))
    fleet.report(leases(fleet.check_in("a"))[0], update_of(0.001))
    fleet.store.close()
    reason, rule = stopped_by(make_plan(stop__epsilon=1.0))
    assert reason == "the model's change, 0.265, is below 1"
    assert rule is not None
    assert (rule["rule"], rule["limit"]) == ("epsilon", 1.0)
    assert rule["value"] == pytest.approx(0.001 * SIZE**0.5, rel=1e-3)
    assert stopped_by(make_plan(stop__epsilon=0.1)) == (None, None)


def test_a_run_that_the_version_before_finished_goes_on_too(make_plan: PlanMaker) -> None:
    """It kept a sentence; its rounds have no counts."""
    fleet = Fleet(make_plan(round__goal=1))
    fleet.report(leases(fleet.check_in("a"))[0], update_of(1.0), evaluation=accurate(0.92))
    summary = fleet.store.ledger.last_committed() or {}
    fleet.store.write(
        [RoundClosed(1, "committed", {key: summary[key] for key in ("metrics", "change")}, 1.0)]
    )
    fleet.store.write([Metadata("finished", "accuracy is 0.92; the target is 0.9")])
    fleet.store.close()
    assert stopped_by(make_plan(**ACCURACY))[0] == (
        "accuracy of model version 0 is 0.92 on the devices' training examples; the target is 0.9"
    )
    assert stopped_by(make_plan(**(ACCURACY | {"stop__target": 0.95}))) == (None, None)
    fleet = Fleet(make_plan())
    fleet.store.write(
        [RoundClosed(1, "committed", {"metrics": {"accuracy": 2.5e28}, "change": 1.0}, 1.0)]
    )
    fleet.store.close()
    assert stopped_by(make_plan(**ACCURACY)) == (None, None), "one device had said so"


def test_a_round_whose_files_are_damaged_can_be_given_up(make_plan: PlanMaker) -> None:
    """Refused by name first; with the folder of the sums removed the next start abandons the round,
    once."""
    plan = make_plan(round__goal=3)
    fleet = Fleet(plan)
    initial = fleet.run.models.newest.model.copy()
    first, _, _ = leases(fleet.check_in("a", "b", "c"))
    fleet.report(first, update_of(1.0))
    fleet.store.close()
    spool_file = plan.data_dir / "uploads" / "slot-0000"
    spool_file.write_bytes(bytes(spool_file.stat().st_size))
    fleet = Fleet(plan)
    with pytest.raises(
        StoreError,
        match=r"slot-0000.* is damaged\. .*remove .*sums: the next start then gives up what",
    ):
        fleet.run.resume(NOW)
    fleet.store.close()
    shutil.rmtree(plan.data_dir / "sums")
    Fleet(plan).store.close()  # killed before it could: the folder is there again
    fleet = Fleet(plan)
    assert fleet.run.resume(NOW) == []
    (row,) = read_status(plan.data_dir).rounds
    assert (row.outcome, row.summary["reports"], row.summary["dropped"]) == (
        "abandoned",
        1,
        {"lost": 2},
    )
    assert {task.state for task in read_tasks(plan.data_dir, 1)[1]} == {"accepted", "lost"}
    for lease in leases(fleet.check_in("a", "b", "c")):
        assert lease.round == 2
        fleet.report(lease, update_of(2.0))
    np.testing.assert_array_equal(fleet.run.models.newest.model, initial + np.float32(2.0))
    fleet.store.close()


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
    fleet.report(
        first, update_of(0.0), evaluation=Evaluation(10, 20.0, {"accuracy": 5.0, "made-up": 1.0})
    )
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
    initial = fleet.run.models.newest.model.copy()
    for lease, value in zip(commands, (0.0, 1.0), strict=True):
        fleet.report(lease, update_of(value))  # both claim 10 examples
    np.testing.assert_array_equal(fleet.run.models.newest.model, initial + np.float32(0.5))
    assert fleet.run.models.newest.model.shape == (SIZE,)


def test_a_round_s_length_does_not_follow_the_wall_clock(make_plan: PlanMaker) -> None:
    """The wall clock is set back by an hour while the round is open."""
    fleet = Fleet(make_plan(round__goal=1, stop__rounds=1))
    (lease,) = leases(fleet.check_in("a"))
    commands = fleet.run.engine.end("a", lease.task, "failed: diverged", 1.0)
    later = Clocks(31.0, NOW.wall - 3600.0)
    fleet.carry_out([*commands, *fleet.run.engine.tick(later.engine)], later)
    fleet.store.close()
    assert read_status(fleet.run.plan.data_dir).rounds[-1].summary["seconds"] == 31.0
