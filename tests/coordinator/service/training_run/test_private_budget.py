"""The privacy budget of a run: what its ledger has after releases, restarts, changed plans, roll
backs, kills and copies."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from math import exp
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, PlanError, StoreError, read_status
from fleetlearn_coordinator.privacy.budget import PrivacyAccount
from fleetlearn_coordinator.rounds.commands import Assign, Finish
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.serve import _log_privacy
from fleetlearn_coordinator.service.training_run.private_budget import (
    count_releases,
    read_account,
)
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import PRIVACY, Row
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE, SqliteLedger
from msgspec import structs
from peers import PlanMaker, update_of

PRIVATE: dict[str, Any] = {
    "privacy__noise": 4.0,
    "privacy__delta": 1e-6,
    "privacy__population": 100,
    "privacy__clip": 1.0,
    "privacy__participations": 1000,
    "round__goal": 1,
}
"""mu^2 = releases / 16: epsilon 4.88655 at delta 1e-6 after 16 releases."""
FOUR = {**PRIVATE, "privacy__epsilon": 2.3}
"""A budget of four releases."""


def release(fleet: Fleet, times: int = 1, device: str = "a") -> list[Any]:
    """Make releases of one device each. Returns what the engine wanted last."""
    tasks: Sequence[Assign] = leases(fleet.check_in(device))
    commands: list[Any] = []
    for _ in range(times):
        (task,) = tasks
        commands = fleet.report(task, update_of(0.1))
        tasks = leases(commands)
    return commands


def run_for(plan: Plan, times: int) -> None:
    """Serve the plan's run until it has made this many more releases, and stop."""
    fleet = Fleet(plan)
    release(fleet, times)
    fleet.store.close()


def delta_of(mu: float, epsilon: float) -> float:
    """Balle and Wang, arXiv 1805.06530, theorem 8: delta of a Gaussian mechanism."""
    below = NormalDist().cdf
    return below(mu / 2 - epsilon / mu) - exp(epsilon) * below(-mu / 2 - epsilon / mu)


def account_in(plan: Plan) -> PrivacyAccount:
    with find_storage(plan.data_dir).read_ledger() as ledger:
        found = read_account(ledger.metadata().get(PRIVACY))
    assert found is not None
    return found


