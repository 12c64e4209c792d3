"""Vertical runs as processes: two parties and a coordinator, each of them killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleetlearn_coordinator.storage.vertical_folder import newest_model
from fleetlearn_device.vertical.party_folder import PartyFolder
from fleetlearn_export import export_bundle
from fleetlearn_protocol.vector import flatten, views
from fleetlearn_protocol.vertical.alignment import hash_rows
from fleetlearn_protocol.vertical.schedule import rows_of_step
from processes import PATIENCE, wait_for
from torch import nn
from torch.nn import functional

from examples import vertical

pytestmark = pytest.mark.slow
PARTS = ("hospital", "laboratory", "top", "model")


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the processes of a test, also where it fails."""
    begin, started = vertical.Processes._start, list[subprocess.Popen[bytes]]()

    def start(self: vertical.Processes, *arguments: Any) -> subprocess.Popen[bytes]:
        started.append(begin(self, *arguments))
        return started[-1]

    monkeypatch.setattr(vertical.Processes, "_start", start)
    yield
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A run in which nobody dies."""
    folder = tmp_path_factory.mktemp("calm")
    return folder, vertical.run(folder, 120, victims=())


def test_two_parties_train_what_one_place_would(calm: tuple[Path, dict[str, float]]) -> None:
    _, found = calm
    assert found["difference"] <= 1e-6
    assert found["one_file"] == 0
    assert found["accuracy"] == found["accuracy_in_one_place"] > 0.9


def test_deaths_on_all_sides_give_the_same_bits(
    calm: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    found = vertical.run(tmp_path, 120, victims=("laboratory", "coordinator", "hospital"))
    assert found["deaths"] == 3
    for part in PARTS:
        assert (tmp_path / f"{part}.onnx").read_bytes() == (
            calm[0] / f"{part}.onnx"
        ).read_bytes(), part


def prepared(folder: Path, calm: Path, **options: str) -> vertical.Processes:
    """Return a run with the calm run's bundles and tables, and these lines of the plan."""
    for name in ("parts", "hospital.npz", "laboratory.npz"):
        (folder / name).symlink_to(calm / name)
    processes = vertical.Processes(folder, 6)
    plan = folder / "coordinator" / "vertical.toml"
    text = plan.read_text("utf-8")
    for before, after in options.items():
        assert before in text
        text = text.replace(before, after)
    plan.write_text(text, "utf-8")
    return processes


def said(folder: Path) -> str:
    return (folder / "processes.log").read_text("utf-8")


def finished(process: subprocess.Popen[bytes]) -> int:
    return process.wait(PATIENCE)


