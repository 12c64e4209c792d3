"""For tests: the same devices as real processes and in the simulator, with the same secret."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleetlearn_coordinator.service.training_run.saved_privacy import SECRET
from fleetlearn_coordinator.storage.ledger import Metadata
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, Outcome, simulate
from fleetlearn_simulator.keyed_random import secret_bytes
from fleetlearn_simulator.scenario.scenario import Scenario

SCENARIO = """
name = "shards"
plan = "plan.toml"
population = {{ size = {size}, connected = {size} }}
data = {{ kind = "function", function = "shards:make" }}
compute = {{ step_seconds = 1.0 }}
"""
SHARDS = """
from pathlib import Path
import numpy as np

def make(device, seed):
    with np.load(Path(__file__).with_name(f"{device}.npz")) as file:
        return {"x": file["x"], "y": file["y"]}
"""
"""The module of a scenario's data: device 0's are in 0.npz, beside it."""


def simulate_shards(folder: Path, shards: Sequence[Path]) -> Outcome:
    """Simulate ``plan.toml`` of a folder with one device for each of these files of data."""
    for device, shard in enumerate(shards):
        (folder / f"{device}.npz").write_bytes(shard.read_bytes())
    (folder / "shards.py").write_text(SHARDS)
    (folder / "scenario.toml").write_text(SCENARIO.format(size=len(shards)))
    scenario = Scenario.load(folder / "scenario.toml")
    outcome = simulate(scenario, folder / "simulated", Options(backend="bundle", workers=1))
    assert outcome is not None
    return outcome


def give_simulator_s_secret(data_dir: Path, bundle: Path) -> None:
    """Begin a private run's data directory with the secret of a simulation whose seed is 0."""
    store = open_store(data_dir, open_bundle(bundle).sha256)
    store.write([Metadata(SECRET, secret_bytes(0, "privacy").hex())])
    store.close()
