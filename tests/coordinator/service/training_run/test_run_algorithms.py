"""Runs whose devices keep tied vectors: what is counted, and what a restart at any moment finds."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.rounds.commands import Assign, Commit
from fleetlearn_coordinator.service.training_run.round_reports import given_in_order
from fleetlearn_protocol import ProtocolError
from fleetlearn_protocol.vector import Vector, digest
from peers import BUFFERED, PERSONAL, SIZE, plan_text, write_personal_bundle

P = SIZE - PERSONAL
"""Elements of the model."""


def scaffold_plan(folder: Path, **settings: object) -> Plan:
    bundle = folder / "scaffold.bundle"
    if not bundle.exists():
        write_personal_bundle(bundle)
    settings = {"recipe": "scaffold", "server__devices": 5, "local__lr": 0.5} | settings
    return Plan.parse(plan_text(bundle, folder / "run", **settings), folder)  # type: ignore[arg-type]


def vector(value: float) -> Vector:
    return np.full(P, value, np.float32)


def finish(fleet: Fleet, commands: list[object]) -> None:
    (commit,) = (command for command in commands if isinstance(command, Commit))
    fleet.run.commit(commit, NOW)


def do_round(fleet: Fleet, tasks: list[Assign], update: float, control: float) -> None:
    for lease in tasks:
        fleet.save_parts(lease, {"update": vector(update), "control": vector(control)})
        commands = fleet.run.record(
            fleet.run.engine.count_report(lease.device, lease.task, 0.0), NOW
        )
    finish(fleet, commands)  # type: ignore[arg-type]


def test_the_control_variate_is_what_all_devices_keep_over_their_number(tmp_path: Path) -> None:
    """c' = c + (0.5 + 2) / 5, whatever the devices' examples; the update is the plain mean."""
    fleet = Fleet(scaffold_plan(tmp_path))
    first, second = leases(fleet.check_in("a", "b"))
    begin = fleet.run.models.newest.model.copy()
    assert fleet.run.models.newest.vectors["control"].tolist() == [0.0] * P
    assert fleet.run.tied_to("a") is None
    report = fleet.save_parts(first, {"update": vector(1.0), "control": vector(0.5)})
    fleet.run.engine.count_report(first.device, report.task, 0.0)
    assert fleet.run.tied_to(first.device) == first.task, (
        "its next task in this round, if it had one, goes on from there"
    )
    fleet.save_parts(second, {"update": vector(3.0), "control": vector(2.0)})
    finish(
        fleet, fleet.run.record(fleet.run.engine.count_report(second.device, second.task, 0.0), NOW)
    )  # type: ignore[arg-type]
    np.testing.assert_array_equal(fleet.run.models.newest.vectors["control"], vector(0.5))
    np.testing.assert_array_equal(fleet.run.models.newest.model, begin + vector(2.0))
    assert fleet.run.reports.tied == {}, "the next round is open"
    (member,) = fleet.run.members.all
    assert fleet.run.models.digests_of(0, ["control"], member)["control"] == digest(vector(0.0)), (
        "for a task of the first version"
    )
    found = [fleet.run.tied_to(device) for device in (first.device, second.device, "c")]
    assert found == [first.task, second.task, None]
    fleet.store.close()


def test_a_restart_finds_the_sum_of_each_part_and_who_goes_on_from_where(tmp_path: Path) -> None:
    """Killed with one report in the saved sums and one in its spool file: the same bits as
    undisturbed."""
    plan = scaffold_plan(tmp_path, round__goal=3)
    fleet = Fleet(plan)
    tasks = leases(fleet.check_in("a", "b", "c"))
    values = {"a": (0.1, 0.7), "b": (1e-9, 3.0), "c": (5.0, -0.3)}

    def save(fleet: Fleet, lease: Assign) -> list[object]:
        update, control = values[lease.device]
        fleet.save_parts(lease, {"update": vector(update), "control": vector(control)})
        fleet.run.work.do_work(NOW)
        return fleet.run.record(fleet.run.engine.count_report(lease.device, lease.task, 0.0), NOW)  # type: ignore

    save(fleet, tasks[0])
    fleet.store.end_save(fleet.store.begin_save(fleet.run.reports.round.sums.to_tensors())())
    save(fleet, tasks[1])
    fleet.store.close()
    shutil.copytree(plan.data_dir, tmp_path / "killed")
    fleet = Fleet(plan)
    assert [command.task for command in fleet.run.resume(NOW) if isinstance(command, Assign)] == []
    assert [fleet.run.tied_to(lease.device) for lease in tasks] == [
        tasks[0].task,
        tasks[1].task,
        None,
    ]
    fleet.run.record(fleet.run.engine.check_in(tasks[2].device, None, 0.0), NOW)
    finish(fleet, save(fleet, tasks[2]))
    expected = np.float32((np.float64(np.float32(0.7)) + 3.0 + np.float64(np.float32(-0.3))) / 5)
    np.testing.assert_array_equal(fleet.run.models.newest.vectors["control"], np.full(P, expected))
    fleet.store.close()
    fleet = Fleet(plan)
    np.testing.assert_array_equal(
        fleet.run.models.newest.vectors["control"],
        np.full(P, expected),
        err_msg="the model's file has it",
    )
    assert [fleet.run.tied_to(lease.device) for lease in tasks] == [lease.task for lease in tasks]
    fleet.store.close()


def test_what_an_abandoned_round_took_does_not_count(tmp_path: Path) -> None:
    fleet = Fleet(scaffold_plan(tmp_path, round__goal=2, round__minimum=2))
    first, _ = leases(fleet.check_in("a", "b"))
    fleet.save_parts(first, {"update": vector(1.0), "control": vector(0.5)})
    fleet.run.record(fleet.run.engine.count_report(first.device, first.task, 0.0), NOW)
    assert fleet.run.tied_to(first.device) == first.task
    fleet.run.record(fleet.run.engine.tick(1000.0), NOW)  # the deadline is over
    assert fleet.run.tied_to(first.device) is None, "the device goes on from what it had before"
    assert fleet.run.models.newest.vectors["control"].tolist() == [0.0] * P
    fleet.store.close()


def test_another_algorithm_lets_all_begin_from_zeros(tmp_path: Path) -> None:
    """What devices keep and what the coordinator keeps belong together: plain rounds between would
    part them."""
    plan = scaffold_plan(tmp_path)
    fleet = Fleet(plan)
    do_round(fleet, leases(fleet.check_in("a", "b")), 1.0, 0.5)
    assert fleet.run.tied_to("a") is not None
    fleet.store.close()
    for recipe, zeros in (("scaffold", False), ("fedavg", True), ("scaffold", True)):
        settings = {} if recipe == "scaffold" else {"server__devices": None}
        fleet = Fleet(scaffold_plan(tmp_path, recipe=recipe, **settings))
        assert (fleet.run.tied_to("a") is None) == zeros
        controls = fleet.run.models.newest.vectors.get("control")
        assert (controls is None) == (recipe == "fedavg")
        assert controls is None or (not controls.any()) == zeros
        fleet.store.close()


def test_zeros_stay_zeros_until_a_round_is_committed_with_them(tmp_path: Path) -> None:
    """Killed after the first start with another encoding: the newest model's file has the control
    variate of before."""
    fleet = Fleet(scaffold_plan(tmp_path))
    do_round(fleet, leases(fleet.check_in("a", "b")), 1.0, 0.5)
    fleet.store.close()
    for _ in range(2):
        fleet = Fleet(scaffold_plan(tmp_path, encoding__up="topk-0.1"))
        assert fleet.run.tied_to("a") is None
        assert not fleet.run.models.newest.vectors["control"].any()
        fleet.store.close()


@pytest.mark.parametrize("before", ["fedavg", "scaffold"])
def test_another_algorithm_gives_up_the_open_round(tmp_path: Path, before: str) -> None:
    """Reports of the open round have no part ``control``, or its sum is of changes of what devices
    have forgotten."""
    settings = {
        "fedavg": {"recipe": "fedavg", "server__devices": None},
        "scaffold": {"encoding__up": "topk-0.1"},
    }
    fleet = Fleet(scaffold_plan(tmp_path, round__goal=2, **settings[before]))
    first, _ = leases(fleet.check_in("a", "b"))
    parts = {"update": vector(1.0), "control": vector(0.5)}
    fleet.save_parts(
        first, {name: parts[name] for name in fleet.run.plan.parts(fleet.run.bundle.manifest)}
    )
    fleet.run.record(fleet.run.engine.count_report(first.device, first.task, 0.0), NOW)
    fleet.store.close()
    # killed before it has given up anything
    Fleet(scaffold_plan(tmp_path, round__goal=2)).store.close()
    fleet = Fleet(scaffold_plan(tmp_path, round__goal=2))
    fleet.run.resume(NOW)
    assert fleet.run.tied_to(first.device) is None
    do_round(fleet, leases(fleet.check_in("a", "b")), 1.0, 0.5)
    assert fleet.run.models.newest.vectors["control"].tolist() == [np.float32(0.2)] * P
    fleet.store.close()


def test_another_algorithm_gives_up_reports_that_came_early(tmp_path: Path) -> None:
    asynchronous = {
        "round__participation": "asynchronous",
        "round__goal": 2,
        "round__concurrency": 4,
    }
    settings = {**BUFFERED, **asynchronous, "recipe": "fedavg", "server__devices": None}
    fleet = Fleet(scaffold_plan(tmp_path, **settings))
    tasks = leases(fleet.check_in("a", "b", "c", "d"))
    for lease in tasks[:3]:
        fleet.save_parts(lease, {"update": vector(1.0)})
        fleet.run.record(fleet.run.engine.count_report(lease.device, lease.task, 0.0), NOW)
    assert [row.round for row in fleet.store.ledger.unfinished(0).reports] == [1, 1, 2]
    fleet.store.close()
    fleet = Fleet(
        scaffold_plan(tmp_path, **settings | {"recipe": "scaffold", "server__devices": 5})
    )
    fleet.run.resume(NOW)
    found = fleet.store.ledger.unfinished(0)
    assert found.reports == found.leases == [], "the running task would report no control"
    assert fleet.run.work.do_work(NOW) == []
    fleet.store.close()


def test_a_part_beyond_what_the_exact_sum_holds_is_refused(tmp_path: Path) -> None:
    fleet = Fleet(scaffold_plan(tmp_path))
    first, _ = leases(fleet.check_in("a", "b"))
    with pytest.raises(ProtocolError, match="largest element is 1e"):
        fleet.save_parts(first, {"update": vector(1.0), "control": vector(1e11)})
    assert fleet.run.reports.round.accepted == []
    fleet.store.close()


def test_asynchronously_a_device_goes_on_from_its_last_report(tmp_path: Path) -> None:
    """Two tasks of one device in one open round; after a restart the later one is still the
    last."""
    settings = BUFFERED | {
        "recipe": "scaffold",
        "round__participation": "asynchronous",
        "round__goal": 12,
    }
    settings["round__concurrency"] = 1
    plan = scaffold_plan(tmp_path, **settings)
    fleet = Fleet(plan)
    tasks = leases(fleet.check_in("a"))
    for _ in range(11):
        fleet.save_parts(tasks[-1], {"update": vector(1.0), "control": vector(0.5)})
        commands = fleet.run.record(fleet.run.engine.count_report("a", tasks[-1].task, 0.0), NOW)
        assert fleet.run.tied_to("a") == tasks[-1].task
        tasks += leases(commands)
    assert len(tasks) == 12
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    assert fleet.run.tied_to("a") == tasks[10].task
    fleet.store.close()


def test_a_report_that_came_early_is_what_its_device_goes_on_from(tmp_path: Path) -> None:
    """It was lost, and reports while the next model is being made. It is also what the ledger then
    has."""
    settings = {
        "round__goal": 1,
        "round__minimum": 1,
        "round__late": "carry",
        "round__over_selection": 2,
    }
    fleet = Fleet(scaffold_plan(tmp_path, **settings))
    first, second = leases(fleet.check_in("a", "b"))
    fleet.save_parts(first, {"update": vector(1.0), "control": vector(0.5)})
    (commit,) = (
        command
        for command in fleet.run.record(
            fleet.run.engine.count_report(first.device, first.task, 0.0), NOW
        )
        if isinstance(command, Commit)
    )
    fleet.run.begin_commit(commit, NOW)
    report = fleet.save_parts(second, {"update": vector(2.0), "control": vector(1.0)})
    assert fleet.run.tied_to(second.device) == report.task, "before its round is open"
    fleet.run.record(fleet.run.engine.count_report(second.device, second.task, 0.0), NOW)
    fleet.run.work.do_work(NOW)
    assert [fleet.run.tied_to(lease.device) for lease in (first, second)] == [
        first.task,
        second.task,
    ]
    fleet.store.close()


def test_tasks_are_ordered_as_they_were_given() -> None:
    tasks = ["ab12-10-7", "ab12-9-1.10", "ab12-9-1.2", "ab12-9-1"]
    assert sorted(tasks, key=given_in_order) == [
        "ab12-9-1",
        "ab12-9-1.2",
        "ab12-9-1.10",
        "ab12-10-7",
    ]


@pytest.mark.parametrize(("before", "now"), [(60, 6), (6, 60), (5, 5)])
def test_another_number_of_devices_rescales_what_was_kept_of_all(
    tmp_path: Path, before: int, now: int
) -> None:
    """c is the sum of what devices keep over their number: (0.5 + 2) / N, whenever N is
    corrected."""
    fleet = Fleet(scaffold_plan(tmp_path, server__devices=before))
    do_round(fleet, leases(fleet.check_in("a", "b")), 1.0, 1.25)
    np.testing.assert_allclose(
        fleet.run.models.newest.vectors["control"], vector(2.5 / before), rtol=1e-6
    )
    fleet.store.close()
    for _ in range(2):  # the second start finds the same file of the model as the first
        fleet = Fleet(scaffold_plan(tmp_path, server__devices=now))
        np.testing.assert_allclose(
            fleet.run.models.newest.vectors["control"], vector(2.5 / now), rtol=1e-6
        )
        assert fleet.run.models.newest.vector_digests["control"] == digest(
            fleet.run.models.newest.vectors["control"]
        )
        fleet.store.close()
    fleet = Fleet(scaffold_plan(tmp_path, server__devices=now))
    do_round(fleet, leases(fleet.check_in("a", "b")), 1.0, 1.0)
    np.testing.assert_allclose(
        fleet.run.models.newest.vectors["control"], vector(4.5 / now), rtol=1e-6
    )
    fleet.store.close()
    fleet = Fleet(scaffold_plan(tmp_path, server__devices=now))
    np.testing.assert_allclose(
        fleet.run.models.newest.vectors["control"], vector(4.5 / now), rtol=1e-6
    )
    fleet.store.close()


def test_what_began_before_c_did_does_not_count_for_it(tmp_path: Path) -> None:
    """Asynchronously a task goes on while c begins again: its update counts, the change of its c_k
    does not, and its device goes on from zeros."""
    plan = scaffold_plan(tmp_path, **BUFFERED, server__devices=1, local__algorithm="scaffold")
    fleet = Fleet(plan)
    tasks = leases(fleet.check_in("a", "b", "c"))
    assert len(tasks) >= 2
    old = tasks[-1]
    given = [lease for lease in tasks if lease.device != old.device]
    commands: list[object] = []
    while fleet.run.engine.version == 0:
        lease = given.pop(0)
        fleet.save_parts(lease, {"update": vector(1.0), "control": vector(0.5)}, lost_tied=True)
        commands = list(
            fleet.carry_out(fleet.run.engine.count_report(lease.device, lease.task, 0.0))
        )
        given += leases(commands)  # type: ignore[arg-type]
    assert not fleet.run.models.newest.vectors["control"].any()
    assert fleet.run.tied_to(lease.device) is None
    model = fleet.run.models.newest.model.copy()
    fleet.save_parts(old, {"update": vector(1.0), "control": vector(8.0)})
    given += leases(list(fleet.carry_out(fleet.run.engine.count_report(old.device, old.task, 0.0))))
    assert fleet.run.tied_to(old.device) is None
    while fleet.run.engine.version < 3:
        lease = given.pop(0)
        fleet.save_parts(lease, {"update": vector(1.0), "control": vector(0.25)})
        given += leases(
            list(fleet.carry_out(fleet.run.engine.count_report(lease.device, lease.task, 0.0)))
        )
    assert (fleet.run.models.newest.model > model).all()
    assert 0 < fleet.run.models.newest.vectors["control"].max() <= 4 * 0.25, "8 is not in it"
    fleet.store.close()
