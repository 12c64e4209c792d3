"""What runs are judged by, against cases worked out by hand."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results.loaded_run import LoadedRun, read_run
from fleetlearn_simulator.results.run_statistics import (
    Reached,
    Target,
    lost_share,
    median,
    participation,
    reached,
    wasted_share,
)
from runs_folder import SCENARIO, row, write_rows

TEXT = SCENARIO.format(name="small", seed=7, goal=4, connected=9)  # phones 3, boards 1


def run_of(folder: Path, rows: list[dict[str, Any]], scenario: str = TEXT) -> LoadedRun:
    return read_run(write_rows(folder / "run", rows, scenario=scenario))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("accuracy=0.9", Target("accuracy", 0.9, below=False)),
        ("loss=0.5", Target("loss", 0.5, below=True)),
        ("accuracy>=0.9", Target("accuracy", 0.9, below=False)),
        (" error <= 1e-2 ", Target("error", 0.01, below=True)),
        ("loss>=-1", Target("loss", -1.0, below=False)),
    ],
)
def test_targets(text: str, target: Target) -> None:
    assert Target.parse(text) == target
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text", ["", "accuracy", "accuracy=", "=0.9", "accuracy>0.9", "a=b", "a=nan", "a=inf", "a==1"]
)
def test_no_targets(text: str) -> None:
    with pytest.raises(
        SimulatorError, match="is refused: expected a metric and a number"
    ) as caught:
        Target.parse(text)
    assert repr(text) in caught.value.text


def test_the_first_round_that_is_there_counts(tmp_path: Path) -> None:
    """Round 2 was abandoned: its work is wasted, and it is no round of training. Round 4 falls back
    again."""
    spent = {"useful": 6.0, "wasted": 2.0}
    rows = [
        row(
            1,
            test={"loss": 3.0, "accuracy": 0.1},
            device_seconds=spent,
            bytes={"down": 10, "up": 5},
        ),
        row(2, how="abandoned", test={"loss": 0.0}, device_seconds=spent, bytes={"down": 10}),
        row(
            3,
            test={"loss": 1.0, "accuracy": 0.5},
            device_seconds=spent,
            bytes={"down": 10, "up": 5},
        ),
        row(
            4,
            test={"loss": 2.0, "accuracy": 0.4},
            device_seconds=spent,
            bytes={"down": 10, "up": 5},
        ),
    ]
    run = run_of(tmp_path, rows)
    there = Reached(rounds=2, time=180.0, bytes=40.0, device_seconds=24.0, wasted=12.0)
    assert reached(run, Target("loss", 1.5, below=True)) == there
    assert reached(run, Target("loss", 1.0, below=True)) == there
    assert reached(run, Target("accuracy", 0.5, below=False)) == there
    assert reached(run, Target("loss", 0.5, below=True)) is None
    assert reached(run, Target("accuracy", 0.6, below=False)) is None
    assert reached(run, Target("loss", 9.0, below=True), "train") is None
    assert reached(run, Target("nothing", 1.0, below=True)) is None
    assert wasted_share(run) == 14 / 32


def test_rounds_without_a_test_are_passed_over(tmp_path: Path) -> None:
    run = run_of(tmp_path, [row(1), row(2), row(3, test={"loss": 1.0})])
    found = reached(run, Target("loss", 1.0, below=True))
    assert found is not None
    assert (found.rounds, found.time) == (3, 180.0)


@pytest.mark.parametrize(
    ("values", "middle"),
    [
        ([3.0], 3.0),
        ([1.0, 2.0], 1.5),
        ([None, 1.0, 2.0], 2.0),
        ([None, 1.0], None),
        ([None, None, 1.0, 2.0, 3.0], 3.0),
        ([None], None),
        ([], None),
    ],
)
def test_never_is_later_than_any_time(values: list[float | None], middle: float | None) -> None:
    assert median(values) == middle


def test_shares_of_what_was_lost(tmp_path: Path) -> None:
    rows = [row(1, assigned={"0": 6, "1": 2}, causes={"train": 1, "surplus": 1}), row(2)]
    run = run_of(tmp_path, rows)
    assert lost_share(run) == 0.25
    assert wasted_share(run) == 0.0
    assert lost_share(run_of(tmp_path, [])) == 0.0


def test_participation_by_hand(tmp_path: Path) -> None:
    """Tier 0 has 3/4 of the population. Of its 12 tasks 6 are kept, of tier 1's 8 tasks 4: it sends
    4 of 10 reports and is a quarter of the population."""
    rows = [
        row(1, assigned={"0": 5, "1": 4}, accepted={"0": 4, "1": 4}),
        row(2, how="abandoned", assigned={"0": 2, "1": 4}, accepted={"0": 1}),
        row(3, assigned={"0": 5}, accepted={"0": 2}),
    ]
    found = participation(run_of(tmp_path, rows))
    assert found.tiers == ["phone", "board"]
    np.testing.assert_allclose(found.kept, [6 / 12, 4 / 8])
    np.testing.assert_allclose(found.heard, [0.6 / 0.75, 0.4 / 0.25])
    assert found.evenness == pytest.approx(0.5)


def test_a_tier_that_is_silent(tmp_path: Path) -> None:
    found = participation(run_of(tmp_path, [row(1, assigned={"0": 2}, accepted={"0": 2})]))
    np.testing.assert_allclose(found.heard, [4 / 3, 0.0])
    assert found.evenness == 0.0
    assert isnan(found.kept[1])  # it had no task


def test_no_reports_and_no_tiers(tmp_path: Path) -> None:
    nothing = participation(run_of(tmp_path, [row(1, how="abandoned", accepted={"0": 2})]))
    assert np.isnan(nothing.heard).all()
    assert isnan(nothing.evenness)
    bare = participation(read_run(write_rows(tmp_path / "bare", [row(1)])))
    assert bare.tiers == []
    assert isnan(bare.evenness)
