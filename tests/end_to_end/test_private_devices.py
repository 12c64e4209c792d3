"""Private runs with real devices: the noise of the model, and what each device tells its owner."""

from __future__ import annotations

import json
import subprocess
import sys
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_protocol import open_bundle
from peers import plan_text
from processes import Processes, free_port, service_file, wait_for

pytestmark = pytest.mark.slow

CLIP, NOISE, ROUNDS, DEVICES = 0.5, 1.0, 3, 2
PRIVATE: dict[str, object] = {
    "local__lr": 0.2,
    "local__epochs": 3,
    "round__goal": DEVICES,
    "round__minimum": DEVICES,
    "round__over_selection": 1.0,
    "stop__rounds": ROUNDS,
    "privacy__noise": NOISE,
    "privacy__delta": 1e-6,
    "privacy__population": DEVICES,
    "privacy__clip": CLIP,
    "privacy__participations": ROUNDS,
}


def owner_s_status(state: Path) -> dict[str, Any]:
    """What ``fleetlearn-device status`` says."""
    command = [sys.executable, "-m", "fleetlearn_device", "status", "--state", str(state)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mechanism", ["gaussian", "local"])
def test_devices_take_part_in_a_private_run(
    run: Processes, bundle_path: Path, shards: list[Path], mechanism: str
) -> None:
    """The noise of a released mean has the spread that the plan says: z C / goal where the
    coordinator adds it, and z C / sqrt(goal) where each of the devices does."""
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    settings = PRIVATE | {"privacy__mechanism": mechanism}
    plan.write_text(plan_text(bundle_path, data_dir, "dp-fedavg", **settings))
    service_file(plan, port)
    run.coordinator(plan)
    wait_for(lambda: "ws://" in run.log("coordinator"), "the coordinator")
    names = [f"d{number}" for number in range(DEVICES)]
    for name, shard in zip(names, shards, strict=False):
        run.device(name, f"ws://127.0.0.1:{port}", shard)
    for name in [*names, "coordinator"]:
        assert run.wait(name) == 0, run.log(name)

    assert read_status(data_dir).version == ROUNDS
    _, model = read_model(data_dir)
    moved = model.astype(np.float64) - open_bundle(bundle_path).parameters()
    divisor = DEVICES if mechanism == "gaussian" else sqrt(DEVICES)
    spread = NOISE * CLIP / divisor * sqrt(ROUNDS)
    assert abs(moved.std() / spread - 1) < 6 / sqrt(2 * moved.size)

    for name in names:
        said = owner_s_status(run.folder / f"{name}.state")["privacy"]
        assert (said["took_part"], said["delta"], said["epsilon"]) == (ROUNDS, 1e-6, None)
        assert said["spent"] > 0
        assert "loss 0 on" not in run.log(name), "the owner's log has the device's own loss"
