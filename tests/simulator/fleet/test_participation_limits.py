"""Private runs in the simulator: no device takes part too often, whatever crashes and whenever the
simulation is stopped, and a run that was stopped goes on as if it was not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.results.run_folder import EVENTS, ROUNDS, read_rows
from virtual import drive, make_scenario, simulate_in_parts

SEPARATION, MOST = 2, 3
PRIVATE: dict[str, Any] = {
    "plan__recipe": "dp-fedavg",
    "plan__privacy": {
        "noise": 0.3,
        "delta": 1e-3,
        "population": 16,
        "clip": 1.0,
        "separation": SEPARATION,
        "participations": MOST,
    },
    "plan__round": {"goal": 4, "minimum": 3, "over_selection": 1.5, "deadline": 40.0},
    "plan__stop__rounds": 9,
    "tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 1.0}},
}
CARRIED = PRIVATE | {
    "plan__round": {**PRIVATE["plan__round"], "late": "carry"},
    "plan__staleness": {"max": 3},
}
BUFFERED = PRIVATE | {
    "plan__recipe": "fedbuff",
    "plan__round": {"goal": 4, "concurrency": 6, "deadline": 1000.0},
}
KINDS = {"synchronous": PRIVATE, "carried": CARRIED, "asynchronous": BUFFERED}
DEATHS = {
    "failures": {"crash": 0.1, "stragglers": 0.2},
    "coordinator": {"crashes": [41.0, *range(100, 1000, 60)], "restart": 3.0},
}


def releases_of(events: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Return device -> the releases that it took part in, from the event log alone. A report that
    comes while no round is open counts for the next one, which then has it as it opens."""
    took_part, counted, release = defaultdict[int, list[int]](list), list[int](), 1
    for row in events:
        match row["event"]:
            case "accepted":
                counted.append(row["device"])
            case "committed":
                for device in counted:
                    took_part[device].append(release)
                counted, release = [], release + 1
            case "abandoned":
                counted = []
    return took_part


def check(events: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    took_part = releases_of(events)
    for own in took_part.values():
        assert min((b - a for a, b in pairwise(own)), default=SEPARATION) >= SEPARATION
        assert len(own) <= MOST
    return took_part


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, DEATHS], ids=["calm", "deaths"])
def test_no_device_takes_part_too_often(
    tmp_path: Path, private_line: Path, kind: str, more: dict[str, Any]
) -> None:
    run = drive(make_scenario(tmp_path, private_line, 16, **(KINDS[kind] | more)))
    took_part = check(run.events)
    assert run.fleet.finished == "9 rounds done"
    assert sum(map(len, took_part.values())) >= 9 * 3
    if more:
        kinds = [row["event"] for row in run.events]
        assert "restart" in kinds[kinds.index("committed") :]


@pytest.mark.parametrize(
    "kind", ["asynchronous", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)][:3]
)
def test_a_run_that_was_stopped_after_each_round_goes_on_as_if_it_was_not(
    tmp_path: Path, private_line: Path, kind: str
) -> None:
    """Who took part, and the reports that came early, are in the checkpoint."""
    scenario = make_scenario(tmp_path, private_line, 16, **(KINDS[kind] | DEATHS))
    whole = simulate(scenario, tmp_path / "whole.sim", Options(backend="bundle", workers=1))
    again = simulate_in_parts(scenario, tmp_path / "part.sim")
    assert whole is not None
    check(read_rows(again.folder, EVENTS))
    assert again.model.tobytes() == whole.model.tobytes()
    for name in (ROUNDS, EVENTS):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_fleet_that_took_part_as_often_as_it_may_waits_for_others(
    tmp_path: Path, private_line: Path
) -> None:
    """The plan's population is larger than who comes: the run waits, and does not finish."""
    privacy = PRIVATE["plan__privacy"] | {"population": 1000}
    more = BUFFERED | {"plan__privacy": privacy, "plan__stop__rounds": 100}
    run = drive(make_scenario(tmp_path, private_line, 8, **more))
    took_part = check(run.events)
    assert [len(own) for own in took_part.values()] == [MOST] * 8
    assert len(run.rounds) == 6
    assert run.fleet.engine.selection.limited.done() == 8
    assert run.fleet.finished == (
        "no round began for a year: a round needs 1 device, and none can take part; of the "
        "connected devices, 8 took part as often as they may (privacy.participations = 3). Others "
        "have to connect"
    )
