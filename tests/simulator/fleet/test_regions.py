"""Rounds with regions in virtual time, by the coordinator's own engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_simulator import Options, SimulatorError, simulate
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import EVENTS, MODEL, ROUNDS, read_rows
from virtual import drive, make_scenario

SIZE = 12
LOCAL = {"epochs": 2, "batch_size": 0, "lr": 0.1, "evaluate": True}
NAMED = {"even": {"tags": ["region-0"]}, "odd": {"tags": ["region-1"]}}
REGIONS: dict[str, Any] = {
    "plan__round": {"deadline": 1e5, "gather": 50.0},
    "plan__local": LOCAL,
    "plan__stop__rounds": 3,
    "plan__regions": {"each": {"goal": 6, "over_selection": 1.0, "minimum": 2}, "named": NAMED},
    "failures": {"regions": 2},
}
FLAT: dict[str, Any] = {
    **REGIONS,
    "plan__round": {"goal": 12, "over_selection": 1.0, "minimum": 2, "deadline": 1e5},
}
del FLAT["plan__regions"]


def test_the_model_is_that_of_rounds_without_regions(tmp_path: Path, line: Path) -> None:
    regional = drive(make_scenario(tmp_path, line, SIZE, **REGIONS))
    flat = drive(make_scenario(tmp_path, line, SIZE, **FLAT))
    assert regional.model.tobytes() == flat.model.tobytes()
    both = {name: {"reports": 6, "done": True} for name in NAMED}
    assert [row["regions"] for row in regional.rounds] == [both] * 3


TIERS: dict[str, Any] = {
    name: {"share": 1.0, "speed": speed, "latency": 0.0, "tags": [name]}
    for name, speed in (("near", 1.0), ("far", 0.001))
}
BY_TIER = {"near": {"tags": ["near"]}, "far": {"tags": ["far"]}}


def test_a_straggling_region_costs_the_round_its_own_devices_and_no_time(
    tmp_path: Path, line: Path
) -> None:
    """A step takes 10 s on near devices, and 10,000 s on far ones."""
    regions = {
        "each": {"goal": 4, "over_selection": 1.0, "minimum": 4, "deadline": 100.0},
        "named": BY_TIER,
        "minimum": 1,
    }
    made = make_scenario(
        tmp_path, line, 24, **{**REGIONS, "plan__regions": regions, "tiers": TIERS}
    )
    run = drive(made)
    assert [row["regions"] for row in run.rounds] == [
        {"near": {"reports": 4, "done": True}, "far": {"reports": 0, "done": False}}
    ] * 3
    assert all(row["reports"] == 4 for row in run.rounds)
    assert all(99.0 < row["seconds"] < 101.0 for row in run.rounds)
    ended = [row for row in run.events if row["event"] == "region-ended"]
    assert [row["region"] for row in ended] == ["near", "far"] * 3
    assert ended[1]["why"] == "its deadline has passed: 0 reports, 4 are the minimum"


def test_a_region_that_is_over_stays_over_when_the_coordinator_dies(
    tmp_path: Path, line: Path
) -> None:
    regions = {
        "each": {"goal": 4, "over_selection": 1.0, "minimum": 4, "deadline": 100.0},
        "named": BY_TIER,
        "minimum": 1,
    }
    more = {"plan__regions": regions, "tiers": TIERS, "plan__stop__rounds": 1}
    crash = {"crashes": [60.0], "restart": 5.0}
    run = drive(make_scenario(tmp_path, line, 24, **{**REGIONS, **more, "coordinator": crash}))
    ended = [row for row in run.events if row["event"] == "region-ended"]
    assert [(row["region"], row["done"]) for row in ended] == [("near", True), ("far", False)]
    assert ended[0]["time"] < 60.0 < ended[1]["time"]
    assert 160.0 < run.rounds[0]["seconds"] < 170.0, "far had its whole time again"


HARD: dict[str, Any] = {
    **REGIONS,
    "plan__regions": {
        "each": {"goal": 5, "over_selection": 1.4, "minimum": 2, "deadline": 300.0},
        "named": NAMED,
        "minimum": 1,
    },
    "plan__round": {"deadline": 500.0, "gather": 50.0},
    "plan__stop__rounds": 6,
    "failures": {"regions": 2, "crash": 0.1, "upload": 0.05, "train": 0.0005},
    "coordinator": {"crashes": [45.0, 130.0, 200.0], "restart": 5.0},
}


@pytest.mark.parametrize("weighting", ["updates", "uniform"])
def test_two_processes_crashes_of_the_coordinator_and_stops_change_nothing(
    tmp_path: Path, line: Path, weighting: str
) -> None:
    regions = {**HARD["plan__regions"], "weighting": weighting}
    made = make_scenario(tmp_path, line, 40, **{**HARD, "plan__regions": regions})
    options = Options(backend="bundle", workers=1, checkpoint=1)
    whole = simulate(made, tmp_path / "whole", options)
    two = simulate(made, tmp_path / "two", options._replace(workers=2))
    assert whole is not None
    assert two is not None
    stopped, turns = None, 0
    while stopped is None:
        seen: list[Fleet] = []
        stopped = simulate(
            made, tmp_path / "stopped", options, resume=turns > 0, progress=seen.append,
            should_stop=lambda seen=seen: len(seen) > 1,  # type: ignore[misc]
        )  # fmt: skip
        turns += 1
    assert turns > 2
    expected = [(whole.folder / name).read_bytes() for name in (EVENTS, ROUNDS, MODEL)]
    for other in (two, stopped):
        assert [(other.folder / name).read_bytes() for name in (EVENTS, ROUNDS, MODEL)] == expected
    kinds = Counter(row["event"] for row in read_rows(whole.folder, EVENTS))
    assert kinds["region-ended"] == 12
    assert any("crash" in kind for kind in kinds), kinds


def test_what_a_simulation_cannot_do(tmp_path: Path, line: Path) -> None:
    named = {"even": NAMED["even"], "other": {"goal": 2}}
    with pytest.raises(SimulatorError, match="a simulation has no gateways"):
        make_scenario(
            tmp_path,
            line,
            SIZE,
            **{**REGIONS, "plan__regions": {"each": {"goal": 1}, "named": named}},
        )
    with pytest.raises(SimulatorError, match="what the devices of a failed region keep"):
        make_scenario(tmp_path, line, SIZE, **REGIONS, plan__encoding={"up": "topk-0.1"})
