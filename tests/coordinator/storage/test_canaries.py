"""The rows of canaries, and what follows from them for the two runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.storage.canaries import CanaryRow
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.runs import Population, Runs

PLAN = Path("/plans/a.toml")
SOME = Population(("roof",), share=0.5)
ROW = CanaryRow(2, 1, "running", 0.01, ("d7", "d9"), ("beta",), "{}", "{}")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with closing(Runs(tmp_path)) as found:
        found.add("a", PLAN, SOME)
        found.add("a.canary", PLAN)
        found.canaries.add(ROW)
        yield found


def change(runs: Runs, **values: Any) -> None:
    (row,) = runs.canaries.rows()
    runs.canaries.change(row._replace(**values))


def test_both_runs_serve_parts_of_the_same_devices(runs: Runs) -> None:
    old, canary = runs.runs()
    assert old.split is not None
    assert canary.split == old.split._replace(is_canary=True)
    assert old.split[:5] == ("canary 2", "a", 0.01, ("d7", "d9"), ("beta",))
    assert canary.population == SOME, "the old run's, whatever its own row says"
    assert (old.wanted, canary.wanted) == ("running", "running")


@pytest.mark.parametrize(
    ("wanted", "then"),
    [("running", "paused"), ("draining", "paused"), ("stopped", "stopped"), ("paused", "paused")],
)
def test_in_the_last_step_the_old_run_is_paused(runs: Runs, wanted: Any, then: str) -> None:
    runs.want("a", wanted)
    change(runs, share=1.0)
    old, canary = runs.runs()
    assert (old.wanted, canary.wanted) == (then, "running")
    assert canary.split is not None
    assert (canary.split.share, canary.split.tags) == (1.0, ()), "for all, whatever their tags"
    change(runs, phase="back")
    old, canary = runs.runs()
    assert (old.wanted, canary.wanted) == (wanted, "stopped"), "as people want it"
    assert old.split is canary.split is None


def test_a_canary_that_finishes_has_the_old_runs_name_and_devices(runs: Runs) -> None:
    (row,) = runs.canaries.rows()
    with runs.together():
        runs.canaries.change(row._replace(phase="finished"))
        runs.canaries.take_place(row, "a.before")
    old, canary = runs.runs()
    assert (old.name, old.wanted, old.split) == ("a.before", "stopped", None)
    assert (canary.name, canary.wanted, canary.population) == ("a", "running", SOME)
    assert canary.asked == 1, "a run that had ended begins again"


def test_who_changes_it_second_is_refused(runs: Runs) -> None:
    (row,) = runs.canaries.rows()
    assert runs.canaries.note(row, '{"seconds":1}')
    runs.canaries.change(row._replace(devices=("d8",)))
    for late in (row, row._replace(phase="back")):
        with pytest.raises(StoreError, match="somebody else has just changed"):
            runs.canaries.change(late)
        assert not runs.canaries.note(late, "lost")
    (found,) = runs.canaries.rows()
    assert (found.devices, found.changes, found.phase) == (("d8",), 1, "running")


def test_a_transaction_that_fails_changes_nothing(runs: Runs) -> None:
    (row,) = runs.canaries.rows()
    before = runs.runs()

    def finish_late() -> None:
        with runs.logged(1.0, "x", {}):
            runs.canaries.take_place(row, "a.before")
            runs.canaries.change(row._replace(changes=7))

    with pytest.raises(StoreError):
        finish_late()
    assert runs.runs() == before
    assert not runs.to_log()


def test_a_removed_run_takes_its_canary_along(runs: Runs) -> None:
    runs.remove("a.canary")
    assert runs.canaries.rows() == []
    assert runs.runs()[0].split is None


def test_a_database_of_an_earlier_release_gets_the_table(runs: Runs, tmp_path: Path) -> None:
    runs._db.execute("DROP TABLE canaries")
    runs.close()
    with closing(Runs(tmp_path)) as again:
        assert again.canaries.rows() == []
        assert len(again.runs()) == 2
