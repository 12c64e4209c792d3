"""A run with two models, without a network: what survives, and what may change its averaged
models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from family_plans import LARGE, RAM, SMALL, family_plan
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.commands import Assign, Command, Finish
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.training_run.refining import AveragedRound
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_coordinator.storage import store
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector
from peers import BUFFERED, update_of

MEMORY = {"a": RAM, "b": RAM, "c": RAM - 1}
SIZES = {"a": LARGE, "b": LARGE, "c": SMALL}
ALL = {"round__goal": 3, "round__minimum": 3, "round__gather": 30.0, "round__grace": 30.0}
ADAM = {"server__optimizer": "adam", "server__lr": 0.5}


def begin(plan: Plan) -> Fleet:
    """Begin a run, or go on with it."""
    fleet = Fleet(plan, MEMORY)
    fleet.run.resume(NOW)
    return fleet


def given(commands: list[Command]) -> dict[str, Assign]:
    return {lease.device: lease for lease in leases(commands)}


def report(fleet: Fleet, lease: Assign, value: float) -> list[Command]:
    return fleet.report(lease, update_of(value, SIZES[lease.device]))


def members_of(model: Vector) -> tuple[Vector, Vector]:
    return model[:LARGE], model[LARGE:]


@pytest.mark.parametrize("held", [1, 2, 32])
def test_a_process_that_dies_at_any_report_changes_nothing(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sum that is saved after each report, after two, and never."""
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", held)
    models = []
    for dies in (False, True):
        folder = tmp_path / str(dies)
        folder.mkdir()
        plan = family_plan(folder, **ALL, **ADAM, stop__rounds=2)
        fleet = begin(plan)
        for round in (1, 2):
            tasks = given(fleet.check_in(*"abc"))
            tasks |= {} if tasks else given(fleet.check_in(*"abc"))
            for device, value in (("b", 1.0), ("c", 3.0), ("a", 2.5)):
                if dies:
                    fleet.store.close()
                    fleet = begin(plan)
                    tasks |= given(fleet.check_in(*"abc"))
                heard = report(fleet, tasks[device], value * round)
                tasks |= given(heard)
        assert any(isinstance(command, Finish) for command in heard)
        fleet.store.close()
        models.append(read_model(plan.data_dir)[1].tobytes())
        members = read_status(plan.data_dir).rounds[-1].summary["members"]
        assert {name: own["reports"] for name, own in members.items()} == {"large": 2, "small": 1}
    assert models[0] == models[1]


def test_a_roll_back_restores_every_member_and_its_optimizer(tmp_path: Path) -> None:
    """The round after it makes the model that the same round made before."""
    plan = family_plan(tmp_path, **ALL, **ADAM, stop__rounds=9, models__last=9)
    fleet = begin(plan)
    tasks = given(fleet.check_in(*"abc"))
    for round in (1, 2):
        heard = [each for device in "abc" for each in report(fleet, tasks[device], round)]
        tasks = given(heard)
    ask_to_roll_back(plan.data_dir, 1, "test")
    assert fleet.run.roll_backs.look(NOW.wall)
    heard = fleet.run.work.do_work(NOW)
    newest = fleet.run.models.newest
    assert (newest.version, [each.version for each in newest.members]) == (3, [3, 3])
    for own, part in zip(newest.members, members_of(newest.model), strict=True):
        assert np.shares_memory(own.model, newest.model)
        assert own.model.tobytes() == part.tobytes()
    tasks = given(heard) or given(fleet.check_in(*"abc"))
    for device in "abc":
        report(fleet, tasks[device], 2)
    fleet.store.close()
    models = {version: read_model(plan.data_dir, version)[1] for version in range(1, 5)}
    assert models[3].tobytes() == models[1].tobytes()
    assert models[4].tobytes() == models[2].tobytes()
    assert all((part != 0).any() for part in members_of(models[2] - models[1]))


def test_members_of_tasks_that_are_over_are_forgotten(tmp_path: Path) -> None:
    plan = family_plan(tmp_path, **{**BUFFERED, "round__goal": 1}, stop__rounds=99)
    fleet = begin(plan)
    tasks = given(fleet.check_in(*"abc"))
    for _ in range(5):
        tasks |= given(report(fleet, tasks["a"], 1.0))
    held = {lease.task for lease in tasks.values()}
    assert fleet.run.members._of_task.keys() <= held | {tasks["a"].task}
    members = fleet.run.members
    assert members.of_task(tasks["c"].task).name == "small"
    assert members.of_task("unknown").name == "large"


