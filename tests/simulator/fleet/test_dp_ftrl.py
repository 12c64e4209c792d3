"""Correlated noise in the simulator: the coordinator's own, through checkpoints too; and the model
has less of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.privacy.blt import correlated_sensitivity
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.scenario.scenario import Scenario
from virtual import drive, make_scenario, simulate_in_parts

SIZE, GOAL, SEPARATION = 40, 4, 10


def scenario(folder: Path, bundle: Path, rounds: int = 6, **settings: Any) -> Scenario:
    privacy = {"noise": 1.0, "delta": 1e-3, "population": SIZE, "clip": 1.0}
    usual: dict[str, Any] = {
        "plan__recipe": "dp-ftrl",
        "plan__privacy": privacy | {"separation": SEPARATION},
        "plan__round": {"goal": GOAL, "minimum": GOAL, "over_selection": 1.0, "deadline": 5000.0},
        "plan__stop__rounds": rounds,
    }
    return make_scenario(folder, bundle, SIZE, **(usual | settings))


def test_no_device_takes_part_again_before_its_separation(
    tmp_path: Path, private_line: Path
) -> None:
    run = drive(scenario(tmp_path, private_line, 25))
    last: dict[int, int] = {}
    release = 0
    for row in run.events:
        release += row["event"] == "opened"
        if row["event"] == "accepted":
            assert release - last.get(row["device"], -SEPARATION) >= SEPARATION
            last[row["device"]] = release
    assert release == 25
    assert len(last) == SIZE


def test_a_run_that_was_stopped_goes_on_with_its_noise(tmp_path: Path, private_line: Path) -> None:
    whole = drive(scenario(tmp_path, private_line))
    parts = simulate_in_parts(scenario(tmp_path, private_line), tmp_path / "parts")
    assert parts.model.tobytes() == whole.model.tobytes()


@pytest.mark.slow
def test_the_model_has_less_noise_for_the_same_epsilon(tmp_path: Path, private_line: Path) -> None:
    """60 rounds of 8 seeds. The learning rate is so small that training moves nothing: what is left
    is noise, 24 elements of it for each mechanism."""
    rounds, times = 60, 6
    first, moved = open_bundle(private_line).parameters(), {}
    noises = {
        "gaussian": np.sqrt(times),
        "dp-ftrl": correlated_sensitivity(rounds, SEPARATION, times),
    }
    for mechanism, noise in noises.items():
        found = []
        for seed in range(8):
            privacy = {
                "mechanism": mechanism,
                "noise": float(noise),
                "delta": 1e-3,
                "population": SIZE,
                "clip": 1.0,
                "separation": SEPARATION,
            }
            run = drive(
                scenario(
                    tmp_path,
                    private_line,
                    rounds,
                    plan__privacy=privacy,
                    plan__local__lr=1e-12,
                    seed=seed,
                )
            )
            found.append(run.fleet.coordinator.model - first)
        moved[mechanism] = float(np.sqrt(np.mean(np.square(found))))
    assert moved["gaussian"] == pytest.approx(np.sqrt(times * rounds) / GOAL, rel=0.4)
    assert moved["dp-ftrl"] < 0.6 * moved["gaussian"]
