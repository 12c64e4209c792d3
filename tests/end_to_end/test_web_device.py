"""A device of the SDK for browsers (in Node) and one of the Python SDK in the rounds of one
coordinator.

Real processes, credentials, and a kill. The model is the one that a loop of FedAvg makes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from expected_model import EPOCHS, LR, ROUNDS, TOLERANCE, expected_model
from fleetlearn_coordinator import read_model
from last_release import LAST_RELEASE, build_web_device, unpack
from peers import plan_text
from processes import Processes, free_port, status_of, wait_for
from web_sdk import script


@pytest.mark.slow
@pytest.mark.parametrize("older", ["none", "the SDK for browsers", "the coordinator"])
def test_both_sdks_train_one_model(
    run: Processes, bundle_path: Path, shards: list[Path], older: str
) -> None:
    """``older``: what is of the last release."""
    folder, plan, port = run.folder, run.folder / "plan.toml", free_port()
    env = unpack(LAST_RELEASE, folder / "last") if older == "the coordinator" else None
    device = (
        build_web_device(LAST_RELEASE, folder / "last")
        if older == "the SDK for browsers"
        else script("node_device")
    )
    plan.write_text(
        plan_text(
            bundle_path,
            folder / "run",
            local__lr=LR,
            local__epochs=EPOCHS,
            local__batch_size=0,
            round__goal=2,
            round__minimum=2,
            round__gather=60.0,
            round__grace=60.0,
            round__deadline=600.0,
            stop__rounds=ROUNDS,
        )
    )
    (folder / "service.toml").write_text(f'port = {port}\nidentities = "identities"\n')
    web = [
        *device,
        f"ws://127.0.0.1:{port}",
        shards[0],
        folder / "web.state",
        "--until-finished",
    ]
    run.coordinator(plan, env=env)
    wait_for(lambda: status_of(folder / "run") is not None, "the coordinator")
    whole = [sys.executable, "-m", "fleetlearn_coordinator", "token", "service.toml", "--uses", "2"]
    token = subprocess.run(
        whole, cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    run.start("web", *web, "--name", "web", "--token", token)
    run.start(
        "python",
        sys.executable,
        "-m",
        "fleetlearn_device",
        "run",
        "--coordinator",
        f"ws://127.0.0.1:{port}",
        "--data",
        shards[1],
        "--state",
        folder / "python.state",
        "--name",
        "python",
        "--until-finished",
        "--token",
        token,
    )
    wait_for(
        lambda: bool((found := status_of(folder / "run")) and found.version),
        "a round of both devices",
    )
    if run.running["web"].poll() is None:
        run.kill("web")
        run.start("web", *web)  # its name and its credential are in its store
    for name in ("web", "python", "coordinator"):
        assert run.wait(name) == 0, run.log(name)
    version, model = read_model(folder / "run")[:2]
    assert version == ROUNDS
    np.testing.assert_allclose(
        model, expected_model(bundle_path, shards[:2]), rtol=0, atol=TOLERANCE
    )
