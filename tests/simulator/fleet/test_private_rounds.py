"""Private rounds in the simulator: their noise follows from the seed, also over a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario
from virtual import drive, make_scenario, simulate_in_parts

SIZE, ROUNDS = 12, 4
KINDS: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "adaptive": {"clip_quantile": 0.5},
    "noised": {"metrics": "noised", "metrics_bounds": {"loss": [0.0, 20.0]}, "clip_quantile": 0.5},
    "dp-ftrl": {"mechanism": "dp-ftrl", "separation": 2},
}


def scenario(folder: Path, bundle: Path, seed: int = 1, **privacy: Any) -> Scenario:
    usual = {"noise": 0.3, "delta": 1e-3, "population": SIZE, "clip": 1.0}
    return make_scenario(
        folder,
        bundle,
        SIZE,
        seed=seed,
        plan__recipe="dp-fedavg",
        plan__privacy=usual | privacy,
        plan__round={"goal": 5, "minimum": 1, "over_selection": 1.0, "deadline": 5000.0},
        plan__local__evaluate="metrics" in privacy,
        plan__stop__rounds=ROUNDS,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_private_run_that_was_stopped_goes_on_to_the_same_model(
    tmp_path: Path, private_line: Path, kind: str
) -> None:
    """Its noise, the clip norm and the buffers of correlated noise are in the checkpoint."""
    made = scenario(tmp_path, private_line, **KINDS[kind])
    whole = simulate(made, tmp_path / "whole", Options(backend="bundle", workers=1))
    parts = simulate_in_parts(made, tmp_path / "parts")
    assert whole is not None
    assert parts.model.tobytes() == whole.model.tobytes()


def test_the_noise_follows_from_the_seed(tmp_path: Path, private_line: Path) -> None:
    one, again, other = (
        drive(scenario(tmp_path, private_line, seed)).model.tobytes() for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other
