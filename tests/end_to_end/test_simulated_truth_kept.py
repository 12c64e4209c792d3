"""The same fleet, whose devices keep something, as real processes and in the simulator: the same models and the same
kept states, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundle_cache import cached_export
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_device.training.kept_state import kept_state_size
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from line_bundle import line_data, write_line_bundle
from peers import plan_text
from processes import Processes, free_port, service_file
from torch import nn

DEVICES = 3
SCENARIO = f"""
name = "truth"
plan = "plan.toml"
population = {{ size = {DEVICES}, connected = {DEVICES} }}
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


def moon(folder: Path) -> Bundle:
    """Devices keep the model with which their last task ended."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4)
    return cached_export(
        module, lambda outputs, y: ((outputs.sum(1) - y) ** 2).mean(), (x, y), folder / "moon.bundle",
        step=LocalStep(contrastive=True), features=lambda outputs: outputs,
    ).bundle  # fmt: skip


def all_kinds(folder: Path) -> Bundle:
    """Devices keep a personal parameter, a row of their optimizer's state, and their previous model."""
    return write_line_bundle(folder / "line.bundle", personal=True, state=True, references=["anchor", "previous"])


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "moon": (moon, {"recipe": "moon", "local__mu": 0.5}),
    "personal, state and previous": (all_kinds, {"recipe": "fedavg"}),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_and_simulator_keep_the_same(run: Processes, case: str) -> None:
    """Three rounds of three devices: from the second on, they go on from what they kept."""
    make, settings = CASES[case]
    bundle = make(run.folder)
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(
        plan_text(
            bundle.path, data_dir, local__lr=0.02, local__epochs=2, local__batch_size=7, local__evaluate=True,
            round__goal=DEVICES, round__minimum=DEVICES, round__gather=30.0, round__grace=30.0, round__deadline=600.0,
            stop__rounds=3, **settings,
        )
    )  # fmt: skip
    service_file(plan, port)
    (run.folder / "shards.py").write_text(SHARDS)
    (run.folder / "scenario.toml").write_text(SCENARIO)
    run.coordinator(plan)
    for device in range(DEVICES):
        x, y = line_data(10 * (device + 2), seed=device)
        np.savez(run.folder / f"{device}.npz", x=x, y=y)
        run.device(name_of(device), f"ws://127.0.0.1:{port}", run.folder / f"{device}.npz")
    assert run.wait("coordinator", 120) == 0, run.log("coordinator")
    version, model = read_model(data_dir)
    assert version == 3
    real = [row.summary for row in read_status(data_dir).rounds]

    scenario = Scenario.load(run.folder / "scenario.toml")
    options = Options(backend="bundle", workers=1)
    fleets: list[Fleet] = []
    outcome = simulate(scenario, run.folder / "simulated", options, progress=fleets.append)
    assert outcome is not None
    assert outcome.model.tobytes() == model.tobytes()
    for row, summary in zip(read_rows(outcome.folder, ROUNDS), real, strict=True):
        assert row["train"] == summary["train"], "the devices' own losses, to the last bit"
        assert row["evaluation"] == pytest.approx(summary["evaluation"], rel=1e-6)

    simulated = fleets[0].coordinator.kept
    assert simulated is not None
    assert simulated.states is not None
    size = 4 * kept_state_size(bundle.manifest)
    sha256 = open_bundle(bundle.path).sha256
    for device in range(DEVICES):
        kept = (run.folder / f"{name_of(device)}.state" / "kept" / sha256).read_bytes()[:size]
        (row,) = simulated.states.of([device])
        assert simulated.states.file.read(row).tobytes() == kept
