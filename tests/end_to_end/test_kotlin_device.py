"""Devices of all three SDKs in the rounds of one coordinator: in Kotlin on the JVM, in Python, and
the one for browsers in Node.

Real processes, credentials, and kills of the one in Kotlin. The model is the one that a loop of
FedAvg makes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kotlin_sdk
import numpy as np
import pytest
from expected_model import EPOCHS, LR, ROUNDS, TOLERANCE, expected_model
from fleetlearn_coordinator import read_model
from peers import plan_text
from processes import Processes, free_port, status_of, wait_for
from web_sdk import script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(kotlin_sdk.missing()), reason=f"no Kotlin: {kotlin_sdk.missing()}"),
]


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_three_sdks_train_one_model(
    run: Processes, bundle_path: Path, shards: list[Path], encoding: str
) -> None:
    folder, plan, port = run.folder, run.folder / "plan.toml", free_port()
    plan.write_text(
        plan_text(
            bundle_path,
            folder / "run",
            local__lr=LR,
            local__epochs=EPOCHS,
            local__batch_size=0,
            encoding__up=encoding,
            round__goal=3,
            round__minimum=3,
            round__gather=60.0,
            round__grace=60.0,
            round__deadline=600.0,
            stop__rounds=ROUNDS,
        )
    )
    (folder / "service.toml").write_text(f'port = {port}\nidentities = "identities"\n')
    run.coordinator(plan)
    wait_for(lambda: status_of(folder / "run") is not None, "the coordinator")
    token = run.command("token", "service.toml", "--uses", "3", cwd=folder).stdout.strip()
    url, shown = f"ws://127.0.0.1:{port}", ["--until-finished", "--token", token]
    java, python = kotlin_sdk.compiled(), [sys.executable, "-m", "fleetlearn_device", "run"]
    kotlin = [
        *(*java, kotlin_sdk.MAIN, "--coordinator", url, "--data", shards[0]),
        *("--state", folder / "kotlin.state", "--until-finished"),
    ]
    run.start("kotlin", *kotlin, "--name", "kotlin", "--token", token)
    state = ["--state", folder / "python.state", "--name", "python"]
    run.start("python", *python, "--coordinator", url, "--data", shards[1], *state, *shown)
    web = [*script("node_device"), url, shards[2], folder / "web.state", "--name", "web"]
    run.start("web", *web, *shown)
    for version in (1, 2):
        wait_for(
            lambda version=version: (
                (found := status_of(folder / "run")) is not None and found.version >= version
            ),
            f"round {version} of all devices",
        )
        if run.running["kotlin"].poll() is None:
            run.kill("kotlin")
            run.start("kotlin", *kotlin)  # its name and its credential are in its state directory
    for name in ("kotlin", "python", "web", "coordinator"):
        assert run.wait(name) == 0, run.log(name)
    version, model = read_model(folder / "run")[:2]
    assert version == ROUNDS
    expected = expected_model(bundle_path, shards[:3])
    tolerance = TOLERANCE if encoding == "float32" else 0.05 * float(np.abs(expected).max())
    np.testing.assert_allclose(model, expected, rtol=0, atol=tolerance)
    assert "update accepted" in run.log("kotlin")
