"""FedMD on a device: its own model digests the consensus, revisits its own data, and scores the
public examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundle_cache import cached_export
from distilling import distillation_bundle
from fleetlearn_device.device import Device
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.session.abilities import unsupported
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.algorithms import (
    UnsupportedError,
    known_algorithms,
    run_algorithm,
)
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.own_scores import OwnModel
from fleetlearn_device.training.train import DivergedError, OutOfTimeError, StoppedError
from fleetlearn_device.training.trainer import FinishedUpdate, Trainer
from fleetlearn_device.training.work import Inputs, TaskSettings
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.messages import Task
from fleetlearn_protocol.public_examples import write_public_bundle
from fleetlearn_protocol.vector import Vector
from torch import Tensor, nn

RNG = np.random.default_rng(5)
PUBLIC_X = RNG.normal(size=(30, 4)).astype(np.float32)
X = RNG.normal(size=(24, 4)).astype(np.float32)
Y = (np.arange(24) % 3).astype(np.int64)
HYPER = {"lr": 0.5, "digest_lr": 0.05, "digest_epochs": 3.0, "temperature": 1.0}
SETTINGS = TaskSettings(HYPER, epochs=1, batch_size=8, seed=3)


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def mlp() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fedmd")
    for name, make in (("linear", linear), ("mlp", mlp)):
        example = torch.from_numpy(X[:4]), torch.from_numpy(Y[:4])
        cached_export(
            make(),
            nn.functional.cross_entropy,
            example,
            found / f"{name}.bundle",
            step=LocalStep("sgd"),
            metrics={"accuracy": accuracy},
        )
        distillation_bundle(make(), example[0], found / f"{name}-distil.bundle", LocalStep("sgd"))
    write_public_bundle(found / "public.bundle", "thirty", {"x": PUBLIC_X}, 3, ["accuracy"])
    return found


def own(folder: Path, name: str) -> OwnModel:
    return OwnModel(folder / f"{name}.bundle", folder / f"{name}-distil.bundle")


@pytest.fixture
def public(folder: Path) -> Bundle:
    return open_bundle(folder / "public.bundle")


def scores_of(model: Vector, x: np.ndarray = PUBLIC_X) -> np.ndarray:
    """Of a linear model."""
    return x @ model[:12].reshape(3, 4).T + model[12:]


def exchange(model: OwnModel, public: Bundle, consensus: Vector, **changes: Any) -> Any:
    begin = changes.pop("begun", None)
    settings = SETTINGS._replace(**changes)
    return model.exchange(public, consensus, begin, None, as_data({"x": X, "y": Y}), settings)


def plain_steps(model: Vector, seed: int = 3) -> Vector:
    """Return a linear model after the revisit's three steps, in NumPy."""
    from fleetlearn_device.training.shuffling import permutation

    weight, bias = model[:12].reshape(3, 4).astype(np.float64), model[12:].astype(np.float64)
    order = permutation(len(X), seed, 0)
    for begin in range(0, len(X), 8):
        rows = order[begin : begin + 8]
        logits = X[rows] @ weight.T + bias
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        error = (shares - np.eye(3)[Y[rows]]) / len(rows)
        weight, bias = weight - 0.5 * error.T @ X[rows], bias - 0.5 * error.sum(0)
    return np.concatenate([weight.reshape(-1), bias]).astype(np.float32)


def test_the_first_round_has_no_consensus(folder: Path, public: Bundle) -> None:
    """The device trains as ever, and what it sends are the scores of the trained model."""
    model = own(folder, "linear")
    found = exchange(model, public, np.zeros(90, np.float32))
    begun = model.bundle.parameters()
    assert np.abs(found.model - plain_steps(begun)).max() < 1e-5
    assert np.abs(found.scores.reshape(30, 3) - scores_of(found.model)).max() < 1e-5
    assert "digest_loss" not in found.result.metrics
    assert {*found.result.metrics} == {"accuracy"}


def test_a_consensus_that_is_its_own_teaches_nothing(folder: Path, public: Bundle) -> None:
    """Identical devices say the same, so that the mean is what each says: nothing to digest."""
    model = own(folder, "linear")
    begun = model.bundle.parameters()
    first = exchange(model, public, np.zeros(90, np.float32))
    consensus = scores_of(begun).astype(np.float32).reshape(-1)
    found = exchange(model, public, consensus)
    assert found.result.metrics["digest_loss"] == pytest.approx(0.0, abs=1e-6)
    assert np.array_equal(found.model, first.model), "as if there had been no consensus"


