"""The newest model for devices that take no part, from a real coordinator: while it trains, and
when the training is finished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_device import Predictor
from peers import plan_text
from processes import Processes, free_port, service_file, wait_for

pytestmark = pytest.mark.slow


def fetch(url: str, state: Path, status: int = 0) -> str:
    """Fetch the newest model as its owner types it. Returns what was said."""
    command = [sys.executable, "-m", "fleetlearn_device", "fetch-model"]
    options = ["--coordinator", url, "--state", str(state)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == status, done
    return done.stdout + done.stderr


@pytest.mark.parametrize("gives", [True, False])
def test_a_device_that_takes_no_part(
    run: Processes, bundle_path: Path, shards: list[Path], gives: bool
) -> None:
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    settings = {"round__goal": 1, "round__minimum": 1, "stop__rounds": 3, "local__lr": 0.1}
    text = plan_text(bundle_path, data_dir, "fedavg", **settings)
    if gives:
        text += "\n[models]\ngive = true\n"
    plan.write_text(text)
    service_file(plan, port)
    url, state = f"ws://127.0.0.1:{port}", run.folder / "spectator"
    run.coordinator(plan, "-m", "fleetlearn_coordinator", "serve", plan, "--stay")
    wait_for(lambda: "ws://" in run.log("coordinator"), "the coordinator")
    if not gives:
        assert "[models] give = true" in fetch(url, state, status=1)
        return
    fetch(url, state)
    before = Predictor(state)
    x = np.zeros((1, 64), np.float32)
    first = np.asarray(before.predict(x))
    run.device("a", url, shards[0])
    assert run.wait("a") == 0, run.log("a")
    wait_for(lambda: read_status(data_dir).version == 3, "three rounds")
    fetch(url, state)  # the training is finished
    version, model = read_model(data_dir)
    assert version == 3
    assert not np.array_equal(np.asarray(before.predict(x)), first), "the newer one, by itself"
    kept = np.fromfile(state / "predict" / before.model.model, "<f4")
    np.testing.assert_array_equal(kept, model)
    with find_storage(data_dir).read_ledger() as ledger:
        devices = {device for number in (1, 2, 3) for _, device, *_ in ledger.tasks(number)}
    assert len(devices) == 1, "the other one was given no task"
