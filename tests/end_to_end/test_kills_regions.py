"""Rounds with regions, with real processes: no kill of the coordinator changes the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file

CRASH = Path(__file__).with_name("crash_regions.py")
ROUNDS = 3
SETTINGS: dict[str, Any] = {
    "local__lr": 0.1,
    "local__mu": 0.01,
    "local__epochs": 1,
    "round__goal": None,
    "round__minimum": None,
    "round__over_selection": None,
    "round__gather": 30.0,
    "round__grace": 30.0,
    "stop__rounds": ROUNDS,
    "server__optimizer": "adam",
    "server__lr": 0.05,
    "regions__each": {"goal": 2, "over_selection": 1, "minimum": 2},
    "regions__minimum": 2,
    "regions__named": {"north": {"devices": ["n*"]}, "south": {"devices": ["s*"]}},
}
DEVICES = ("n1", "n2", "s1", "s2")
TURNS = {
    "an update is recorded but not acknowledged": 6,
    "an update is acknowledged but not summed": 3,
    "a sum is written but not recorded": 1,
    "a round is closed and its commit not begun": 2,
    "the new model is in its place but not recorded": 3,
    "a round is recorded and nobody told": 2,
    "a region's end is decided but not recorded": 3,
    "the regions that count are known": 2,
    "the regions' sums are merged": 2,
}
"""Point -> which time it kills."""


def train(
    run: Processes,
    bundle: Path,
    shards: list[Path],
    crash: tuple[str, int] | None,
    settings: dict[str, Any] = SETTINGS,
) -> bytes:
    """Train three rounds; returns the last model."""
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(plan_text(bundle, data_dir, "fedprox", **settings))
    service_file(plan, port)
    for name, shard in zip(DEVICES, shards, strict=False):
        run.device(name, f"ws://127.0.0.1:{port}", shard)
    if crash is not None:
        process = run.coordinator(plan, CRASH, crash[0], str(crash[1]), plan)
        assert process.wait(60) == -9, f"it was to die at {crash}: {run.log('coordinator')}"
    assert run.coordinator(plan).wait(60) == 0, run.log("coordinator")
    version, model = read_model(data_dir)
    assert version == ROUNDS
    if settings is SETTINGS:
        found = [row.summary["regions"] for row in read_status(data_dir).rounds]
        both = {name: {"reports": 2, "done": True} for name in ("north", "south")}
        assert found == [both] * ROUNDS
    return model.tobytes()


@pytest.fixture(scope="session")
def without_regions(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> bytes:
    """The last model of the same run without regions and without a kill."""
    flat = {key: value for key, value in SETTINGS.items() if not key.startswith("regions__")}
    flat |= {"round__goal": 4, "round__minimum": 4, "round__over_selection": 1}
    with processes(tmp_path_factory.mktemp("flat"), warm) as run:
        return train(run, bundle_path, shards, None, flat)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if "region's end" in point else pytest.mark.slow)
        for point in TURNS
    ],
)
def test_the_coordinator_killed_changes_nothing(
    run: Processes, bundle_path: Path, shards: list[Path], without_regions: bytes, point: str
) -> None:
    """SIGKILL at each point, and a new start: the model of the undisturbed run without regions, bit
    for bit."""
    assert train(run, bundle_path, shards, (point, TURNS[point])) == without_regions
