"""Poisson sampling: who takes part in a round is decided by a coin for each device, and by nothing
else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet import simulated_account
from fleetlearn_simulator.scenario.scenario import Scenario
from virtual import Driven, drive, make_scenario, simulate_in_parts

SIZE, GOAL = 120, 60
PRIVACY: dict[str, Any] = {
    "noise": 1.0,
    "delta": 1e-3,
    "population": SIZE,
    "clip": 1.0,
    "sampling": "poisson",
}


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs is not asked here, and takes seconds (tests/simulator/test_private_run.py)."""
    monkeypatch.setattr(simulated_account, "epsilon_after", lambda plan, releases, noise: 1.0)


def scenario(folder: Path, bundle: Path, **settings: Any) -> Scenario:
    usual: dict[str, Any] = {
        "plan__recipe": "dp-fedavg",
        "plan__local": {"epochs": 1, "batch_size": 10_000, "lr": 0.01},  # one step
        "plan__privacy": PRIVACY,
        "plan__round": {"goal": GOAL, "minimum": 1, "over_selection": 1.0, "deadline": 5000.0},
        "plan__stop__rounds": 3,
    }
    return make_scenario(folder, bundle, SIZE, **(usual | settings))


def members(run: Driven) -> list[set[int]]:
    """Return the devices of each round."""
    rounds: list[set[int]] = []
    for row in run.events:
        if row["event"] == "opened":
            rounds.append(set())
        if row["event"] == "accepted":
            rounds[-1].add(row["device"])
    return rounds


def test_a_round_is_of_the_devices_that_were_drawn_for_it_and_of_all_of_them(
    tmp_path: Path, private_line: Path
) -> None:
    run = drive(scenario(tmp_path, private_line))
    assert run.fleet.finished is not None
    rounds = members(run)
    assert [len(each) for each in rounds] == [row["reports"] for row in run.rounds]
    assert len(rounds) == 3
    assert len({len(each) for each in rounds}) > 1  # the numbers of coins, not the goal
    for each in rounds:
        assert each <= set(range(SIZE))
    # another round has other devices: about half of a round's are in the next one too
    shared = [len(a & b) / len(a) for a, b in pairwise(rounds)]
    assert all(0.25 < share < 0.75 for share in shared)


def test_the_sizes_and_the_pairs_of_samples_are_binomial(
    tmp_path: Path, private_line: Path
) -> None:
    """2,000 samples of 120 devices with q = 1/2: mean and variance of the size, how often a device
    is drawn, and how often two of them are, are each within five standard deviations."""
    fleet = drive(scenario(tmp_path, private_line), most=1).fleet
    assert fleet.sampling is not None
    drawn = np.zeros((2000, SIZE), bool)
    for row in range(len(drawn)):
        fleet.engine.round = row
        drawn[row, fleet.sampling.draw(fleet.engine)] = True
    sizes = drawn.sum(axis=1)
    q, count = GOAL / SIZE, len(drawn)
    variance = SIZE * q * (1 - q)
    assert abs(sizes.mean() - GOAL) < 5 * np.sqrt(variance / count)
    assert abs(sizes.var() - variance) < 5 * variance * np.sqrt(2 / count)
    one = 5 * np.sqrt(q * (1 - q) / count)
    assert np.abs(drawn.mean(axis=0) - q).max() < one
    together = (drawn[:, :-1] & drawn[:, 1:]).mean(axis=0)
    assert np.abs(together - q * q).max() < 5 * np.sqrt(q * q * (1 - q * q) / count)


def test_a_run_that_was_stopped_draws_the_same_devices(tmp_path: Path, private_line: Path) -> None:
    whole = drive(scenario(tmp_path, private_line))
    parts = simulate_in_parts(scenario(tmp_path, private_line), tmp_path / "parts")
    assert parts.model.tobytes() == whole.model.tobytes()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"population": {"size": 130, "connected": 120}}, "population.size = 130 must be"),
        ({"plan__round__goal": 20}, "at least 50; it is 20"),
        ({"plan__round__late": "carry"}, 'round.late = "carry"'),
        ({"availability": {"kind": "bernoulli"}}, "may be offline"),
        ({"failures": {"train": 0.01}}, "failures.train a device that is drawn may not report"),
        ({"coordinator": {"crashes": [5.0]}}, "coordinator.crashes"),
        (
            {"plan__privacy": PRIVACY | {"participations": 2}},
            "privacy.participations of at least plan.stop.rounds",
        ),
    ],
)
def test_what_is_no_poisson_sample_is_refused_with_the_reason(
    tmp_path: Path, private_line: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(SimulatorError, match=text):
        scenario(tmp_path, private_line, **settings)


def test_a_device_that_is_too_slow_ends_the_simulation(tmp_path: Path, private_line: Path) -> None:
    """Some devices of this tier cannot upload before the deadline."""
    slow = {"device": {"latency": 0.0, "download": 1e12, "upload": 1.0, "spread": 3.0}}
    with pytest.raises(SimulatorError, match=r"reports of the \d+ devices that were drawn for it"):
        drive(scenario(tmp_path, private_line, plan__round__deadline=500.0, tiers=slow))
