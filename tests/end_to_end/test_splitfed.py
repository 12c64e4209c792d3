"""Split runs as processes: three devices and a coordinator, each of them killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleetlearn_coordinator.storage.vertical_folder import newest_model
from fleetlearn_device.runtimes.split import Bottom, Top
from fleetlearn_protocol import open_bundle, write_inference_model
from processes import PATIENCE, wait_for
from torch.nn import functional

from examples import splitfed

pytestmark = pytest.mark.slow
MODES = pytest.mark.parametrize("turns", [False, True], ids=["splitfed", "turns"])


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the processes of a test, also where it fails."""
    begin, started = splitfed.Processes._start, list[subprocess.Popen[bytes]]()

    def start(self: splitfed.Processes, *arguments: Any) -> subprocess.Popen[bytes]:
        started.append(begin(self, *arguments))
        return started[-1]

    monkeypatch.setattr(splitfed.Processes, "_start", start)
    yield
    for process in started:
        process.kill()
        process.wait()


def trained_by_the_parts(parts: Path, rounds: int, lr: float = splitfed.LR) -> np.ndarray[Any, Any]:
    """Train on one device's rows after the other, in one place, by the same graphs. Returns all
    weights: the bottom's, then the top's."""
    bottom = Bottom(open_bundle(parts / "device.bundle"))
    top = Top(open_bundle(parts / "top.bundle"))
    for number in range(rounds):
        for place, data in enumerate(splitfed.tables()[0].values(), 1):
            steps = len(data.y) // splitfed.BATCH
            for x, y in splitfed.batches(data, place, number * steps, steps):
                made = bottom.activations([x.numpy()])
                found = top.step([made, y.numpy()], lr=lr)
                bottom.step([x.numpy()], found.gradients[0], lr=lr)
    return np.concatenate([bottom.local, top.local])


@MODES
def test_deaths_on_all_sides_give_the_same_bits_and_what_one_place_trains(
    turns: bool, tmp_path: Path
) -> None:
    rounds = 4 if turns else 8
    calm = splitfed.run(tmp_path / "calm", rounds, turns=turns, victims=())
    assert calm["difference"] <= 2e-6
    assert calm["accuracy"] == calm["accuracy_in_one_place"]
    victims = ("cellar", "coordinator", "attic")
    found = splitfed.run(tmp_path / "killed", rounds, turns=turns, victims=victims)
    assert found["deaths"] == 3
    assert (tmp_path / "killed" / "model.onnx").read_bytes() == (
        tmp_path / "calm" / "model.onnx"
    ).read_bytes()
    parts = tmp_path / "calm" / "digits.split"
    top = open_bundle(parts / "top.bundle")
    kept = newest_model(tmp_path / "calm" / "run" / "data", top.sha256)
    if turns:
        assert np.array_equal(kept.local, trained_by_the_parts(parts, rounds))
    # The one file computes what the parts compute one after the other.
    bottom = open_bundle(parts / "device.bundle")
    size = bottom.manifest.local_size
    below, above = tmp_path / "bottom.onnx", tmp_path / "top.onnx"
    below.write_bytes(write_inference_model(bottom, kept.local[:size]))
    above.write_bytes(write_inference_model(top, kept.local[size:]))
    x = splitfed.tables()[1].x
    made = splitfed.outputs_of(below, x=x)
    expected = splitfed.outputs_of(above, activations_device=made)
    assert np.array_equal(splitfed.outputs_of(tmp_path / "calm" / "model.onnx", x=x), expected)


