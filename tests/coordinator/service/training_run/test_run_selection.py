"""What selection remembers is in the ledger: a process that begins between any two events chooses
the same devices."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_status
from fleetlearn_coordinator.plan.selection_section import OortSection, SelectionSection
from fleetlearn_coordinator.rounds.commands import Assign
from fleetlearn_coordinator.rounds.selection_rules import Stated
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from peers import PlanMaker, update_of

STATED = {
    f"d{number}": Stated(
        100 * (number + 1), labels=frozenset({"tier:phone" if number < 4 else "tier:pi"})
    )
    for number in range(9)
}
SELECTIONS = {
    "seldom": SelectionSection(once_in=2, tier_quotas={"phone": 0.67}),
    "power-of-choice": SelectionSection(strategy="power-of-choice", candidates=2.0),
    "oort": SelectionSection(
        strategy="oort",
        oort=OortSection(
            preferred_seconds=2.0, preferred_step=1.0, window=1, exploration=0.4, most_tasks=3
        ),
    ),
}


class Process(Fleet):
    """A process with all devices connected. ``resume`` goes on with what an earlier one left."""

    def begin(self) -> list[Assign]:
        assert self.run.selection is not None
        self.run.selection.selection.stated |= STATED
        heard = self.run.resume(NOW)
        return leases([*heard, *self.check_in(*STATED), *self.carry_out(self.run.engine.tick(1.0))])

    def answer(self, task: Assign, loss: float) -> list[Assign]:
        """Save the device's update; then let the engine count it. The task took a second."""
        self.save_update(task, update_of(1.0), loss=loss, examples=STATED[task.device].examples)
        later = Clocks(1.0, NOW.wall)
        return leases(
            self.carry_out(self.run.engine.count_report(task.device, task.task, 1.0), later)
        )


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_restart_chooses_the_same_devices(
    make_plan: PlanMaker, tmp_path: Path, name: str
) -> None:
    chosen, remembered = [], []
    for restarts in (False, True):
        plan: Plan = msgspec.structs.replace(
            make_plan(round__goal=3, round__minimum=3),
            selection=SELECTIONS[name],
            data_dir=tmp_path / f"{restarts}",
        )
        process = Process(plan)
        waiting = {task.task: task for task in process.begin()}
        given = [*waiting.values()]
        for number in range(24):
            task = waiting.pop(next(iter(sorted(waiting, key=lambda task: (len(task), task)))))
            new = process.answer(task, loss=float(number * 7 % 5))
            given += new
            waiting |= {row.task: row for row in new}
            if restarts:
                process.store.close()
                process = Process(plan)
                assert all(row.again for row in process.begin())
        assert process.run.engine.version == 8
        chosen.append([(row.round, row.device) for row in given])
        assert process.run.selection is not None
        selection = process.run.selection.selection
        remembered.append(
            (
                {
                    device: row._replace(seconds=None)
                    for device, row in selection.memory.records.items()
                },
                None
                if selection.pacer is None
                else (selection.pacer.preferred, [*selection.pacer.history]),
            )
        )
        process.store.close()
    assert chosen[0] == chosen[1]
    assert remembered[0] == remembered[1]
    if name == "seldom":
        rounds = [
            {device for round, device in chosen[0] if round == number} for number in range(1, 10)
        ]
        assert all(not rounds[row] & rounds[row + 1] for row in range(8))
        assert all(
            sum("tier:phone" in STATED[device].labels for device in row) <= 2 for row in rounds
        )


def test_oort_s_utility_is_in_the_summary_of_a_round(make_plan: PlanMaker) -> None:
    """Limited to the 0.95 quantile of three: the second largest."""
    plan: Plan = msgspec.structs.replace(make_plan(round__goal=3), selection=SELECTIONS["oort"])
    process = Process(plan)
    tasks = process.begin()
    for task in tasks:
        process.answer(task, loss=2.0)
    process.store.close()
    (row,) = read_status(plan.data_dir).rounds
    found = sorted(2.0 * STATED[task.device].examples for task in tasks)
    assert row.summary["selection"] == {
        "utility": found[0] + 2 * found[1],
        "preferred_seconds": 2.0,
    }


def test_oort_s_pacer_goes_on_after_a_roll_back_and_a_restart(make_plan: PlanMaker) -> None:
    """The model that a roll back makes is the work of no round."""
    oort = SelectionSection(
        strategy="oort",
        oort=OortSection(preferred_seconds=2.0, preferred_step=1.0, window=2, exploration=0.0),
    )
    plan: Plan = msgspec.structs.replace(make_plan(round__goal=1, round__minimum=1), selection=oort)
    process, found = Process(plan), []
    tasks = process.begin()
    for loss in (8.0, 4.0, 2.0, 1.0):
        tasks = process.answer(tasks[0], loss)
    find_storage(plan.data_dir).requests.ask_for_roll_back(2, "command")
    assert process.run.roll_backs.look(NOW.wall)
    process.run.work.do_work(NOW)
    for _ in range(2):
        assert process.run.engine.version == 5
        assert process.run.selection is not None
        pacer = process.run.selection.selection.pacer
        assert pacer is not None
        found.append((pacer.preferred, [*pacer.history]))
        process.store.close()
        process = Process(plan)
    process.store.close()
    assert found[0] == found[1]
    assert found[0][0] == 3.0, "the utility fell"


def test_without_rules_that_need_it_nothing_is_remembered(make_plan: PlanMaker) -> None:
    plan: Plan = msgspec.structs.replace(
        make_plan(), selection=SelectionSection(least_examples=2, weighting="examples")
    )
    process = Process(plan)
    for task in process.begin():
        process.answer(task, loss=1.0)
    process.store.close()
    with closing(sqlite3.connect(plan.data_dir / DATABASE)) as database:
        assert database.execute("SELECT COUNT(*) FROM devices").fetchone() == (0,)


def test_the_tables_of_the_version_before_go_on(make_plan: PlanMaker) -> None:
    plan = make_plan()
    Fleet(plan).store.close()
    with closing(sqlite3.connect(plan.data_dir / DATABASE)) as database, database:
        for table in ("devices", "exchanges", "answers", "tied", "activity", "participations"):
            database.execute(f"DROP TABLE {table}")
        later = {
            "tasks": ("norm", "trained_norm", "member", "region"),
            "models": ("restores", "optimizer", "state_crc32"),
            "rounds": ("goal",),
        }
        for table, column in (
            (table, column) for table, columns in later.items() for column in columns
        ):
            database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        database.execute("PRAGMA user_version=2")
    process = Process(msgspec.structs.replace(plan, selection=SELECTIONS["seldom"]))
    assert len(process.begin()) == 2
    assert process.run.selection is not None
    assert len(process.store.ledger.remembered_devices()) == 2
    process.store.close()
