"""Held-out data in a process beside the coordinator: what it measures, and what SIGKILL of either
process costs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.data import as_data, load_npz
from fleetlearn_device.training.train import evaluate_data
from peers import plan_text
from processes import Processes, free_port, processes, service_file, status_of, wait_for


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Processes]:
    """Processes that import for themselves: what a coordinator has loaded is looked at."""
    with processes(tmp_path) as running:
        yield running


def expected(
    bundle: Path, vector: np.ndarray[tuple[int, ...], np.dtype[np.float32]], data: Path
) -> dict[str, float]:
    """The means of a model, in this process."""
    runtime = open_runtime(str(bundle), kind="onnx")
    runtime.load(vector)
    found = evaluate_data(runtime, as_data(load_npz(data)))
    sums = {"loss": found.loss_sum, **found.metric_sums}
    return {name: value / found.examples for name, value in sums.items()}


def test_each_model_is_measured_once_whoever_dies(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    port, data_dir, plan, data = (
        free_port(),
        run.folder / "run",
        run.folder / "plan.toml",
        shards[7],
    )
    plan.write_text(
        plan_text(
            bundle_path,
            data_dir,
            local__lr=0.1,
            round__goal=2,
            round__minimum=2,
            round__gather=30.0,
            round__grace=30.0,
            round__deadline=600.0,
            stop__rounds=3,
            evaluation__data=str(data),
        )
    )
    service_file(plan, port)
    url = f"ws://127.0.0.1:{port}"
    coordinator = run.coordinator(plan)
    run.device("a", url, shards[0])

    def child() -> list[psutil.Process]:
        return psutil.Process(coordinator.pid).children() if coordinator.poll() is None else []

    run.device("b", url, shards[1])
    wait_for(lambda: bool(child()), "the process beside the coordinator")
    child()[0].kill()  # while it starts, or while it measures
    wait_for(lambda: bool((found := status_of(data_dir)) and found.version), "a model")
    maps = Path(f"/proc/{coordinator.pid}/maps")
    if coordinator.poll() is None:
        assert "onnxruntime" not in maps.read_text()
        run.kill("coordinator")
    coordinator = run.coordinator(plan)
    assert run.wait("coordinator") == 0, run.log("coordinator")
    for name in "ab":
        assert run.wait(name) == 0, run.log(name)
    held_out = read_status(data_dir).held_out
    assert sorted(held_out) == [1, 2, 3]
    for version, result in held_out.items():
        assert result["metrics"] == pytest.approx(
            expected(bundle_path, read_model(data_dir, version)[1], data)
        )
    assert not list((data_dir / "held_out").glob("*.draft"))

    before = {path.name: path.stat().st_mtime_ns for path in (data_dir / "held_out").iterdir()}
    command = [
        sys.executable,
        "-m",
        "fleetlearn_coordinator",
        "evaluate-held-out",
        str(plan),
        "--data",
        str(data),
    ]
    by_hand = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "version 0:" in by_hand.stdout, "the initial model is kept, too"
    after = {path.name: path.stat().st_mtime_ns for path in (data_dir / "held_out").iterdir()}
    assert {name: after[name] for name in before} == before, "each version has one result"


@pytest.mark.slow
def test_held_out_data_stop_the_run_and_a_higher_target_resumes_it(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    data_dir, plan, port = run.folder / "run", run.folder / "plan.toml", free_port()

    def train(target: float) -> None:
        plan.write_text(
            plan_text(
                bundle_path,
                data_dir,
                local__lr=0.1,
                round__goal=1,
                stop__rounds=100_000,
                stop__metric="accuracy",
                stop__target=target,
                stop__measured_by="held-out",
                evaluation__data=str(shards[1]),
            )
        )
        service_file(plan, port)
        run.coordinator(plan)
        run.device("a", f"ws://127.0.0.1:{port}", shards[0])
        assert run.wait("coordinator") == 0, run.log("coordinator")
        assert run.wait("a") == 0, run.log("a")

    train(0.05)
    found = read_status(data_dir)
    assert found.finished_by is not None
    assert (found.finished_by["rule"], found.finished_by["metric"]) == ("metric", "accuracy")
    assert found.finished_by["value"] >= 0.05
    version, best = (
        found.version,
        max(row["metrics"]["accuracy"] for row in found.held_out.values()),
    )
    train(best + 0.01)
    again = read_status(data_dir)
    assert again.version > version
    assert again.finished_by is not None
    assert again.finished_by["value"] >= best + 0.01


def test_what_is_missing_is_said(run: Processes, bundle_path: Path) -> None:
    plan = run.folder / "plan.toml"
    plan.write_text(
        plan_text(bundle_path, run.folder / "run", local__lr=0.1, evaluation__data="nothing.npz")
    )
    process = run.coordinator(plan)
    assert process.wait(60) == 1
    assert "nothing.npz is not a file" in " ".join(run.log("coordinator").split())
    hidden = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from fleetlearn_coordinator.service import held_out\n"
        "held_out.check_installed()"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", hidden], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "fleetlearn[evaluation]" in done.stderr
    assert time.monotonic() - begin < 60
