"""A clip norm that follows the updates, and noisy metrics, with real processes: the same norms,
metrics and model in the simulator and after a kill."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.service.training_run.saved_privacy import SECRET
from fleetlearn_coordinator.storage.ledger import Metadata
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.keyed_random import secret_bytes
from fleetlearn_simulator.results.run_folder import ROUNDS as ROWS
from fleetlearn_simulator.results.run_folder import read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from peers import plan_text
from processes import Processes, free_port, service_file

pytestmark = pytest.mark.slow

CRASH = Path(__file__).with_name("crash_coordinator.py")
ROUNDS, DEVICES = 5, 2
PRIVATE: dict[str, object] = {
    "local__lr": 0.2,
    "local__epochs": 5,
    "local__batch_size": 0,
    "round__goal": DEVICES,
    "round__minimum": DEVICES,
    "round__over_selection": 1.0,
    "round__grace": 30.0,
    "round__gather": 30.0,
    "round__deadline": 600.0,
    "stop__rounds": ROUNDS,
    "privacy__noise": 0.1,
    "privacy__delta": 1e-6,
    "privacy__population": DEVICES,
    "privacy__clip": 1.0,
    "privacy__clip_quantile": 0.5,
    "privacy__metrics": "noised",
}
BOUNDS = "metrics_bounds = { loss = [0.0, 5.0], accuracy = [0.0, 1.0] }"
SCENARIO = """
name = "adaptive"
plan = "plan.toml"
population = { size = 2, connected = 2 }
data = { kind = "function", function = "shards:make" }
compute = { step_seconds = 1.0 }
"""
SHARDS = """
from pathlib import Path
import numpy as np

def make(device, seed):
    with np.load(Path(__file__).with_name(f"{device}.npz")) as file:
        return {"x": file["x"], "y": file["y"]}
"""
SHOWN = ("metrics", "evaluation", "train", "privacy", "change", "reports")


def plan_of(bundle: Path, data: Path) -> str:
    return plan_text(bundle, data, "dp-fedavg", **PRIVATE).replace(
        "[privacy]", f"[privacy]\n{BOUNDS}"
    )


def released(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in SHOWN}


@pytest.mark.parametrize(
    "crash", [None, ("the new model is in its place but not recorded", 3)], ids=["whole", "killed"]
)
def test_processes_and_simulator_release_the_same(
    run: Processes,
    tmp_path: Path,
    bundle_path: Path,
    shards: list[Path],
    crash: tuple[str, int] | None,
) -> None:
    for device in range(DEVICES):
        with np.load(shards[device]) as file:
            np.savez(tmp_path / f"{device}.npz", x=file["x"], y=file["y"])
    (tmp_path / "shards.py").write_text(SHARDS)
    (tmp_path / "plan.toml").write_text(plan_of(bundle_path, tmp_path / "unused"))
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    scenario = Scenario.load(tmp_path / "scenario.toml")
    outcome = simulate(scenario, tmp_path / "simulated", Options(backend="bundle", workers=1))
    assert outcome is not None
    rows = [row for row in read_rows(outcome.folder, ROWS) if row["how"] == "committed"]

    port, data, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(plan_of(bundle_path, data))
    service_file(plan, port)
    store = open_store(data, open_bundle(bundle_path).sha256)
    store.write([Metadata(SECRET, secret_bytes(0, "privacy").hex())])
    store.close()
    words = () if crash is None else (CRASH, crash[0], str(crash[1]), plan)
    process = run.coordinator(plan, *words)
    for device in range(DEVICES):
        name = name_of(device)
        run.start(
            name, sys.executable, "-m", "fleetlearn_device", "run",
            "--coordinator", f"ws://127.0.0.1:{port}", "--data", shards[device],
            "--state", run.folder / f"{name}.state", "--name", name,
            "--until-finished", "--runtime", "onnx",
        )  # fmt: skip
    if crash is not None:
        assert process.wait(60) == -9, f"it was to die at {crash}: {run.log('coordinator')}"
        process = run.coordinator(plan)
    assert process.wait(120) == 0, run.log("coordinator")
    version, model = read_model(data)
    assert version == ROUNDS
    shown = [row.summary for row in read_status(data).rounds]
    for mine, simulated in zip(shown, rows, strict=True):
        assert released(mine) == released(simulated)
    assert model.tobytes() == outcome.model.tobytes()
    clips = [summary["privacy"]["clip"] for summary in shown]
    assert len({*clips}) == ROUNDS, "it moved in each round"
    log = run.log("coordinator")
    assert "with noise" in log