def test_what_the_plan_does_not_use_is_said_of_each_member(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = family_plan(tmp_path, "fedprox", **ALL, local__mu=0)
    with caplog.at_level(logging.WARNING):
        Fleet(plan, MEMORY).store.close()
    assert "large, small: local.mu = 0: recipe fedprox without its proximal term" in caplog.text


# Other models in the place of the averaged ones


class Doubling:
    """Gives the member ``small`` twice its model, when it is told to."""

    waits_on = "the round waits for twice its model"

    def __init__(self, *, keeps_updates: bool = True) -> None:
        self.keeps_updates = keeps_updates
        self.asked: list[AveragedRound] = []
        self.forgotten = 0

    def begin(self, averaged: AveragedRound) -> None:
        self.asked.append(averaged)

    def forget(self) -> None:
        self.forgotten += 1

    def models(self) -> Mapping[str, Vector]:
        return {"small": 2 * self.asked[-1].models["small"]}


def refined(plan: Plan, **more: bool) -> tuple[Fleet, Doubling]:
    fleet, refiner = Fleet(plan, MEMORY), Doubling(**more)
    fleet.run.work.refiner = refiner
    fleet.run.resume(NOW)
    return fleet, refiner


def close_round(fleet: Fleet) -> dict[str, Assign]:
    """Let all devices report, 1.0 each, in another order than that of their tasks."""
    tasks = given(fleet.check_in(*"abc"))
    for device in "cba":
        report(fleet, tasks[device], 1.0)
    return tasks


def test_a_round_waits_for_other_models_of_its_members(tmp_path: Path) -> None:
    plan = family_plan(tmp_path, **ALL, stop__rounds=9)
    fleet, refiner = refined(plan)
    tasks = close_round(fleet)
    run = fleet.run
    assert (run.engine.phase, run.engine.version) == (Phase.COMMITTING, 0)
    assert run.engine.waits_on == refiner.waits_on
    (asked,) = refiner.asked
    assert (asked.number, asked.version) == (1, 1)
    assert [each.task for each in asked.updates] == sorted(lease.task for lease in tasks.values())
    names = [member.name for member in run.members.all]
    for update in asked.updates:
        name = names[update.columns.member]
        size = asked.models[name].size
        own = asked.before[name] + update.columns.update(UPDATE, 0).read(0, size)
        assert own.tobytes() == asked.models[name].tobytes()
    run.work.refined(2, refiner.models(), {})  # of another round
    assert run.work.do_work(NOW) == []
    run.work.refined(1, refiner.models(), {"by": 2})
    assert len(leases(run.work.do_work(NOW))) == 3
    assert (run.engine.version, run.engine.waits_on) == (1, "")
    large, small = members_of(read_model(plan.data_dir)[1])
    assert large.tobytes() == asked.models["large"].tobytes()
    assert small.tobytes() == (2 * asked.models["small"]).tobytes()
    whole = read_status(plan.data_dir).rounds[-1].summary
    summary = whole["members"]
    assert whole["by"] == 2
    moved = np.linalg.norm((small - asked.before["small"]).astype(np.float64))
    assert summary["small"]["change"] == pytest.approx(moved)


@pytest.mark.parametrize("held", [1, 32])
def test_a_start_asks_again_for_the_same_models(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", held)
    plan = family_plan(tmp_path, **ALL, stop__rounds=9)
    fleet, refiner = refined(plan)
    close_round(fleet)
    fleet.store.close()
    again, after = refined(plan)
    (before,), (asked,) = refiner.asked, after.asked
    assert again.run.engine.phase is Phase.COMMITTING
    assert [each.task for each in asked.updates] == [each.task for each in before.updates]
    for name, model in before.models.items():
        assert asked.models[name].tobytes() == model.tobytes()
    again.run.work.refined(1, after.models(), {})
    again.run.work.do_work(NOW)
    assert again.run.engine.version == 1


def test_updates_that_nobody_needs_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SPOOL_FILES_HELD", 1)
    fleet, refiner = refined(family_plan(tmp_path, **ALL, stop__rounds=9), keeps_updates=False)
    close_round(fleet)
    assert refiner.asked[0].updates == []
    assert fleet.store.spool_files == 0


def test_a_roll_back_does_not_wait_for_other_models(tmp_path: Path) -> None:
    plan = family_plan(tmp_path, **ALL, stop__rounds=9)
    fleet, refiner = refined(plan)
    close_round(fleet)
    fleet.run.work.refined(1, {}, {})
    fleet.run.work.do_work(NOW)
    tasks = given(fleet.check_in(*"abc"))
    for device in "abc":
        report(fleet, tasks[device], 1.0)
    ask_to_roll_back(plan.data_dir, 0, "test")
    assert fleet.run.roll_backs.look(NOW.wall)
    fleet.run.work.do_work(NOW)
    assert refiner.forgotten == 1
    assert fleet.run.engine.version == 2
    fleet.run.work.refined(2, refiner.models(), {})
    assert fleet.run.work.do_work(NOW) == []
    assert fleet.run.engine.waits_on == ""
