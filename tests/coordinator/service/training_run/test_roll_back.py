"""Rolling back without a network: what counts afterwards, what a restart finds, and kills between
the writes."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.rounds.commands import Abandon, Assign, CancelTask, Commit, Finish
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.serve import _log_roll_back
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_coordinator.storage import file_blobs
from fleetlearn_coordinator.storage.file_requests import ROLL_BACK
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import Metadata, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_protocol import ProtocolError, open_bundle, write_bundle
from fleetlearn_protocol.manifest import LocalStep
from fleetlearn_protocol.vector import Vector
from peers import (
    BUFFERED,
    PERSONAL,
    SIZE,
    PlanMaker,
    plan_text,
    update_of,
    write_personal_bundle,
    write_test_bundle,
)


class KilledError(Exception):
    """Stands for SIGKILL: the process writes nothing more."""


def roll_back(fleet: Fleet, version: int) -> Any:
    """What the server does within a second of a request."""
    find_storage(fleet.run.plan.data_dir).requests.ask_for_roll_back(version, "command")
    assert fleet.run.roll_backs.look(NOW.wall)
    return fleet.run.work.do_work(NOW)


def train(fleet: Fleet, values: Sequence[float], devices: str = "a") -> list[Assign]:
    """A round for each value, of as many devices as the goal is. Returns the next round's tasks."""
    tasks = leases(fleet.check_in(*devices))
    for value in values:
        commands: list[Any] = []
        for lease in tasks:
            commands += fleet.report(lease, update_of(value))
        tasks = leases(commands)
    return tasks


def test_the_next_round_trains_from_the_earlier_model(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=2, round__minimum=2, server__optimizer="momentum", server__lr=1.0)
    fleet = Fleet(plan)
    first, second = train(fleet, [1.0, 2.0, 3.0], "ab")
    old, state = fleet.store.load_version(fleet.store.model_made(2))  # type: ignore[arg-type]
    fleet.report(first, update_of(100.0))
    commands = roll_back(fleet, 2)
    (cancelled,) = (command for command in commands if isinstance(command, CancelTask))
    assert cancelled.task == second.task
    (abandoned,) = (command for command in commands if isinstance(command, Abandon))
    assert abandoned.round == 4
    tasks = leases(commands)
    assert {(lease.device, lease.version, lease.round) for lease in tasks} == {
        ("a", 4, 5),
        ("b", 4, 5),
    }
    np.testing.assert_array_equal(fleet.run.models.newest.model, old)
    np.testing.assert_array_equal(fleet.run.models.newest.optimizer_state["v"], state["v"])
    assert find_storage(plan.data_dir).requests.roll_back() is None
    with pytest.raises(ProtocolError, match=r"task .* is of round 4"):
        fleet.run.engine.announce(second.device, second.task, 4, 0.0)
    for lease in tasks:
        fleet.report(lease, update_of(4.0))
    fleet.store.close()
    np.testing.assert_allclose(
        read_model(plan.data_dir, 5)[1] - old, 0.9 * state["v"] + 4.0, rtol=1e-5
    )
    with find_storage(plan.data_dir).read_ledger() as ledger:
        rows = ledger.known_models()
    assert [(row.version, row.round, row.restores) for row in rows] == [
        (0, 0, None), (1, 1, None), (2, 2, None), (3, 3, None), (4, 0, 2), (5, 5, None)
    ]  # fmt: skip
    assert [row.outcome for row in read_status(plan.data_dir).rounds] == [
        *["committed"] * 3,
        "abandoned",
        "committed",
    ]
    fleet = Fleet(plan)
    assert fleet.run.resume(NOW) == []
    assert (fleet.run.engine.version, fleet.run.roll_backs.newest) == (5, 4)
    fleet.store.close()


@pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.COMMITTING])
def test_a_roll_back_between_rounds(make_plan: PlanMaker, phase: Phase) -> None:
    """While devices gather nothing is open; a round whose commit is decided and not made is given
    up."""
    plan = make_plan(round__goal=1)
    fleet = Fleet(plan)
    (lease,) = train(fleet, [1.0, 2.0])
    if phase is Phase.COMMITTING:
        fleet.save_update(lease, update_of(5.0))
        (commit,) = fleet.run.record(
            fleet.run.engine.count_report(lease.device, lease.task, 0.0), NOW
        )
        assert isinstance(commit, Commit)
        fleet.run.begin_commit(commit, NOW)
    else:
        fleet.carry_out(fleet.run.engine.disconnect("a", 0.0))
        fleet.carry_out(fleet.run.engine.tick(1000.0))
        assert fleet.run.engine.phase is Phase.GATHERING
    commands = roll_back(fleet, 1)
    np.testing.assert_array_equal(fleet.run.models.newest.model, read_model(plan.data_dir, 1)[1])
    assert fleet.run.engine.version == 3
    again = leases(commands) or leases(fleet.check_in("a"))
    assert [(row.device, row.version) for row in again] == [("a", 3)]
    fleet.report(again[0], update_of(1.0))
    assert fleet.run.engine.version == 4
    fleet.store.close()


