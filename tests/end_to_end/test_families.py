"""Three architectures in one run, with real processes: each member's model is the one that a run of
its own makes with the same devices, bit for bit, whoever dies."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_device import open_runtime
from fleetlearn_device.training.data import as_data, load_npz
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_protocol import open_bundle
from peers import plan_text
from processes import ROOT, Processes, free_port, processes, service_file, wait_for

CRASH = Path(__file__).with_name("crash_coordinator.py")
DEVICES = {"cnn": ("a", "b"), "mlp": ("c", "d"), "linear": ("e", "f")}
ROUNDS = 3
SETTINGS: dict[str, Any] = {
    "round__gather": 30.0,
    "round__grace": 30.0,
    "round__deadline": 120.0,
    "stop__rounds": ROUNDS,
    "server__optimizer": "adam",
    "server__lr": 0.05,
    "local__lr": 0.1,
    "local__epochs": 2,
}
CRASHES = {
    "tasks are recorded but not sent": 2,
    "an update is recorded but not acknowledged": 8,
    "an update is acknowledged but not summed": 9,
    "a sum is written but not recorded": 2,
    "the new model is in its place but not recorded": 3,
    "a round is committed but its batch is open": 2,
    "a round is recorded and nobody told": 2,
}
"""Where the coordinator dies, and which time it comes by."""


def data_of(shards: list[Path]) -> dict[str, Path]:
    names = [name for pair in DEVICES.values() for name in pair]
    return dict(zip(names, shards, strict=False))


@pytest.fixture(scope="module")
def alone(
    family_bundles: Mapping[str, Path],
    shards: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    warm: Path,
) -> dict[str, bytes]:
    """Name of each member -> the model of a run of its own."""
    models = {}
    for member, names in DEVICES.items():
        folder = tmp_path_factory.mktemp(member)
        plan, url = folder / "plan.toml", f"ws://127.0.0.1:{(port := free_port())}"
        counts = {"round__goal": 2, "round__minimum": 2}
        plan.write_text(plan_text(family_bundles[member], folder / "run", **SETTINGS, **counts))
        service_file(plan, port)
        with processes(folder, warm) as run:
            run.coordinator(plan)
            for name in names:
                run.device(name, url, data_of(shards)[name])
            assert run.wait("coordinator") == 0, run.log("coordinator")
        models[member] = read_model(folder / "run")[1].tobytes()
    return models


def family_text(bundles: Mapping[str, Path], data_dir: Path, **settings: Any) -> str:
    counts = {"round__goal": 6, "round__minimum": 6}
    text = plan_text(bundles["cnn"], data_dir, **(SETTINGS | counts | settings))
    return "\n".join(
        [text]
        + [
            f'[family.{name}]\nbundle = "{path}"\ntags = {[name] if name != "linear" else []}'
            for name, path in bundles.items()
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASHES)
def test_members_are_what_runs_of_their_own_make(
    point: str,
    run: Processes,
    family_bundles: Mapping[str, Path],
    shards: list[Path],
    alone: Mapping[str, bytes],
) -> None:
    """A device is killed in its first task and begun again; the coordinator kills itself."""
    plan, url = run.folder / "plan.toml", f"ws://127.0.0.1:{(port := free_port())}"
    plan.write_text(family_text(family_bundles, run.folder / "run"))
    service_file(plan, port)
    coordinator = run.coordinator(plan, CRASH, point, str(CRASHES[point]), plan)
    of_device = {name: member for member, names in DEVICES.items() for name in names}
    for name, member in of_device.items():
        run.device(name, url, data_of(shards)[name], options=["--tag", member])
    wait_for(lambda: "epochs" in run.log("c"), "a device to have its task")
    run.kill("c")
    run.device("c", url, data_of(shards)["c"], options=["--tag", "mlp"])
    assert coordinator.wait(60) == -9, f"it was to die at {point}: {run.log('coordinator')}"
    assert run.coordinator(plan).wait(60) == 0, run.log("coordinator")
    for name in of_device:
        assert run.wait(name) == 0, run.log(name)
    version, model = read_model(run.folder / "run")
    rounds = read_status(run.folder / "run").rounds
    assert (version, [row.outcome for row in rounds]) == (ROUNDS, ["committed"] * ROUNDS)
    for row in rounds:
        reports = {name: own["reports"] for name, own in row.summary["members"].items()}
        assert reports == dict.fromkeys(DEVICES, 2)
    begin = 0
    for member, path in family_bundles.items():
        size = open_bundle(path).manifest.size
        assert model[begin : begin + size].tobytes() == alone[member], member
        begin += size
    assert begin == model.size


@pytest.mark.slow
def test_each_member_is_measured_on_held_out_data(
    run: Processes, family_bundles: Mapping[str, Path], shards: list[Path]
) -> None:
    """The version's metrics are the means over the members, and end the run."""
    plan, url = run.folder / "plan.toml", f"ws://127.0.0.1:{(port := free_port())}"
    data_dir, held_out = run.folder / "run", shards[7]
    settings = {
        "round__goal": 3,
        "round__minimum": 3,
        "evaluation__data": str(held_out),
        "stop__rounds": 100,
        "stop__metric": "accuracy",
        "stop__target": 0.6,
        "stop__bounds": [0, 1],
        "stop__measured_by": "held-out",
    }
    plan.write_text(family_text(family_bundles, data_dir, **settings))
    service_file(plan, port)
    run.coordinator(plan)
    for shard, member in zip(shards, DEVICES, strict=False):
        run.device(member, url, shard, options=["--tag", member])
    assert run.wait("coordinator") == 0, run.log("coordinator")
    status = read_status(data_dir)
    assert status.met_by is not None
    result = status.held_out[status.met_by]
    model, begin = read_model(data_dir, status.met_by)[1], 0
    expected = {}
    for member, path in family_bundles.items():
        runtime = open_runtime(str(path), kind="onnx")
        size = open_bundle(path).manifest.size
        runtime.load(model[begin : begin + size])
        found = evaluate_data(runtime, as_data(load_npz(held_out)))
        expected[member] = found.metric_sums["accuracy"] / found.examples
        begin += size
    measured = {name: own["accuracy"] for name, own in result["members"].items()}
    assert measured == pytest.approx(expected)
    assert result["metrics"]["accuracy"] == pytest.approx(sum(expected.values()) / 3)
    assert result["metrics"]["accuracy"] >= 0.6
    assert "; linear: loss" in run.log("coordinator")


@pytest.mark.slow
def test_the_example_shows_what_each_member_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.family", "--rounds", "4", "--output", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "phone-1 was killed in its first task" in done.stdout
    found = re.findall(r"^(\w+): accuracy ([\d.]+) on the held-out digits$", done.stdout, re.M)
    assert [member for member, _ in found] == ["cnn", "mlp", "linear"]
    assert all(float(accuracy) > 0.6 for _, accuracy in found)
