"""A clip norm that follows the updates, and noisy metrics, with real processes: the same norms,
metrics and model in the simulator and after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.results.run_folder import ROUNDS as ROWS
from fleetlearn_simulator.results.run_folder import read_rows
from peers import plan_text
from processes import Processes, free_port, service_file
from simulated_shards import give_simulator_s_secret, simulate_shards

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
    (tmp_path / "plan.toml").write_text(plan_of(bundle_path, tmp_path / "unused"))
    outcome = simulate_shards(tmp_path, shards[:DEVICES])
    rows = [row for row in read_rows(outcome.folder, ROWS) if row["how"] == "committed"]

    port, data, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(plan_of(bundle_path, data))
    service_file(plan, port)
    give_simulator_s_secret(data, bundle_path)
    words = () if crash is None else (CRASH, crash[0], str(crash[1]), plan)
    process = run.coordinator(plan, *words)
    for device in range(DEVICES):
        run.device(
            name_of(device), f"ws://127.0.0.1:{port}", shards[device], options=("--runtime", "onnx")
        )
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