def test_a_version_that_is_asked_for_during_a_commit_is_kept(make_plan: PlanMaker) -> None:
    """The commit was begun in another thread, and by the rule it drops the version."""
    plan = make_plan(round__goal=1, models__last=2)
    fleet = Fleet(plan)
    (lease,) = train(fleet, [1.0, 2.0, 3.0])
    fleet.save_update(lease, update_of(5.0))
    (commit,) = fleet.run.record(fleet.run.engine.count_report(lease.device, lease.task, 0.0), NOW)
    assert isinstance(commit, Commit)
    fleet.run.begin_commit(commit, NOW)
    step = fleet.run.work.next_work()
    assert step is not None
    find_storage(plan.data_dir).requests.ask_for_roll_back(2, "command")
    assert fleet.run.roll_backs.look(NOW.wall)
    step.end(step.work(), NOW)
    fleet.run.work.do_work(NOW)
    assert fleet.run.engine.version == 5
    np.testing.assert_array_equal(fleet.run.models.newest.model, read_model(plan.data_dir, 2)[1])
    fleet.store.close()


def test_asynchronously_leases_early_reports_and_lost_tasks_end(make_plan: PlanMaker) -> None:
    """None of them counts afterwards, in this process or in the next one."""
    plan = make_plan(**(BUFFERED | {"round__concurrency": 4, "round__goal": 1}))
    fleet = Fleet(plan)
    tasks = {lease.device: lease for lease in leases(fleet.check_in("a", "b", "c", "d"))}
    fleet.report(tasks["a"], update_of(1.0))
    fleet.carry_out(fleet.run.engine.disconnect("b", 0.0))
    fleet.carry_out(fleet.run.engine.tick(20.0))
    assert tasks["b"].task in fleet.run.engine.book.lost
    fleet.save_update(tasks["c"], update_of(2.0))
    (commit,) = (
        command
        for command in fleet.run.record(
            fleet.run.engine.count_report("c", tasks["c"].task, 0.0), NOW
        )
        if isinstance(command, Commit)
    )
    fleet.run.begin_commit(commit, NOW)
    fleet.save_update(tasks["d"], update_of(4.0), add=False)  # while the commit is under way
    fleet.run.record(fleet.run.engine.count_report("d", tasks["d"].task, 0.0), NOW)
    assert tasks["d"].task in fleet.run.engine.book.early
    commands = roll_back(fleet, 0)
    assert {lease.version for lease in leases(commands)} == {2}
    assert fleet.run.engine.book.early == {} == fleet.run.engine.book.lost
    files = fleet.store.blobs.take_spool_file(), fleet.store.blobs.take_spool_file()
    assert len({*files}) == 2
    states = {
        row.task: row.state for number in (1, 2, 3) for row in read_tasks(plan.data_dir, number)[1]
    }
    assert states[tasks["b"].task] == states[tasks["d"].task] == "stale"
    np.testing.assert_array_equal(fleet.run.models.newest.model, read_model(plan.data_dir, 0)[1])
    fleet.store.close()
    fleet = Fleet(plan)
    fleet.run.resume(NOW)
    assert (fleet.run.engine.book.early, fleet.run.engine.book.lost) == ({}, {})
    assert not fleet.run.engine.has_counted("d", tasks["d"].task)
    fleet.store.close()


def personal_plan(folder: Path, recipe: str, **more: Any) -> Plan:
    bundle = folder / "corrected.bundle"
    if not bundle.exists():
        write_personal_bundle(bundle)
    settings = {"recipe": recipe, "server__devices": 5, "local__lr": 0.5} | more
    return Plan.parse(plan_text(bundle, folder / "run", **settings), folder)