def test_the_digest_learns_the_consensus(folder: Path, public: Bundle) -> None:
    """Whose loss is KL(softmax of the consensus || softmax of the own scores), as in NumPy."""
    model = own(folder, "mlp")
    consensus = (3 * RNG.normal(size=(30, 3))).astype(np.float32)
    flat, begun = consensus.reshape(-1), model.bundle.parameters()
    first, _ = model._digest({"x": PUBLIC_X}, flat, begun, SETTINGS)
    told = [model._digest({"x": PUBLIC_X}, flat, start, SETTINGS)[1] for start in (begun, first)]
    assert told[1] < told[0]

    def shares(logits: np.ndarray) -> np.ndarray:
        raised = np.exp(logits.astype(np.float64))
        return raised / raised.sum(1, keepdims=True)

    teacher = shares(consensus)
    student = shares(model._scores({"x": PUBLIC_X}, model.bundle.parameters()).reshape(30, 3))
    expected = (teacher * np.log(teacher / student)).sum(1).mean()
    assert told[0] == pytest.approx(expected, rel=1e-4)


def test_devices_of_other_models_come_to_agree(folder: Path, public: Bundle) -> None:
    """With little training of their own, so that what they learn is the consensus."""
    models = [own(folder, "linear"), own(folder, "mlp")]
    consensus, begun, apart = np.zeros(90, np.float32), [None, None], list[float]()
    hyper = {**HYPER, "lr": 0.001, "digest_lr": 0.5, "digest_epochs": 20.0}
    for seed in range(5):
        found = [
            exchange(model, public, consensus, begun=start, seed=seed, hyper=hyper)
            for model, start in zip(models, begun, strict=True)
        ]
        scores = [each.scores for each in found]
        consensus, begun = np.mean(scores, 0, dtype=np.float32), [each.model for each in found]
        apart.append(sum(each.result.metrics.get("digest_loss", 9.0) for each in found))
    assert apart[-1] < apart[1] / 2


def test_time_and_stops_count_for_the_digest_too(folder: Path, public: Bundle) -> None:
    model, consensus = own(folder, "linear"), np.ones(90, np.float32)
    consensus[::3] = 4
    with pytest.raises(StoppedError):
        exchange(model, public, consensus, should_stop=lambda: True)
    ticks = iter(range(1000))
    with pytest.raises(OutOfTimeError):
        exchange(model, public, consensus, time_budget=1.0, clock=lambda: float(next(ticks)))


def test_scores_that_are_not_finite_are_refused(folder: Path, public: Bundle) -> None:
    model = own(folder, "linear")
    with pytest.raises(DivergedError, match=r"scores of public examples|loss|finite"):
        exchange(model, public, np.zeros(90, np.float32), begun=np.full(15, 3e38, np.float32))


def test_a_hostile_consensus_does_not_end_the_training(folder: Path, public: Bundle) -> None:
    consensus = np.full(90, -3e38, np.float32)
    consensus[::3] = 3e38
    found = exchange(own(folder, "mlp"), public, consensus)
    assert np.isfinite(found.model).all()
    assert np.isfinite(found.scores - consensus).all()
    assert found.result.metrics["digest_loss"] > 0


def test_bundles_that_do_not_go_together(folder: Path, tmp_path: Path, public: Bundle) -> None:
    with pytest.raises(BundleError, match="is of another model than bundle"):
        OwnModel(folder / "linear.bundle", folder / "mlp-distil.bundle")
    with pytest.raises(BundleError, match="is no distillation bundle"):
        OwnModel(folder / "linear.bundle", folder / "linear.bundle")
    other = write_public_bundle(tmp_path / "p", "wide", {"x": X[:, :2]}, 3)
    with pytest.raises(UnsupportedError, match="the public examples of bundle wide are x float32"):
        own(folder, "linear").check(open_bundle(other).manifest)


# On a state directory


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "state")
    yield opened
    opened.close()


