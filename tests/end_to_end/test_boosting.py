"""Boosting over real sockets between real processes: the last state is that of all rows in one
place, bit for bit, whoever is killed meanwhile, and devices predict with it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from boosting_run import (
    COMPONENTS,
    TABLES,
    TREES,
    Boosting,
    as_arrays,
    boosting_bundle,
    pooled_state,
    write_tables,
)
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_device.computations.boosted_trees import bins_of, scores
from fleetlearn_protocol.computations.portable_math import sigmoid
from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.computations.trees_layout import bin_table, trees_state
from processes import ROOT, Processes, free_port, service_file, wait_for

pytestmark = pytest.mark.slow

CRASH = Path(__file__).with_name("crash_coordinator.py")
CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
COORDINATOR_DIES = {
    "a chunk is spooled": 20,
    "an update is recorded but not acknowledged": 7,
    "a small update is summed and counted": 6,
    "a round is closed and its commit not begun": 5,
    "the new model is in its place but not recorded": 4,
    "a round is recorded and nobody told": 6,
}
"""Point -> which time it kills; a run has a dozen rounds of three devices."""
DEVICE_DIES = ["the work is done but not on disk", "the update is acknowledged but not forgotten"]
BOTH: list[Boosting] = [TREES, COMPONENTS]


def begin(run: Processes, settings: Boosting) -> tuple[Path, str]:
    """Write a plan and its bundle. Returns the plan and the coordinator's address."""
    bundle = boosting_bundle(run.folder, settings)
    plan = run.folder / "plan.toml"
    plan.write_text(
        f'recipe = "{kind_of(settings)}"\nname = "illness"\nbundle = "{bundle.path}"\n'
        'data_dir = "run"\n[models]\ngive = true\n'
        "[round]\ngoal = 3\nminimum = 3\nover_selection = 1.0\ngrace = 60.0\ndeadline = 300.0\n"
    )
    port = free_port()
    service_file(plan, port)
    return plan, f"ws://127.0.0.1:{port}"


def check(run: Processes, settings: Boosting) -> None:
    """The run is over, and its state is that of all rows in one place."""
    assert read_model(run.folder / "run")[1].tobytes() == pooled_state(settings).tobytes()
    status = read_status(run.folder / "run")
    assert status.finished is not None
    assert status.finished.startswith("the computation is done")
    assert [row.summary["reports"] for row in status.rounds] == [3] * status.version


def versions(run: Processes) -> int:
    """Return how many rounds are done; -1 where the run does not know that yet."""
    try:
        return read_status(run.folder / "run").version
    except StoreError:
        return -1


def all_end(run: Processes) -> None:
    for name in ("coordinator", *TABLES):
        assert run.wait(name) == 0, run.log(name)


def test_trees_are_the_pooled_ones_and_predict(run: Processes) -> None:
    plan, url = begin(run, TREES)
    run.coordinator(plan, "-m", "fleetlearn_coordinator", "serve", plan, "--stay")
    data = write_tables(run.folder)
    for name in TABLES:
        run.device(name, url, data[name], options=["--keep-model"])  # type: ignore[arg-type]
    for name in TABLES:
        assert run.wait(name) == 0, run.log(name)
    check(run, TREES)
    # What the coordinator exports is what ONNX Runtime and our own function predict by.
    run.command("export-model", plan, "--output", run.folder / "trees.onnx")
    values = trees_state(TREES).unpack(pooled_state(TREES))
    x = as_arrays(TABLES["c"])["x"]
    bins = bins_of(x, values["edges"], bin_table(TREES))
    chance = sigmoid(scores(values, bins, TREES, TREES.rounds)[:, 0])
    session = onnxruntime.InferenceSession(
        run.folder / "trees.onnx", providers=["CPUExecutionProvider"]
    )
    found = session.run(["probabilities"], {"x": x})[0][:, 1]
    assert found == pytest.approx(chance, abs=1e-6)
    shown = run.command("result", plan).stdout
    assert "age" in shown
    # A device has the trees of its last task, and all of them when it fetched them.
    state = run.folder / "c.state"
    device = [sys.executable, "-m", "fleetlearn_device"]
    predict = [*device, "predict", "--state", str(state), data["c"]]
    fetch = [*device, "fetch-model", "--coordinator", url, "--state", str(state)]
    subprocess.run(predict, check=True, capture_output=True, timeout=60)  # as training left it
    subprocess.run(fetch, check=True, capture_output=True, timeout=60)
    lines = subprocess.run(predict, check=True, capture_output=True, timeout=60).stdout.splitlines()
    served = np.array([json.loads(line)["probabilities"][1] for line in lines])
    assert served == pytest.approx(chance, abs=1e-6)


@pytest.mark.parametrize("point", COORDINATOR_DIES)
def test_the_coordinator_killed_changes_nothing(run: Processes, point: str) -> None:
    settings = BOTH[list(COORDINATOR_DIES).index(point) % 2]
    plan, url = begin(run, settings)
    process = run.coordinator(plan, CRASH, point, str(COORDINATOR_DIES[point]), plan)
    for name, data in write_tables(run.folder).items():
        run.device(name, url, data)  # type: ignore[arg-type]
    assert process.wait(60) == -9, f"it was to die where {point}: {run.log('coordinator')}"
    run.coordinator(plan)
    all_end(run)
    check(run, settings)


@pytest.mark.parametrize("point", DEVICE_DIES)
def test_a_device_killed_changes_nothing(run: Processes, point: str) -> None:
    settings = BOTH[DEVICE_DIES.index(point)]
    plan, url = begin(run, settings)
    run.coordinator(plan)
    data = write_tables(run.folder)
    for name in "ab":
        run.device(name, url, data[name])  # type: ignore[arg-type]
    crashing = run.device("c", url, data["c"], CRASH_DEVICE, point, "4")  # type: ignore[arg-type]
    assert crashing.wait(60) == -9, run.log("c")
    run.device("c", url, data["c"])  # type: ignore[arg-type]
    all_end(run)
    check(run, settings)


@pytest.mark.parametrize("settings", BOTH, ids=["trees", "components"])
def test_everybody_killed_at_random_changes_nothing(run: Processes, settings: Boosting) -> None:
    drawn = random.Random(7)
    plan, url = begin(run, settings)
    data = write_tables(run.folder)

    def start(name: str) -> None:
        if name == "coordinator":
            run.coordinator(plan)
        else:
            run.device(name, url, data[name])  # type: ignore[arg-type]

    for name in ("coordinator", *TABLES):
        start(name)
    for version in range(8):
        wait_for(lambda least=version: versions(run) >= least, f"version {version}")
        name = drawn.choice(["coordinator", *TABLES])
        run.kill(name)
        start(name)
    all_end(run)
    check(run, settings)


def test_the_example_shows_it(tmp_path: Path) -> None:
    script = ROOT / "examples" / "federated_boosting.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=600, check=True
    )
    assert "the trees are the same, bit for bit" in done.stdout
    assert "worst" in done.stdout
