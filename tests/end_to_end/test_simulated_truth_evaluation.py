"""The same evaluations as real processes and in the simulator: the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.results.run_folder import EVALUATIONS, read_rows
from peers import plan_text
from processes import Processes, free_port, service_file
from simulated_shards import simulate_shards


def test_processes_and_simulator_measure_the_same(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(
        plan_text(
            bundle_path,
            data_dir,
            local__lr=0.1,
            local__epochs=1,
            round__goal=3,
            round__minimum=3,
            round__gather=30.0,
            round__grace=30.0,
            round__deadline=600.0,
            stop__rounds=3,
            evaluation__every=2,
            evaluation__devices=3,
        )
    )
    service_file(plan, port)
    run.coordinator(plan)
    for device in range(3):
        (run.folder / f"{device}.npz").write_bytes(shards[device].read_bytes())
        run.device(name_of(device), f"ws://127.0.0.1:{port}", run.folder / f"{device}.npz")
    assert run.wait("coordinator", 120) == 0, run.log("coordinator")
    real = read_status(data_dir).evaluations
    assert [(row.version, row.outcome) for row in real] == [(2, "valid"), (3, "valid")]

    outcome = simulate_shards(run.folder, shards[:3])
    assert outcome.model.tobytes() == read_model(data_dir)[1].tobytes()
    rows = read_rows(outcome.folder, EVALUATIONS)
    assert [(row["version"], row["outcome"]) for row in rows] == [(2, "valid"), (3, "valid")]
    for row, found in zip(rows, real, strict=True):
        for key in ("devices", "examples", "behind", "dropped", "quantiles", "left_out"):
            assert row[key] == found.summary[key], key
        assert row["metrics"] == pytest.approx(found.summary["metrics"], rel=1e-9)