def given(public: Bundle, consensus: Vector, **changes: Any) -> Task:
    settings: dict[str, Any] = {
        "task": "t1",
        "round": 1,
        "bundle": public.sha256,
        "vectors": (FLOAT32.reference("model", consensus),),
        "parts": {"update": "float32"},
        "hyper": HYPER,
        "epochs": 1,
        "batch_size": 8,
        "seed": 3,
        "deadline": 100.0,
        "algorithm": "fedmd",
        "evaluate": True,
    }
    return Task(**(settings | changes))


def do(
    state: StateDirectory, public: Bundle, consensus: Vector, model: OwnModel, **changes: Any
) -> FinishedUpdate:
    task = given(public, consensus, **changes)
    contents = {
        public.sha256: public.read("manifest.json"),
        public.manifest.files["public.safetensors"].sha256: public.read("public.safetensors"),
        task.vectors[0].sha256: consensus.tobytes(),
    }
    while lacking := state.contents.lacking(task, "onnx"):
        for wanted in lacking:
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)
    finished = Trainer(state, as_data({"x": X, "y": Y}), "onnx", 1, own=model).train(task, 100.0)
    state.outbox.save(*finished)
    return finished


def sent(finished: FinishedUpdate) -> Vector:
    (part,), (content,) = finished.report.parts, finished.contents
    return find_encoding(part.encoding).decode(content, 90)


def test_a_task_sends_scores_alone_and_keeps_the_model(
    folder: Path, public: Bundle, state: StateDirectory
) -> None:
    model = own(folder, "linear")
    first = do(state, public, np.zeros(90, np.float32), model)
    assert (first.report.examples, first.report.steps) == (24, 3)
    assert first.report.evaluation is not None
    assert {*first.report.evaluation.metric_sums} == {"accuracy"}
    kept = state.kept_states.load_personal(model.bundle.sha256, 15)
    assert kept is not None
    assert np.abs(sent(first).reshape(30, 3) - scores_of(kept)).max() < 1e-5
    consensus = np.float32(0.5) * sent(first)
    second = do(state, public, consensus, model, task="t2")
    assert second.report.metrics["digest_loss"] > 0
    newest = state.kept_states.load_personal(model.bundle.sha256, 15)
    assert newest is not None
    assert not np.array_equal(newest, kept)
    assert np.abs((consensus + sent(second)).reshape(30, 3) - scores_of(newest)).max() < 1e-4
    assert {path.name for path in (state.path / "kept").iterdir()} == {
        f"{model.bundle.sha256}.personal"
    }


def test_a_clipped_update_keeps_to_the_norm(
    folder: Path, public: Bundle, state: StateDirectory
) -> None:
    finished = do(state, public, np.zeros(90, np.float32), own(folder, "linear"), clip=0.25)
    assert finished.report.clipped
    assert np.linalg.norm(sent(finished)) == pytest.approx(0.25, rel=1e-5)


def test_a_device_without_a_model_of_its_own_is_not_asked(
    folder: Path, public: Bundle, state: StateDirectory
) -> None:
    task = given(public, np.zeros(90, np.float32))
    assert "fedmd" not in known_algorithms("onnx")
    assert "fedmd" in known_algorithms("onnx", own=True)
    assert "the algorithm fedmd" in (unsupported(task, known_algorithms("onnx"), ()) or "")
    model = own(folder, "linear")
    runtime = model._runtime(model.bundle, model.bundle.parameters())
    inputs = Inputs(model.bundle.parameters())
    with pytest.raises(UnsupportedError, match="trains a model of the device's own"):
        run_algorithm("fedmd", runtime, model.bundle, as_data({"x": X, "y": Y}), inputs, SETTINGS)


def test_a_device_is_told_at_once_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    url, data = "ws://127.0.0.1:1", {"x": X, "y": Y}
    paths = folder / "linear.bundle", folder / "mlp-distil.bundle"
    cases: dict[str, dict[str, Any]] = {
        "go together": {"own_bundle": paths[0]},
        "the device's own model: bundle": {"own_bundle": paths[0], "own_distillation": paths[1]},
        "does not exist": {"own_bundle": tmp_path / "no", "own_distillation": paths[1]},
    }
    for text, options in cases.items():
        with pytest.raises(ValueError, match=text) as caught:
            Device(url, data, tmp_path / "state", **options)
        assert not isinstance(caught.value, DataError)
