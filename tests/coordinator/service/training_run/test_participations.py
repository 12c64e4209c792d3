"""How devices took part in a private run is in its ledger: after restarts, kills, roll backs, other
plans and copies no device takes part more often than its noise was computed for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.rounds.commands import Abandon, Assign
from fleetlearn_coordinator.rounds.participation_limits import PrivacyLimitError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import ModelMade, ParticipationCounted, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from peers import BUFFERED, PlanMaker, update_of

PRIVATE: dict[str, Any] = {
    "privacy__noise": 1.0,
    "privacy__delta": 1e-6,
    "privacy__population": 10_000,
    "privacy__clip": 1.0,
    "privacy__separation": 2,
    "privacy__participations": 3,
    "round__goal": 2,
    "round__minimum": 2,
}
DEVICES = [f"d{number}" for number in range(5)]


class KilledError(Exception):
    """Stands for SIGKILL: the process writes nothing more."""


def begin(plan: Plan) -> tuple[Fleet, list[Assign]]:
    """A process with all devices connected, and the tasks that they have."""
    fleet = Fleet(plan)
    heard = [*fleet.run.resume(NOW), *fleet.check_in(*DEVICES)]
    heard += fleet.carry_out(fleet.run.engine.tick(0.0))
    return fleet, [task for task in leases(heard) if task.device in fleet.run.engine.leases]


def rows_of(plan: Plan) -> list[tuple[str, int, int]]:
    """Device, its last release, and how often it took part in its last segment."""
    storage = find_storage(plan.data_dir)
    ledger = storage.open_ledger(power=False, any_thread=False)
    try:
        return [row[:3] for row in ledger.participations()]
    finally:
        ledger.close()


def keep_rows(monkeypatch: pytest.MonkeyPatch) -> list[ParticipationCounted]:
    """Return a list that gets each participation as it is written."""
    written = list[ParticipationCounted]()
    write = SqliteLedger.write

    def keep(ledger: SqliteLedger, rows: Sequence[Row]) -> None:
        found = [row for row in rows if isinstance(row, ParticipationCounted)]
        assert bool(found) == any(isinstance(row, ModelMade) and row.round for row in rows)
        write(ledger, rows)
        written.extend(found)

    monkeypatch.setattr(SqliteLedger, "write", keep)
    return written


def check(written: Sequence[ParticipationCounted], separation: int, participations: int) -> None:
    for device in {row.device for row in written}:
        own = [row.release for row in written if row.device == device]
        assert min((b - a for a, b in pairwise(own)), default=separation) >= separation
        assert len(own) <= participations


@pytest.mark.parametrize("restarts", [False, True])
def test_a_restart_between_any_two_events_lets_no_device_take_part_too_often(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    written = keep_rows(monkeypatch)
    plan = make_plan("dp-fedavg", **PRIVATE)
    fleet, tasks = begin(plan)
    waiting = {task.task: task for task in tasks}
    while waiting:
        task = waiting.pop(min(waiting, key=lambda task: (len(task), task)))
        waiting |= {new.task: new for new in leases(fleet.report(task, update_of(0.1)))}
        if restarts:
            fleet.store.close()
            fleet, again = begin(plan)
            waiting = {new.task: new for new in again}
    check(written, 2, 3)
    # 5 devices of 3 times are 7 rounds of 2, and one that finds no partner
    assert fleet.run.engine.version >= 6
    assert fleet.run.engine.selection.waiting() < 2
    fleet.store.close()
    times = {device: times for device, _, times in rows_of(plan)}
    assert times == {device: sum(row.device == device for row in written) for device in times}


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_between_noise_and_commit_counts_a_device_once(
    make_plan: PlanMaker, after: bool
) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE)
    fleet, (first, second) = begin(plan)
    fleet.report(first, update_of(0.1))
    write = SqliteLedger.write

    def dying(ledger: SqliteLedger, rows: Sequence[Row]) -> None:
        closes = any(isinstance(row, ModelMade) for row in rows)
        if after or not closes:
            write(ledger, rows)
        if closes:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteLedger, "write", dying)
        with pytest.raises(KilledError):
            fleet.report(second, update_of(0.1))
    fleet.store.close()
    both = sorted([first.device, second.device])
    assert rows_of(plan) == [(device, 1, 1) for device in both] * after
    fleet, tasks = begin(plan)
    assert fleet.run.engine.version == 1
    assert {task.device for task in tasks}.isdisjoint(both)
    fleet.store.close()
    assert rows_of(plan) == [(device, 1, 1) for device in both]


def test_reports_of_an_open_round_count_after_a_restart(make_plan: PlanMaker) -> None:
    """Asynchronously a device would else have another update in the same release."""
    private = {key: value for key, value in PRIVATE.items() if key.startswith("privacy")}
    more = {"privacy__separation": 1, "round__goal": 3, "round__concurrency": 4}
    plan = make_plan(**(private | BUFFERED | more))
    fleet, tasks = begin(plan)
    done = tasks[0].device
    assert not leases(fleet.report(tasks[0], update_of(0.1)))[1:]
    fleet.store.close()
    fleet, tasks = begin(plan)
    assert done not in fleet.run.engine.leases
    assert done in fleet.run.engine.selection.limited
    assert fleet.run.engine.limits is not None
    assert fleet.run.engine.limits.pending == {done: [1]}
    fleet.store.close()


def test_a_report_that_may_not_count_is_refused_before_it_is_saved(make_plan: PlanMaker) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE)
    fleet, (first, _) = begin(plan)
    assert fleet.run.engine.limits is not None
    fleet.run.engine.limits.restore(4, [(first.device, 4, 1)])
    with pytest.raises(PrivacyLimitError, match="may not count for release 5: the device took"):
        fleet.report(first, update_of(0.1))
    assert not fleet.run.engine.accepted
    with pytest.raises(ValueError, match="is not wanted"):  # whatever saved it
        fleet.run.engine.count_report(first.device, first.task, 0.0)
    fleet.store.close()


def test_a_roll_back_gives_no_release_back(make_plan: PlanMaker) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE)
    fleet, tasks = begin(plan)
    for task in tasks:
        fleet.report(task, update_of(0.1))
    took_part = rows_of(plan)
    find_storage(plan.data_dir).requests.ask_for_roll_back(0, "command")
    assert fleet.run.roll_backs.look(NOW.wall)
    fleet.run.work.do_work(NOW)
    assert fleet.run.engine.version == 2
    assert {task.device for task in tasks}.isdisjoint(fleet.run.engine.leases)
    fleet.store.close()
    fleet, again = begin(plan)
    assert {task.device for task in tasks}.isdisjoint(task.device for task in again)
    assert fleet.run.engine.limits is not None
    assert fleet.run.engine.limits.release == 2
    assert rows_of(plan) == took_part
    fleet.store.close()


def test_another_plan_counts_from_nought_but_the_separation_goes_on(make_plan: PlanMaker) -> None:
    """What was reported in the open round is given up: it was clipped for another noise."""
    once = PRIVATE | {"privacy__participations": 1}
    plan = make_plan("dp-fedavg", **once)
    fleet, tasks = begin(plan)
    heard: list[Any] = []
    for task in tasks:
        heard += fleet.report(task, update_of(0.1))
    first = {task.device for task in tasks}
    open_now = leases(heard)[0]
    fleet.report(open_now, update_of(0.1))
    fleet.store.close()

    again = make_plan("dp-fedavg", **once | {"privacy__noise": 2.0})
    fleet, tasks = begin(again)
    limits = fleet.run.engine.limits
    assert limits is not None
    assert (limits.since, limits.release, limits.pending) == (2, 2, {})
    assert fleet.run.reports.round.state.version == 1
    assert first.isdisjoint(task.device for task in tasks)  # the separation goes on
    assert not any(map(limits.is_done, DEVICES))  # in the segment before, the first two were
    for task in tasks:
        fleet.report(task, update_of(0.1))
    assert {*fleet.run.engine.leases}.isdisjoint(task.device for task in tasks)
    assert first & {*fleet.run.engine.leases}  # once in each segment
    fleet.store.close()
    assert dict(row[:2] for row in rows_of(again)) == {
        **dict.fromkeys(first, 1),
        **{task.device: 2 for task in tasks},
    }


def test_an_abandoned_round_counts_nothing(make_plan: PlanMaker) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE | {"privacy__participations": 1})
    fleet, (first, second) = begin(plan)
    fleet.report(first, update_of(0.1))
    for device in DEVICES:
        fleet.carry_out(fleet.run.engine.disconnect(device, 1.0))
    heard = fleet.carry_out(fleet.run.engine.tick(plan.round.deadline + 2.0))
    assert any(isinstance(command, Abandon) for command in heard)
    limits = fleet.run.engine.limits
    assert limits is not None
    assert (limits.release, limits.known, limits.pending) == (1, {}, {})
    assert {task.device for task in leases(fleet.check_in(first.device, second.device))} == {
        first.device,
        second.device,
    }
    fleet.store.close()
    assert rows_of(plan) == []


def test_a_backup_has_who_took_part(make_plan: PlanMaker, tmp_path: Path) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE)
    fleet, tasks = begin(plan)
    for task in tasks:
        fleet.report(task, update_of(0.1))
    find_storage(plan.data_dir).copy_to(tmp_path / "copy")
    fleet.store.close()
    ledger = find_storage(tmp_path / "copy").open_ledger(power=False, any_thread=False)
    assert [row[:3] for row in ledger.participations()] == rows_of(plan) != []
    ledger.close()


def test_a_run_without_privacy_writes_none(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=2, round__minimum=2)
    fleet, tasks = begin(plan)
    for task in tasks:
        fleet.report(task, update_of(0.1))
    assert fleet.run.engine.limits is None
    assert fleet.run.engine.version == 1
    fleet.store.close()
    assert rows_of(plan) == []
