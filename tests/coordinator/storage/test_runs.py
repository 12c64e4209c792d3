"""The runs of a host: what is wanted of each, who sees it, and what the host found."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.runs import DATABASE, Population, Runs, WantedRun

PLAN = Path("/plans/a.toml")
SOME = Population(("roof", "eu"), ("phone",), ("onnx",), 0.25)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with closing(Runs(tmp_path)) as found:
        yield found


def test_a_run_is_added_and_is_to_be_running(runs: Runs) -> None:
    runs.add("a", PLAN)
    runs.add("b", PLAN, SOME)
    assert runs.runs() == [
        WantedRun(1, "a", PLAN, Population(), "running", 0, ""),
        WantedRun(2, "b", PLAN, SOME, "running", 0, ""),
    ]


def test_a_name_is_taken_once_and_a_removed_run_is_another(runs: Runs) -> None:
    runs.add("a", PLAN)
    with pytest.raises(StoreError, match="a run called a already"):
        runs.add("a", Path("/other.toml"))
    runs.remove("a")
    runs.add("a", PLAN)
    assert [(run.number, run.name) for run in runs.runs()] == [(2, "a")]


def test_a_run_that_is_not_there_is_named_with_those_that_are(runs: Runs) -> None:
    runs.add("a", PLAN)
    for change in (
        lambda: runs.want("b", "paused"),
        lambda: runs.remove("b"),
        lambda: runs.ask_again("b"),
    ):
        with pytest.raises(StoreError, match="no run called b; there are: a"):
            change()


def test_what_is_asked_last_counts(runs: Runs) -> None:
    runs.add("a", PLAN)
    before = runs.runs()[0]
    runs.want("a", "draining")
    draining = runs.runs()[0]
    assert (draining.wanted, draining.asked) == ("draining", 1)
    runs.want("a", "running")
    runs.drained(draining)
    runs.failed(before, "an old error")
    assert runs.runs() == [before._replace(asked=2)]


def test_a_drained_run_is_stopped(runs: Runs) -> None:
    runs.add("a", PLAN)
    runs.want("a", "draining")
    runs.drained(runs.runs()[0])
    assert runs.runs()[0].wanted == "stopped"


def test_a_failure_stays_until_something_is_asked(runs: Runs) -> None:
    runs.add("a", PLAN)
    runs.failed(runs.runs()[0], "the disk is full")
    assert runs.runs()[0].failed == "the disk is full"
    runs.want("a", "running")
    assert runs.runs()[0].failed == ""


def test_an_operation_and_its_row_for_the_audit_log_are_written_together(runs: Runs) -> None:
    with runs.logged(1.5, "added", {"run": "a"}):
        runs.add("a", PLAN)
    with pytest.raises(StoreError), runs.logged(2.5, "added", {"run": "a"}):
        runs.add("a", PLAN)
    (operation,) = runs.to_log()
    assert operation[1:] == (1.5, "added", {"run": "a"})
    assert [run.name for run in runs.runs()] == ["a"]
    runs.is_logged(operation)
    assert runs.to_log() == []


def test_another_process_s_changes_are_seen(runs: Runs, tmp_path: Path) -> None:
    runs.add("a", PLAN)
    assert not runs.changed()
    with closing(Runs(tmp_path)) as operator:
        operator.want("a", "paused")
        assert not operator.changed()
    assert runs.changed()
    assert not runs.changed()
    assert runs.runs()[0].wanted == "paused"


def test_it_is_all_there_after_a_restart(tmp_path: Path) -> None:
    with closing(Runs(tmp_path)) as first:
        first.add("a", PLAN, SOME)
        found = first.runs()
    with closing(Runs(tmp_path)) as second:
        assert second.runs() == found


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    Runs(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("PRAGMA user_version=2")
    with pytest.raises(StoreError, match="is of version 2; this fleetlearn reads version 1"):
        Runs(tmp_path)


def test_a_copy_of_the_folder_has_its_own_plans(tmp_path: Path) -> None:
    """A restored backup must not reach for the originals. Plans that are somewhere else stay where
    they are."""
    home = tmp_path / "service"
    plans = {
        "beside": home / "a.toml",
        "inside": home / "runs" / "plans" / "b.toml",
        "elsewhere": PLAN,
    }
    with closing(Runs(home / "runs")) as runs:
        for name, plan in plans.items():
            runs.add(name, plan)
        assert {run.name: run.plan for run in runs.runs()} == plans
    shutil.copytree(home, tmp_path / "copy")
    with closing(Runs(tmp_path / "copy" / "runs")) as runs:
        found = {run.name: run.plan for run in runs.runs()}
    copied = tmp_path / "copy"
    assert found == {
        "beside": copied / "a.toml",
        "inside": copied / "runs" / "plans" / "b.toml",
        "elsewhere": PLAN,
    }


def test_absolute_paths_of_an_earlier_release_become_relative(tmp_path: Path) -> None:
    home = tmp_path / "service"
    with closing(Runs(home / "runs")) as runs:
        runs.add("a", home / "a.toml")
    with closing(sqlite3.connect(home / "runs" / "runs.db")) as db, db:
        db.execute("UPDATE runs SET plan=?", (str(home / "a.toml"),))
    with closing(Runs(home / "runs")) as runs:
        assert [run.plan for run in runs.runs()] == [home / "a.toml"]
    home.rename(tmp_path / "moved")
    with closing(Runs(tmp_path / "moved" / "runs")) as runs:
        assert [run.plan for run in runs.runs()] == [tmp_path / "moved" / "a.toml"]