def test_parties_with_other_keys_are_told_so_and_end(
    calm: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    processes = prepared(tmp_path, calm[0])
    coordinator, hospital = processes.coordinator(), processes.party("hospital")
    # The hospital has read its key when it waits for the laboratory.
    wait_for(lambda: "waiting: for laboratory" in said(tmp_path), "the hospital to wait")
    (tmp_path / "rows.key").write_text("f" * 64, "utf-8")
    laboratory = processes.party("laboratory")
    assert [finished(one) for one in (hospital, laboratory, coordinator)] == [4, 4, 1]
    assert "no row is common to all (hospital 436, laboratory 426 rows)" in said(tmp_path)
    status = processes.status()
    assert (status["phase"], status["served"]) == ("failed", False)


def test_a_token_that_is_no_partys_is_refused(
    calm: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    processes = prepared(tmp_path, calm[0])
    coordinator = processes.coordinator()
    wait_for(lambda: "listens on" in said(tmp_path), "the coordinator")
    (tmp_path / "coordinator" / "hospital.token").write_text("x" * 43, "utf-8")
    try:
        assert finished(processes.party("hospital")) == 4
        assert "the token is no party's of this run" in said(tmp_path)
        # A token of another party is no better.
        laboratory = (tmp_path / "coordinator" / "laboratory.token").read_text("utf-8")
        (tmp_path / "coordinator" / "hospital.token").write_text(laboratory, "utf-8")
        assert finished(processes.party("hospital")) == 4
        assert "this run has nobody called hospital with that token" in said(tmp_path)
    finally:
        coordinator.terminate()
        assert finished(coordinator) == 0


def test_the_coordinator_can_have_the_labels(
    calm: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    processes = prepared(
        tmp_path, calm[0], **{'labels = "hospital"': 'labels_file = "../labels.npz"'}
    )
    command: list[Any] = ["fleetlearn_device", "hash-rows", tmp_path / "hospital.npz"]
    command += ["--rows-key", tmp_path / "rows.key", "--columns", "y"]
    command += ["--output", tmp_path / "labels.npz"]
    processes._run(*command)
    running = [processes.coordinator(), processes.party("hospital"), processes.party("laboratory")]
    assert [finished(one) for one in running] == [0, 0, 0], said(tmp_path)
    status = processes.status()
    assert (status["phase"], status["step"], status["rows"]) == ("finished", 6, 406)
    # Of the coordinator with its metrics, and of both parties.
    assert said(tmp_path).count("step 6 of 6: loss ") == 3
    assert "accuracy" in said(tmp_path).partition("step 6 of 6: loss ")[2]
    # The hospital's own labels are the same: so is what comes of them.
    other = tmp_path / "other"
    other.mkdir()
    again = prepared(other, calm[0])
    running = [again.coordinator(), again.party("hospital"), again.party("laboratory")]
    assert [finished(one) for one in running] == [0, 0, 0]
    for name, path in processes.exported().items():
        assert path.read_bytes() == again.exported()[name].read_bytes()
    assert status["loss"] == again.status()["loss"]


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task")
    found = [task.read_text("ascii").split() for task in tasks.glob("*/children")]
    return [int(child) for row in found for child in row]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the top's process in /proc")
def test_one_party_trains_a_model_that_is_split_at_a_layer(tmp_path: Path) -> None:
    """A device keeps the first layers and the rows. The top's process is killed on the way."""
    data = vertical.patients().hospital
    y = vertical.patients().y
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(15, 6), nn.Tanh(), nn.Linear(6, 2))
    example = (data.x[:8], y[:8])
    exported = export_bundle(
        model, functional.cross_entropy, example, tmp_path / "m.bundle", split="1"
    )
    (tmp_path / "parts").symlink_to(tmp_path / "m.split")
    np.savez(tmp_path / "device.npz", id=data.ids, x=data.x, y=y)
    processes = vertical.Processes(tmp_path, 80, labels="device")
    coordinator, device = processes.coordinator(), processes.party("device")
    wait_for(lambda: processes.step() >= 25, "a checkpoint")
    (worker,) = children_of(coordinator)
    os.kill(worker, signal.SIGKILL)
    assert [finished(one) for one in (device, coordinator)] == [0, 0], said(tmp_path)
    assert "the top's process died; everybody goes back" in said(tmp_path)

    order = np.argsort(hash_rows(data.ids.tolist(), vertical.KEY.encode()))
    optimizer = torch.optim.SGD(model.parameters(), lr=vertical.LR)
    for step in range(80):
        rows = order[rows_of_step(step, len(order), vertical.BATCH, 0)]
        loss = functional.cross_entropy(
            model(torch.from_numpy(data.x[rows])), torch.from_numpy(y[rows])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # The parts' parameters have the names of the whole model: its bundle takes them.
    trained = {}
    parts = exported.parts
    assert parts is not None
    folder = PartyFolder(tmp_path / "device")
    bottom = folder.newest(parts.bottoms["device"].sha256)
    top = newest_model(tmp_path / "coordinator" / "data", parts.top.sha256)
    assert bottom is not None
    for part, manifest in (
        (bottom, parts.bottoms["device"].manifest),
        (top, parts.top.manifest),
    ):
        trained |= views(part.local, manifest.parameters)
    whole = flatten(trained, exported.bundle.manifest.parameters)
    for name, value in views(whole, exported.bundle.manifest.parameters).items():
        expected = model.state_dict()[name].numpy()
        assert np.abs(value - expected).max() <= 1e-6 * max(1.0, np.abs(expected).max()), name