def test_scaffold_begins_from_zeros_after_a_roll_back(tmp_path: Path) -> None:
    """c and every c_k: what devices keep cannot go back, and c = sum(c_k) / N must hold."""
    plan = personal_plan(tmp_path, "scaffold")
    fleet = Fleet(plan)

    def vector(value: float) -> Vector:
        return np.full(SIZE - PERSONAL, value, np.float32)

    tasks = leases(fleet.check_in("a", "b"))
    for value in (1.0, 2.0):
        commands: list[Any] = []
        for lease in tasks:
            fleet.save_parts(lease, {"update": vector(value), "control": vector(value)})
            commands += fleet.carry_out(
                fleet.run.engine.count_report(lease.device, lease.task, 0.0)
            )
        tasks = leases(commands)
    assert fleet.run.models.newest.vectors["control"][0] > 0
    assert fleet.run.tied_to("a") is not None
    lease = tasks[0]
    fleet.save_parts(lease, {"update": vector(1.0), "control": vector(1.0)})
    fleet.carry_out(fleet.run.engine.count_report(lease.device, lease.task, 0.0))
    for restarted in (False, True):
        if restarted:
            fleet.store.close()
            fleet = Fleet(plan)
            fleet.run.resume(NOW)
        else:
            roll_back(fleet, 1)
        assert not fleet.run.models.newest.vectors["control"].any()
        assert [fleet.run.tied_to(device) for device in "ab"] == [None, None]
        np.testing.assert_array_equal(
            fleet.run.models.newest.model, read_model(plan.data_dir, 1)[1]
        )
        assert fleet.run.engine.version == 3
    fleet.store.close()


def feddyn_bundle(folder: Path) -> Path:
    bundle = open_bundle(write_test_bundle(folder / "plain.bundle"))
    step = LocalStep("sgd", proximal=True, correction=True)
    manifest = msgspec.structs.replace(
        bundle.manifest, step=step, references=("anchor", "correction")
    )
    return write_bundle(
        folder / "feddyn.bundle",
        manifest,
        {file: bundle.read(file) for file in bundle.manifest.files},
    )


def feddyn_plan(bundle: Path, devices: int) -> Plan:
    settings = {"recipe": "feddyn", "server__devices": devices, "local__mu": 0.1}
    return Plan.parse(plan_text(bundle, bundle.parent / "run", **settings), bundle.parent)  # type: ignore[arg-type]


@pytest.mark.parametrize("now", [2, 4, 400])
def test_another_number_of_devices_rescales_feddyn_s_h(tmp_path: Path, now: int) -> None:
    """h is the sum of all updates over the number of devices, whenever that is corrected."""
    bundle = feddyn_bundle(tmp_path)
    fleet = Fleet(feddyn_plan(bundle, 4))
    train(fleet, [1.0], "ab")
    kept = fleet.run.models.newest.optimizer_state["h"].copy()
    assert kept.any()
    fleet.store.close()
    fleet = Fleet(feddyn_plan(bundle, now))
    np.testing.assert_allclose(
        fleet.run.models.newest.optimizer_state["h"], kept * 4 / now, rtol=1e-6
    )
    fleet.store.close()


def test_feddyn_begins_from_zeros_after_a_roll_back(tmp_path: Path) -> None:
    """Its h on the server, which is the server optimizer's state, with what devices keep."""
    fleet = Fleet(feddyn_plan(feddyn_bundle(tmp_path), 4))
    train(fleet, [1.0, 2.0], "ab")
    assert fleet.run.models.newest.optimizer_state["h"].any()
    assert fleet.run.tied_to("a") is not None
    roll_back(fleet, 1)
    assert fleet.store.load_version(fleet.store.model_made(1))[1]["h"].any()  # type: ignore[arg-type]
    assert not fleet.run.models.newest.optimizer_state["h"].any()
    assert [fleet.run.tied_to(device) for device in "ab"] == [None, None]
    fleet.store.close()