def test_one_step_in_a_round_is_the_step_of_one_place_on_the_joined_batch(tmp_path: Path) -> None:
    """Equal batches of three devices, averaged: PyTorch's step on all 96 rows."""
    splitfed.run(tmp_path, 30, round_steps=1, victims=())
    devices, test = splitfed.tables()
    whole = splitfed.model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=splitfed.LR)
    for step in range(30):
        rows = [
            next(splitfed.batches(data, place, step, 1))
            for place, data in enumerate(devices.values(), 1)
        ]
        x, y = (torch.cat(arrays) for arrays in zip(*rows, strict=True))
        assert len(x) == 96
        optimizer.zero_grad()
        functional.cross_entropy(whole(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        expected = whole(torch.from_numpy(test.x)).numpy()
    found = splitfed.outputs_of(tmp_path / "model.onnx", x=test.x)
    assert np.abs(found - expected).max() <= 1e-6


def prepared(folder: Path, *, turns: bool = False, **lines: str) -> splitfed.Processes:
    return splitfed.Processes(folder, splitfed.write(folder), turns=turns, lines=lines)


def said(folder: Path) -> str:
    return (folder / "processes.log").read_text("utf-8")


@MODES
def test_the_others_go_on_without_a_device_that_does_not_come_back(
    turns: bool, tmp_path: Path
) -> None:
    lines = {"rounds = 50": "rounds = 3", "wait = 60.0": "wait = 1.0"}
    processes = prepared(tmp_path, turns=turns, **lines)
    coordinator = processes.coordinator()
    running = [processes.device(name) for name in ("attic", "cellar")]
    assert [one.wait(PATIENCE) for one in running] == [0, 0], said(tmp_path)
    # It waits a while for the third, to tell it that the training is over.
    assert coordinator.wait(PATIENCE) == 0
    status = processes.status()
    assert (status["phase"], status["kind"]) == ("finished", "turns" if turns else "splitfed")
    assert status["step"] == (9 if turns else 3)
    if turns:
        assert "barn is gone: its turn goes to the next device" in said(tmp_path)
    assert processes.exported().stat().st_size > 0


@pytest.mark.skipif(sys.platform != "linux", reason="finds the top's process in /proc")
def test_the_tops_process_dies_and_devices_begin_their_part_again(tmp_path: Path) -> None:
    processes = prepared(tmp_path, **{"rounds = 50": "rounds = 6"})
    coordinator = processes.coordinator()
    running = [coordinator, *(processes.device(name) for name in splitfed.DEVICES)]
    wait_for(lambda: processes.status().get("step", 0) >= 2, "two rounds")
    tasks = Path(f"/proc/{coordinator.pid}/task")
    found = [task.read_text("ascii").split() for task in tasks.glob("*/children")]
    (worker,) = [int(child) for row in found for child in row]
    os.kill(worker, signal.SIGKILL)
    assert [one.wait(PATIENCE) for one in running] == [0, 0, 0, 0], said(tmp_path)
    assert "the top's process died" in said(tmp_path)
    whole = splitfed.trained_in_one_place(splitfed.tables()[0], 6, None, turns=False)
    test = splitfed.tables()[1]
    with torch.no_grad():
        expected = whole(torch.from_numpy(test.x)).numpy()
    outputs = splitfed.outputs_of(processes.exported(), x=test.x)
    assert np.abs(outputs - expected).max() <= 2e-6


def test_in_turns_the_optimizers_state_goes_from_one_device_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's moments, of bottom and top; the coordinator is killed between two turns."""
    monkeypatch.setattr(splitfed, "export", partial(splitfed.export, optimizer="adam"))
    processes = prepared(
        tmp_path, turns=True, **{"rounds = 50": "rounds = 2", "lr = 0.1": "lr = 0.01"}
    )
    coordinator = processes.coordinator()
    devices = [processes.device(name) for name in splitfed.DEVICES]
    wait_for(lambda: processes.status().get("step", 0) >= 2, "two turns")
    coordinator.kill()
    coordinator.wait()
    running = [processes.coordinator(), *devices]
    assert [one.wait(PATIENCE) for one in running] == [0, 0, 0, 0], said(tmp_path)
    top = open_bundle(processes.parts / "top.bundle")
    kept = newest_model(tmp_path / "run" / "data", top.sha256)
    assert np.array_equal(kept.local, trained_by_the_parts(processes.parts, 2, lr=0.01))


def test_a_rate_that_diverges_ends_the_run_and_says_so(tmp_path: Path) -> None:
    lines = {"lr = 0.1": "lr = 1e30", "wait = 60.0": "wait = 1.0"}
    processes = prepared(tmp_path, **lines)
    coordinator = processes.coordinator()
    running = [processes.device(name) for name in splitfed.DEVICES]
    assert coordinator.wait(PATIENCE) == 1, said(tmp_path)
    assert {one.wait(PATIENCE) for one in running} <= {1, 4}
    assert "cannot go on" in processes.status()["why"]
