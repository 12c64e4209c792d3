"""The file of the device's own model: infer.onnx of the bundle, fetched, and with what is the
device's own in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from bundle_cache import cached_export
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.trainer import FinishedUpdate, Trainer
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.manifest import INFER
from fleetlearn_protocol.messages import MODEL, UPDATE, Task
from fleetlearn_protocol.vector import Vector, digest
from torch import nn
from torch.nn import functional

X, Y = np.random.default_rng(1).normal(size=(12, 6)).astype(np.float32), np.arange(12) % 3


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "state")
    yield opened
    opened.close()


def exported(folder: Path, **options: Any) -> Bundle:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    example = torch.from_numpy(X[:4]), torch.from_numpy(Y[:4])
    cached_export(model, functional.cross_entropy, example, folder / "own.bundle", **options)
    return open_bundle(folder / "own.bundle")


def trained(state: StateDirectory, bundle: Bundle, own: Path, algorithm: str) -> FinishedUpdate:
    """Fetch what the task needs, infer.onnx too, and train it."""
    model = bundle.parameters()[: bundle.manifest.size]
    hyper = {"lr": 0.5, "mu": 0.1} if bundle.manifest.step.proximal else {"lr": 0.5}
    given = Task(
        "t1",
        1,
        bundle.sha256,
        (FLOAT32.reference(MODEL, model),),
        {UPDATE: "float32"},
        hyper,
        2,
        4,
        7,
        100.0,
        algorithm=algorithm,
        personal_epochs=2,
    )
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents |= {bundle.sha256: bundle.read("manifest.json"), digest(model): model.tobytes()}
    fetched = []
    while lacking := state.contents.lacking(given, "onnx", infer=True):
        for wanted in lacking:
            fetched.append(wanted.name)
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)
    assert INFER in fetched
    return Trainer(state, as_data((X, Y)), "onnx", 1, own_model=own).train(given, 100.0)


def outputs(path: Path) -> Vector:
    (found,) = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
        None, {"x": X}
    )
    return np.asarray(found)


def by_hand(vector: Vector) -> Vector:
    a, b, c, d = np.split(vector, [24, 28, 40])
    hidden = np.tanh(X @ a.reshape(4, 6).T + b)
    made: Vector = hidden @ c.reshape(3, 4).T + d
    return made


@pytest.mark.parametrize("algorithm", ["plain", "fedrep"])
def test_the_model_as_training_left_it_with_the_personal_parameters(
    tmp_path: Path, state: StateDirectory, algorithm: str
) -> None:
    bundle, own = exported(tmp_path, personal=["2"]), tmp_path / "mine.onnx"
    done = trained(state, bundle, own, algorithm)
    body = bundle.parameters()[: bundle.manifest.size] + FLOAT32.decode(done.contents[0])
    np.testing.assert_allclose(
        outputs(own), by_hand(np.concatenate([body, done.kept_state])), atol=1e-5
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("mine")] == [
        "mine.onnx"
    ]


def test_ditto_s_personal_model(tmp_path: Path, state: StateDirectory) -> None:
    bundle, own = exported(tmp_path, step=LocalStep(proximal=True)), tmp_path / "mine.onnx"
    own.write_bytes(b"of the task before")
    done = trained(state, bundle, own, "ditto")
    assert done.personal is not None
    np.testing.assert_allclose(outputs(own), by_hand(done.personal), atol=1e-5)
    shared = bundle.parameters() + FLOAT32.decode(done.contents[0])
    assert np.abs(outputs(own) - by_hand(shared)).max() > 1e-3


def test_a_file_that_cannot_be_written_does_not_cost_the_training(
    tmp_path: Path, state: StateDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "no folder" / "mine.onnx"
    assert trained(state, exported(tmp_path), own, "plain").report.complete
    assert f"the device's own model cannot be written to {own}" in caplog.text