def test_a_fresh_optimizer_where_the_version_was_another_one_s(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Adam and Yogi keep slots of the same names, which do not mean the same."""
    fleet = Fleet(make_plan(round__goal=1, server__optimizer="adam"))
    train(fleet, [1.0, 1.0])
    fleet.store.close()
    fleet = Fleet(make_plan(round__goal=1, server__optimizer="yogi"))
    fleet.run.resume(NOW)
    train(fleet, [1.0])
    with caplog.at_level(logging.WARNING):
        roll_back(fleet, 1)
    assert (
        "version 4 is version 1's model; the server optimizer begins from the beginning"
        in caplog.text
    )
    assert not fleet.run.models.newest.optimizer_state["m"].any()
    roll_back(fleet, 3)
    assert (
        "version 5 is version 3's model; the server optimizer goes on from that version's state"
        in caplog.text
    )
    assert fleet.run.models.newest.optimizer_state["m"].any()
    fleet.store.close()


def test_a_finished_run_goes_on_from_its_next_start(make_plan: PlanMaker) -> None:
    """Its metric was reached by a model that is not the newest any more, so that rule does not end
    it again."""
    settings: dict[str, Any] = {"round__goal": 1, "stop__epsilon": 1e9}
    plan = make_plan(**settings)
    fleet = Fleet(plan)
    (lease,) = leases(fleet.check_in("a"))
    (finish,) = fleet.report(lease, update_of(1.0))
    assert isinstance(finish, Finish)
    fleet.store.close()
    fleet = Fleet(plan)
    assert fleet.run.finished is not None
    fleet.store.close()
    find_storage(plan.data_dir).requests.ask_for_roll_back(0, "command")
    for _ in range(2):  # and a start after it
        fleet = Fleet(plan)
        fleet.run.resume(NOW)
        assert fleet.run.finished is None
        assert fleet.run.engine.version == 2
        fleet.store.close()
    assert read_status(plan.data_dir).finished is None
    plan = make_plan(**settings, stop__rounds=2)
    fleet = Fleet(plan)
    assert fleet.run.finished == "2 rounds done", "a roll back counts as a version"
    fleet.store.close()


@pytest.mark.parametrize("version", [2, 7])
def test_what_cannot_be_rolled_back_to_is_refused(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    """The newest version, and one that never was; then one whose file is gone, and one that is
    damaged."""
    plan = make_plan(round__goal=1)
    fleet = Fleet(plan)
    train(fleet, [1.0, 1.0])
    assert roll_back(fleet, version) == []
    assert f"the run is not rolled back to version {version}" in caplog.text
    for damage in ("damaged", "missing"):
        path = file_blobs.model_path(plan.data_dir, 1)
        path.write_bytes(b"x" * 100) if damage == "damaged" else path.unlink()
        assert roll_back(fleet, 1) == []
        assert damage in caplog.text
    assert fleet.run.engine.version == 2
    assert not (plan.data_dir / ROLL_BACK).exists()
    fleet.store.close()


MOMENTS = [
    "the file is in its place",
    "the rows are written",
    "the request is removed",
    "the audit log has it",
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_between_any_two_writes_changes_nothing(
    make_plan: PlanMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Killed there and started again: the model, the version and the rounds of a roll back that
    nobody disturbed, and one row of the audit log."""
    plan = make_plan(round__goal=2, round__minimum=2, server__optimizer="adam")
    fleet = Fleet(plan)
    first, _ = train(fleet, [1.0, 2.0, 3.0], "ab")
    fleet.report(first, update_of(100.0))
    fleet.store.close()
    shutil.copytree(plan.data_dir, tmp_path / "before")
    ends = []
    for killed in (False, True):
        shutil.rmtree(plan.data_dir)
        shutil.copytree(tmp_path / "before", plan.data_dir)
        identities = Identities(tmp_path / f"identities-{killed}")
        log = partial(_log_roll_back, identities, "test")
        fleet = Fleet(plan)
        fleet.run.roll_backs.audit = log
        fleet.run.resume(NOW)
        fleet.check_in("a", "b")
        if killed:
            with monkeypatch.context() as patch:
                kill_at(patch, moment)
                with pytest.raises(KilledError):
                    roll_back(fleet, 2)
            fleet.store.close()
            fleet = Fleet(plan)
            fleet.run.roll_backs.audit = log
            fleet.run.roll_backs.log_last()
            fleet.run.resume(NOW)
            fleet.run.roll_backs.look(NOW.wall)
            fleet.run.work.do_work(NOW)
            commands = fleet.check_in("a", "b")
        else:
            commands = roll_back(fleet, 2)
        tasks = leases(commands)
        assert {lease.version for lease in tasks} == {4}
        for lease in tasks:
            fleet.report(lease, update_of(4.0))
        assert fleet.run.engine.version == 5
        assert not (plan.data_dir / ROLL_BACK).exists()
        fleet.store.close()
        rounds = [(row.number, row.outcome) for row in read_status(plan.data_dir).rounds]
        events = [(row.what, row.about) for row in identities.events()]
        identities.close()
        ends.append((read_model(plan.data_dir)[1].tobytes(), rounds, events))
    assert ends[0] == ends[1]
    assert ends[0][2] == [
        ("rolled back", {"plan": "test", "version": 2, "as": 4, "who": "command"})
    ]


def kill_at(patch: pytest.MonkeyPatch, moment: str) -> None:
    write = SqliteLedger.write

    def answers(rows: Sequence[Row]) -> bool:
        return any(isinstance(row, Metadata) and row.key == "rolled_back" for row in rows)

    def dying_write(ledger: SqliteLedger, rows: Sequence[Row]) -> None:
        if answers(rows) and moment == MOMENTS[0]:
            raise KilledError
        write(ledger, rows)
        if answers(rows) and moment == MOMENTS[1]:
            raise KilledError

    patch.setattr(SqliteLedger, "write", dying_write)
    if moment == MOMENTS[3]:
        log_once = Identities.log_once

        def dying_log(*arguments: Any) -> None:
            log_once(*arguments)
            raise KilledError

        patch.setattr(Identities, "log_once", dying_log)
    if moment == MOMENTS[2]:
        remove = Path.unlink

        def dying_unlink(path: Path, missing_ok: bool = False) -> None:
            remove(path, missing_ok)
            if path.name == ROLL_BACK:
                raise KilledError

        patch.setattr(Path, "unlink", dying_unlink)