def test_a_release_and_its_spending_are_one_batch(
    make_plan: PlanMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(**PRIVATE)
    fleet, written = Fleet(plan), list[list[str]]()
    write = SqliteLedger.write

    def keep(ledger: SqliteLedger, rows: Sequence[Row]) -> None:
        keys = [getattr(row, "key", "") for row in rows]
        written.append([*keys, *(type(row).__name__ for row in rows)])
        write(ledger, rows)

    monkeypatch.setattr(SqliteLedger, "write", keep)
    release(fleet)
    (batch,) = [batch for batch in written if PRIVACY in batch]
    assert {"ModelMade", "RoundClosed", PRIVACY, "privacy_state"} <= {*batch}
    fleet.store.close()
    found = account_in(plan)
    assert (found.releases, found.left) == (1, None)
    assert found.epsilon == pytest.approx(1.0607, abs=1e-4)
    (closed,) = read_status(plan.data_dir).rounds
    assert closed.summary["privacy"] == {
        **closed.summary["privacy"],
        "release": 1,
        "epsilon": found.epsilon,
        "delta": 1e-6,
        "of": None,
        "left": None,
    }


def test_the_run_finishes_by_name_before_a_release_past_its_budget(make_plan: PlanMaker) -> None:
    plan = make_plan(**FOUR)
    fleet = Fleet(plan)
    assert fleet.run.budget.account is not None
    assert fleet.run.budget.account.left == 4
    commands = release(fleet, 4)
    (finish,) = commands
    assert isinstance(finish, Finish)
    assert finish.rule == "privacy budget"
    reason = (
        "the privacy budget is spent: epsilon 2.26 of 2.3 after 4 releases; another would make "
        "it 2.55"
    )
    assert fleet.run.finished == reason
    assert leases(fleet.check_in("b")) == []
    fleet.store.close()
    found = account_in(plan)
    assert (found.left, found.releases) == (0, 4)
    assert found.epsilon <= 2.3
    again = Fleet(plan)
    assert again.run.resume(NOW) == []
    assert (again.run.finished, again.run.engine.phase) == (reason, Phase.FINISHED)
    again.store.close()
    assert account_in(plan) == found
    # A larger budget goes on; what was spent stays spent.
    larger = make_plan(**{**PRIVATE, "privacy__epsilon": 2.6})
    more = Fleet(larger)
    assert more.run.finished is None
    assert isinstance(release(more)[0], Finish)
    more.store.close()
    found = account_in(larger)
    assert (len(found.segments), found.releases) == (1, 5)


def test_a_smaller_budget_stops_at_once(make_plan: PlanMaker) -> None:
    run_for(make_plan(**PRIVATE), 2)
    plan = make_plan(**{**PRIVATE, "privacy__epsilon": 1.2})
    fleet = Fleet(plan)
    assert fleet.run.finished is not None
    assert fleet.run.finished.startswith("the privacy budget is spent: epsilon 1.5")
    assert leases(fleet.check_in("a")) == []
    fleet.store.close()
    assert account_in(plan).releases == 2


def test_a_changed_plan_begins_another_segment(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    run_for(make_plan(**PRIVATE), 4)
    plan = make_plan(**{**PRIVATE, "privacy__noise": 2.0})
    fleet = Fleet(plan)
    release(fleet)
    fleet.store.close()
    found = account_in(plan)
    assert [(each.noise, each.releases) for each in found.segments] == [(4.0, 4), (2.0, 1)]
    # mu^2 = 4 / 16 + 1 / 4
    assert delta_of(0.5**0.5, found.epsilon) == pytest.approx(1e-6, rel=1e-6)
    assert "the plan's [privacy] has changed: no budget at delta 1e-06 (gaussian, noise 4, " in (
        caplog.text
    )
    assert "epsilon 2.26 is spent by 4 releases, and stays spent" in caplog.text


def test_abandoned_rounds_spend_nothing_and_a_roll_back_gives_nothing_back(
    make_plan: PlanMaker,
) -> None:
    plan = make_plan(**FOUR)
    fleet = Fleet(plan)
    release(fleet, 3)
    before = account_in(plan)
    fleet.carry_out(fleet.run.engine.tick(fleet.run.engine.deadline))
    assert read_status(plan.data_dir).rounds[-1].outcome == "abandoned"
    assert account_in(plan) == before
    find_storage(plan.data_dir).requests.ask_for_roll_back(1, "command")
    assert fleet.run.roll_backs.look(NOW.wall)
    tasks = [*leases(fleet.run.work.do_work(NOW)), *leases(fleet.check_in("b"))]
    assert account_in(plan) == before
    assert fleet.run.models.newest.privacy is not None
    assert fleet.run.models.newest.privacy.releases == 3
    (task,) = tasks
    assert isinstance(fleet.report(task, update_of(0.1))[0], Finish)
    fleet.store.close()
    assert (account_in(plan).releases, account_in(plan).left) == (4, 0)


def test_with_noise_on_the_device_an_abandoned_round_spends_too(make_plan: PlanMaker) -> None:
    """The coordinator is not trusted, and has seen each update that a device sent."""
    plan = make_plan(**FOUR, privacy__mechanism="local")
    fleet = Fleet(plan)
    release(fleet, 2)
    fleet.carry_out(fleet.run.engine.tick(fleet.run.engine.deadline))
    found = account_in(plan)
    assert (found.releases, found.rounds, found.left) == (2, 3, 1)
    assert found.epsilon == pytest.approx(1.925, abs=1e-3)
    assert read_status(plan.data_dir).rounds[-1].summary["privacy"]["epsilon"] == found.epsilon
    fleet.store.close()
    fleet = Fleet(plan)
    assert fleet.run.engine.releases == 3
    assert account_in(plan) == found
    fleet.check_in("b")
    (finish,) = fleet.carry_out(fleet.run.engine.tick(fleet.run.engine.deadline))[-1:]
    assert isinstance(finish, Finish)
    assert finish.reason.startswith("the privacy budget is spent: epsilon 2.26 of 2.3 after 4 rou")
    fleet.store.close()


def test_privacy_cannot_be_taken_away(make_plan: PlanMaker) -> None:
    run_for(make_plan(**PRIVATE), 2)
    with pytest.raises(PlanError, match=r"made 2 releases under \[privacy\], and the plan has no"):
        Fleet(make_plan(round__goal=1))
    assert account_in(make_plan(**PRIVATE)).releases == 2


def test_privacy_may_be_taken_away_before_the_first_release(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    plan, plain = make_plan(**PRIVATE), make_plan(round__goal=1)
    Fleet(plan).store.close()
    copied = copy_of(plan, tmp_path / "copy")
    Fleet(plain).store.close()
    with find_storage(plan.data_dir).read_ledger() as ledger:
        assert ledger.metadata().get(PRIVACY) is None
    # The original of a copy may have released something since.
    with pytest.raises(StoreError, match="copy was restored from a backup, with 0 releases"):
        Fleet(in_place(plain, Path(copied.data_dir)))


def test_privacy_cannot_come_too_late(make_plan: PlanMaker) -> None:
    fleet = Fleet(make_plan(round__goal=1))
    release(fleet)
    fleet.store.close()
    with pytest.raises(PlanError, match=r"has released models without it, up to version 1\."):
        Fleet(make_plan(**PRIVATE))


def test_privacy_cannot_come_after_a_round_that_was_abandoned(make_plan: PlanMaker) -> None:
    """Its summary shows what the devices measured."""
    fleet = Fleet(make_plan(round__goal=2, round__minimum=2))
    task, _ = leases(fleet.check_in("a", "b"))
    fleet.report(task, update_of(0.1))
    fleet.carry_out(fleet.run.engine.tick(fleet.run.engine.deadline))
    (row,) = read_status(fleet.run.plan.data_dir).rounds
    assert (row.outcome, "loss" in row.summary["metrics"]) == ("abandoned", True)
    fleet.store.close()
    with pytest.raises(PlanError, match=r"has opened rounds without it, which show what"):
        Fleet(make_plan(**PRIVATE))


def test_privacy_may_come_before_the_first_release(make_plan: PlanMaker) -> None:
    Fleet(make_plan(round__goal=1)).store.close()
    fleet = Fleet(make_plan(**PRIVATE))
    release(fleet)
    fleet.store.close()


def test_no_release_is_taken_back_by_a_count(make_plan: PlanMaker) -> None:
    plan = make_plan(**PRIVATE)
    run_for(plan, 2)
    with pytest.raises(ValueError, match="-1 releases were given; it takes 0 or more"):
        count_releases(plan.data_dir, -1, NOW.wall, "anna")
    assert account_in(plan).releases == 2


def in_place(plan: Plan, folder: Path) -> Plan:
    """The plan with another data directory."""
    return structs.replace(plan, data_dir=folder)


def copy_of(plan: Plan, folder: Path) -> Plan:
    """A backup's copy of the run."""
    find_storage(plan.data_dir).copy_to(folder)
    return in_place(plan, folder)


def count(plan: Plan, releases: int) -> PrivacyAccount:
    return count_releases(plan.data_dir, releases, 2000.0, "command")


def test_a_copy_from_a_backup_is_not_served_before_its_releases_are_counted(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    plan = make_plan(**FOUR)
    fleet = Fleet(plan)
    release(fleet, 1)
    copied = copy_of(plan, tmp_path / "copy")
    fleet.store.close()
    Fleet(plan).store.close()  # the original goes on
    for _ in range(2):
        with pytest.raises(StoreError, match="copy was restored from a backup, with 1 release of"):
            Fleet(copied)
    assert count(copied, 2).left == 1
    fleet = Fleet(copied)
    assert fleet.run.engine.releases == 3
    assert isinstance(release(fleet)[0], Finish)
    assert fleet.run.models.newest.privacy is not None
    assert fleet.run.models.newest.privacy.releases == 4
    fleet.store.close()
    found = account_in(copied)
    assert [each.releases for each in found.segments] == [3, 1]
    assert found.epsilon == pytest.approx(2.2541, abs=1e-4)


def test_a_backup_of_a_backup_is_a_copy_too(make_plan: PlanMaker, tmp_path: Path) -> None:
    plan = make_plan(**PRIVATE)
    run_for(plan, 1)
    second = copy_of(copy_of(plan, tmp_path / "one"), tmp_path / "two")
    with pytest.raises(StoreError, match="two was restored from a backup"):
        Fleet(second)
    count(second, 0)
    Fleet(second).store.close()
    assert account_in(second).releases == 1
    assert len(account_in(second).segments) == 1


def test_a_copy_of_a_run_without_privacy_is_served_as_ever(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    plan = make_plan(round__goal=1)
    run_for(plan, 1)
    copied = copy_of(plan, tmp_path / "copy")
    Fleet(copied).store.close()
    with pytest.raises(StoreError, match="has no private run: there are no releases"):
        count(copied, 1)


def test_a_folder_that_was_copied_by_hand_is_known_by_its_place(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    plan = make_plan(**PRIVATE)
    run_for(plan, 1)
    shutil.copytree(plan.data_dir, tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(plan.data_dir)
    Fleet(in_place(plan, tmp_path / "link")).store.close()  # the same folder
    copied = in_place(plan, tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"elsewhere was moved or copied from .*run, with 1 rel"):
        Fleet(copied)
    count(copied, 1)
    Fleet(copied).store.close()
    assert account_in(copied).releases == 2
    assert account_in(plan).releases == 1


def test_changes_of_a_private_run_are_in_the_audit_log_once(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    plan = make_plan(**PRIVATE)
    run_for(plan, 1)
    changed = make_plan(**PRIVATE, privacy__epsilon=6.0)
    Fleet(changed).store.close()  # killed before the audit log had it
    count(changed, 3)
    with closing(Identities(tmp_path / "identities")) as identities:
        for _ in range(2):
            fleet = Fleet(changed)
            fleet.run.budget.audit = partial(_log_privacy, identities, "test")
            fleet.run.budget.log_changes()
            fleet.run.budget.log_changes()
            fleet.store.close()
        found = [(row.at, row.what, row.about) for row in identities.events()]
    terms = "at delta 1e-06 (gaussian, noise 4, separation 1, participations 1000)"
    change = (
        f"no budget {terms} before, epsilon 6 {terms} now; epsilon 1.07 is spent by 1 release, "
        "and stays spent"
    )
    counted = {"plan": "test", "change": "3 releases of the original counted", "who": "command"}
    assert found == [
        (NOW.wall, "privacy changed", {"plan": "test", "change": change}),
        (2000.0, "privacy changed", counted),
    ]


def test_a_damaged_account_is_an_error(make_plan: PlanMaker) -> None:
    plan = make_plan(**PRIVATE)
    Fleet(plan).store.close()
    with closing(sqlite3.connect(Path(plan.data_dir) / DATABASE)) as db:
        db.execute("UPDATE meta SET value='{}' WHERE key='privacy'")
        db.commit()
    with pytest.raises(StoreError, match="what the database says of the privacy budget is damaged"):
        Fleet(plan)
