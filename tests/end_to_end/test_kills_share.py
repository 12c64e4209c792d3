"""Rounds that want a share of the devices, with real processes: a coordinator that is killed in the
middle of a round goes on with the goal that the round had, though the fleet has grown meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.service.status import read_tasks
from peers import plan_text
from processes import Processes, free_port, service_file

CRASH = Path(__file__).with_name("crash_coordinator.py")
BEFORE, LATER = ("a", "b", "c", "d"), ("e", "f", "g", "h")
"""The devices that are there when the first round opens, and those that come while nobody serves
the run."""
SETTINGS: dict[str, Any] = {
    "local__lr": 0.1,
    "local__mu": 0.01,
    "local__epochs": 1,
    "round__goal": 4,
    "round__goal_share": 0.5,
    "round__minimum": 2,
    "round__minimum_share": 1.0,
    "round__over_selection": 1,
    "round__gather": 8.0,
    "round__grace": 60.0,
    "round__deadline": 120.0,
    "stop__rounds": 3,
}
TURNS = {
    "tasks are recorded but not sent": 1,
    "a task was sent": 2,
    "an update is recorded but not acknowledged": 1,
    "an update is acknowledged but not summed": 2,
}
"""Point in the first round -> which time it kills."""


@pytest.mark.slow  # test_share_runs.py restarts one in a process
@pytest.mark.parametrize("point", TURNS)
def test_the_open_round_keeps_its_goal(
    run: Processes, bundle_path: Path, shards: list[Path], point: str
) -> None:
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(plan_text(bundle_path, data_dir, "fedprox", **SETTINGS))
    service_file(plan, port)

    def begin(names: tuple[str, ...]) -> None:
        for number, name in enumerate(names):
            run.device(name, f"ws://127.0.0.1:{port}", shards[number % len(shards)])

    begin(BEFORE)
    process = run.coordinator(plan, CRASH, point, str(TURNS[point]), plan)
    assert process.wait(60) == -9, f"it was to die at {point}: {run.log('coordinator')}"
    given = {row.device for row in read_tasks(data_dir, 1)[1]}
    assert len(given) == 2, "half of four"
    begin(LATER)
    assert run.coordinator(plan).wait(90) == 0, run.log("coordinator")
    assert read_model(data_dir)[0] == 3
    rounds = [row.summary for row in read_status(data_dir).rounds]
    assert [(row["goal"], row["reports"]) for row in rounds] == [(2, 2), (4, 4), (4, 4)]
    assert given <= {*BEFORE}
    assert {row.device for row in read_tasks(data_dir, 1)[1] if row.state == "accepted"} == given
