"""A real coordinator, and devices with limits, by their flags."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_status
from peers import plan_text
from processes import Processes, free_port, service_file

pytestmark = pytest.mark.slow


def begin(run: Processes, bundle: Path, **settings: object) -> tuple[Path, str]:
    """Start a coordinator of one round. Returns its data directory and address."""
    port, data_dir = free_port(), run.folder / "run"
    values: dict[str, object] = {"local__lr": 0.1, "local__mu": 0.01, "stop__rounds": 1}
    plan = run.folder / "plan.toml"
    plan.write_text(plan_text(bundle, data_dir, "fedprox", **(values | settings)))
    service_file(plan, port)
    run.coordinator(plan)
    return data_dir, f"ws://127.0.0.1:{port}"


def start(run: Processes, name: str, url: str, shard: Path, *flags: str) -> None:
    state = run.folder / f"{name}.state"
    run.start(
        name, sys.executable, "-m", "fleetlearn_device", "run", "--coordinator", url, "--data",
        shard, "--state", state, "--name", name, "--until-finished", *flags,
    )  # fmt: skip


def test_a_device_with_all_limits_trains(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    data_dir, url = begin(run, bundle_path, round__goal=1, round__minimum=1, local__epochs=3)
    limits = ["--nice", "19", "--io", "idle", "--max-cpu", "50", "--max-memory", "4096"]
    limits += ["--max-upload", "64", "--max-download", "256", "--max-cache", "50"]
    start(run, "a", url, shards[0], *limits)
    assert run.wait("coordinator") == 0
    assert run.wait("a") == 0
    (round_,) = read_status(data_dir).rounds
    assert round_.summary["reports"] == 1
    assert "stays as it is" not in run.log("a"), "the kernel took both priorities"
    assert "50 % of a processor" in run.log("a")
    status = json.loads((run.folder / "a.state" / "status.json").read_text())
    assert status["bytes_written"] > status["bytes_sent"] > 0


def test_a_model_that_is_too_large_is_refused_by_name_and_the_process_lives(
    run: Processes, large_bundle_path: Path, shards: list[Path]
) -> None:
    """9 MB of parameters, of which a training holds several copies. The other device trains it."""
    data_dir, url = begin(
        run, large_bundle_path, round__goal=2, round__minimum=1, round__gather=60.0,
        local__epochs=1,
    )  # fmt: skip
    start(run, "small", url, shards[0], "--max-memory", "75")
    start(run, "large", url, shards[1])
    assert run.wait("coordinator") == 0
    assert run.wait("small") == 0, "it was not killed, and ended with the run"
    assert run.wait("large") == 0
    (round_,) = read_status(data_dir).rounds
    assert round_.summary["reports"] == 1
    assert round_.summary["dropped"] == {"failed: out-of-memory": 1}
    assert "this device allows 75 MiB (limits.memory)" in run.log("small")
    assert "fetching" not in run.log("small"), "it was refused before anything was fetched"
