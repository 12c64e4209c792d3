"""Reading runs' folders; thinning; what sets a sweep's runs apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results.loaded_run import (
    LoadedRun,
    binned,
    find_runs,
    read_run,
    series,
    swept_keys,
    thinned,
    traffic,
)
from runs_folder import row, write_rows, write_run


def test_what_is_absent_did_not_happen(tmp_path: Path) -> None:
    run = read_run(write_rows(tmp_path / "bare", [{"round": 1}, {"round": 2, "how": "abandoned"}]))
    assert (run.name, run.scenario, run.summary, run.state) == ("bare", {}, {}, "not finished")
    assert [each.round for each in run.committed] == [1]
    assert run.total(lambda each: each.causes).total() == 0
    assert series(run) == {}


def test_half_of_a_last_line_is_left_out(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(1), row(2)])
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "ti')
    assert [each.round for each in read_run(tmp_path).rows] == [1, 2]


@pytest.mark.parametrize("damage", ['{"round": "one"}\n', "[]\n", "nonsense\n"])
def test_a_damaged_log_is_an_error(tmp_path: Path, damage: str) -> None:
    (tmp_path / "rounds.jsonl").write_text(damage)
    with pytest.raises(SimulatorError, match="cannot be read as a run's folder"):
        read_run(tmp_path)


def test_runs_are_found_below_a_folder_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("run-10", "run-2", "deep/run-1"):
        write_rows(tmp_path / name, [])
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == [
        "deep/run-1",
        "run-2",
        "run-10",
    ]
    assert find_runs(tmp_path / "run-2") == [tmp_path / "run-2"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(SimulatorError, match=r"holds no run: expected rounds\.jsonl"):
        find_runs(tmp_path / "empty")


def test_series_has_committed_rounds_only_and_no_gaps(tmp_path: Path) -> None:
    rows = [
        row(1, train={"loss": 3.0}, test={"loss": 4.0}),
        row(2, how="abandoned", train={"loss": 9.0}),
        row(3, train={"loss": None}),
        row(4, train={"loss": 1.0}),
    ]
    found = series(read_run(write_rows(tmp_path, rows)))["loss"]
    assert {
        kind: (places.tolist(), values.tolist()) for kind, (places, values) in found.items()
    } == {
        "test": ([0], [4.0]),
        "train": ([0, 3], [3.0, 1.0]),
    }


def test_traffic_adds_up_both_ways(tmp_path: Path) -> None:
    run = read_run(
        write_rows(
            tmp_path, [row(1, bytes={"down": 5, "up": 2}), row(2), row(3, bytes={"down": 1})]
        )
    )
    assert traffic(run).tolist() == [7, 7, 8]


def test_thinning_keeps_ends_and_spikes() -> None:
    values = np.zeros(100_000)
    values[[33_333, 77_777]] = 1.0, -1.0
    places = thinned(values, 1000)
    assert len(places) <= 1000
    assert {0, 33_333, 77_777, 99_999} <= set(places.tolist())
    assert (np.diff(places) > 0).all()
    assert thinned(values[:1000], 1000).tolist() == list(range(1000))


@pytest.mark.parametrize(
    ("count", "width", "bins"), [(0, 1, 0), (1, 1, 1), (120, 1, 120), (121, 2, 61), (1000, 9, 112)]
)
def test_bins_are_means(count: int, width: int, bins: int) -> None:
    values = np.arange(count, dtype=np.float64)
    found, wide = binned(values, 120)
    assert (wide, len(found)) == (width, bins)
    assert found.tolist() == [
        float(np.mean(values[at : at + width])) for at in range(0, count, width)
    ]


def test_swept_keys_leave_out_seeds_and_what_follows(tmp_path: Path) -> None:
    """The population's connections follow from the goal, which the runs are named after."""
    runs = [
        read_run(write_run(tmp_path / f"a-goal-{goal}-seed-{seed}", 1, seed=seed, goal=goal))
        for goal in (8, 16)
        for seed in (1, 2)
    ]
    assert swept_keys(runs) == ["plan.round.goal"]


def test_swept_keys_of_a_grid_are_all_of_its_keys() -> None:
    runs = [
        LoadedRun(Path(), "x", {"seed": a + b, "one": {"a": a}, "b": b, "follows": a * b}, [], {})
        for a in (1, 2)
        for b in (3, 5)
    ]
    assert swept_keys(runs) == ["one.a", "b"]
    assert swept_keys(runs[:1]) == []
