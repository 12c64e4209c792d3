"""graphs/train_many.onnx against graphs/train.onnx, device after device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from fleetlearn_export import ExportError, LocalStep, TrainMany, export_bundle
from fleetlearn_export.graphs import train_many
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import TRAIN, TRAIN_MANY
from torch import nn
from torch.nn import functional

from tests.support.recurrent_layers import LAYERS

SHARED = ("anchor", "hyper")
RATE = "hyper.lr"
HYPER = {"lr": 0.05, "mu": 0.3}


def session_of(bundle: Bundle, file: str) -> Any:
    return onnxruntime.InferenceSession(bundle.read(file), providers=["CPUExecutionProvider"])


def run(session: Any, feed: dict[str, Any]) -> dict[str, Any]:
    names = [row.name for row in session.get_outputs()]
    return dict(
        zip(
            names,
            session.run(names, {row.name: feed[row.name] for row in session.get_inputs()}),
            strict=True,
        )
    )


def inputs_for(bundle: Bundle, session: Any, rows: int) -> dict[str, Any]:
    """Other values for each device; of the state what Adam's could be."""
    rng, feed = np.random.default_rng(1), {}
    defaults = {row.name: row.default for row in bundle.manifest.hyper}
    for row in session.get_inputs():
        shape = [size if isinstance(size, int) else rows for size in row.shape]
        kind, _, name = row.name.partition(".")
        if row.name == RATE and shape:
            feed[row.name] = rng.uniform(0.01, 0.09, shape).astype(np.float32)
        elif kind == "hyper":
            feed[row.name] = np.array(HYPER.get(name, defaults[name]), np.float32)
        elif row.name == "batch.y":
            feed[row.name] = rng.integers(3, size=shape)
        elif kind in ("seed", "steps"):
            feed[row.name] = rng.integers(10**12, size=shape)
        else:
            feed[row.name] = abs(rng.normal(0.5, 0.3, shape)).astype(np.float32)
    return feed


def check(bundle: Bundle, rows: int, steps: list[int]) -> None:
    """Each device's parameters, state, losses and metrics are those of its own steps, one after the
    other."""
    block, single = session_of(bundle, TRAIN_MANY), session_of(bundle, TRAIN)
    feed = inputs_for(bundle, block, rows) | {"steps": np.array(steps)}
    found = run(block, feed)
    for device, count in enumerate(steps):
        now = {
            name: value if name.startswith(SHARED) else np.asarray(value[device])
            for name, value in feed.items()
        }
        for number in range(count):
            batch = {
                name: np.asarray(value[device, number])
                for name, value in feed.items()
                if name.startswith("batch.") or (name == RATE and value.ndim)
            }
            seed = {"seed": np.asarray(feed["seed"][device] + number)} if "seed" in feed else {}
            after = run(single, now | batch | seed)
            for name, value in after.items():
                if name.startswith("next."):
                    now[name.removeprefix("next.")] = value
                else:
                    assert found[name][device, number] == pytest.approx(
                        float(value), rel=2e-6, abs=1e-6
                    )
        for name, value in found.items():
            if name.startswith("next."):
                np.testing.assert_allclose(
                    value[device], now[name.removeprefix("next.")], rtol=5e-7, atol=1e-6
                )
            else:
                assert not value[device, count:].any(), "measured where nothing was done"


def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == y).float()


def test_softmax_regression_with_any_number_of_examples(tmp_path: Path) -> None:
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    exported = export_bundle(
        nn.Linear(5, 3),
        functional.cross_entropy,
        (x, y),
        tmp_path / "b",
        step=LocalStep(proximal=True),
        metrics={"accuracy": accuracy},
        many=TrainMany(4, 3),
    )
    assert exported.bundle.manifest.many == TrainMany(4, 3)
    for rows in (5, 2, 1):
        check(exported.bundle, rows, [3, 0, 1, 2])
    check(exported.bundle, 2, [3, 3, 3, 3])  # nothing is picked then
    graph = onnx.load_model_from_string(exported.bundle.read(TRAIN_MANY)).graph
    assert Counter(node.op_type for node in graph.node)["If"] == 2, (
        "for the weights and for the biases"
    )


def test_state_and_randomness_are_each_devices_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3))
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    bundle = export_bundle(
        model,
        functional.cross_entropy,
        (x, y),
        tmp_path / "b",
        step=LocalStep("adam"),
        many=TrainMany(3, 2),
    ).bundle
    check(bundle, 4, [2, 1, 2])


WEIGHT = torch.tensor([0.5, 2.0, 1.5])


LOSSES: dict[str, Any] = {
    "weighted, some ignored": lambda outputs, y: functional.cross_entropy(
        outputs, y, WEIGHT, ignore_index=2
    ),
    "sum, some ignored": lambda outputs, y: (
        functional.cross_entropy(outputs, y, ignore_index=2, reduction="sum")
        / torch.ones_like(y).sum()
    ),
    "one by one": lambda outputs, y: functional.cross_entropy(
        outputs, y, WEIGHT, reduction="none"
    ).mean(),
    "smoothed": lambda outputs, y: functional.cross_entropy(outputs, y, label_smoothing=0.2),
    "images": lambda outputs, y: functional.cross_entropy(
        outputs.unsqueeze(2).unsqueeze(3), y.unsqueeze(1).unsqueeze(2)
    ),
}
NAMES = [
    next(iter(LOSSES)),
    *(pytest.param(name, marks=pytest.mark.slow) for name in list(LOSSES)[1:]),
]


@pytest.mark.parametrize("name", NAMES)
def test_cross_entropy_with_its_options(tmp_path: Path, name: str) -> None:
    x, y = torch.randn(6, 5), torch.randint(2, (6,))
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    check(
        export_bundle(model, LOSSES[name], (x, y), tmp_path / "b", many=TrainMany(3, 2)).bundle,
        9,
        [2, 0, 1],
    )


def test_what_each_device_has_is_picked_once_or_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the same; also for numbers of steps beyond those of a call."""
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    found = []
    for kept in (train_many.MAX_KEPT_BYTES, 0):
        monkeypatch.setattr(train_many, "MAX_KEPT_BYTES", kept)
        torch.manual_seed(0)
        bundle = export_bundle(
            nn.Linear(5, 3),
            functional.cross_entropy,
            (x, y),
            tmp_path / "b",
            step=LocalStep("adam"),
            many=TrainMany(5, 3),
        ).bundle
        session = session_of(bundle, TRAIN_MANY)
        feed = inputs_for(bundle, session, 4) | {"steps": np.array([3, 0, 1, 9, -1])}
        found.append(run(session, feed))
        for name, value in found[-1].items():
            if name.startswith("next."):
                np.testing.assert_array_equal(
                    value[[1, 4]], feed[name.removeprefix("next.")][[1, 4]]
                )
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value)


@pytest.mark.slow
def test_a_model_that_fixes_the_number_of_examples(tmp_path: Path) -> None:
    """Convolution and batch norm, which PyTorch can spread over devices for a known number of
    examples only."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    x, y = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))
    with pytest.raises(
        ExportError,
        match=r"any number of examples .* Fix the number: TrainMany\(2, 2, batch=\.\.\.\)",
    ):
        export_bundle(model, functional.cross_entropy, (x, y), tmp_path / "b", many=TrainMany(2, 2))
    bundle = export_bundle(
        model, functional.cross_entropy, (x, y), tmp_path / "b", many=TrainMany(2, 2, batch=5)
    ).bundle
    check(bundle, 5, [2, 1])


class Recurrent(nn.Module):
    """One class for each time of a sequence of five numbers a time."""

    def __init__(self, layer: nn.Module, size: int) -> None:
        super().__init__()
        self.layer = layer
        self.classes = nn.Linear(size, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.classes(self.layer(x)[0])
        return outputs


def recurrent_bundle(path: Path, layer: nn.Module, size: int, time: int) -> Bundle:
    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = y.unsqueeze(1).expand(outputs.shape[:2])
        return functional.cross_entropy(outputs.flatten(0, 1), each.flatten())

    x, y = torch.randn(4, time, 5), torch.randint(3, (4,))
    return export_bundle(Recurrent(layer, size), loss, (x, y), path, many=TrainMany(4, 2)).bundle


def nodes_of(bundle: Bundle) -> list[str]:
    graph = onnx.load_model_from_string(bundle.read(TRAIN_MANY)).graph
    return [node.op_type for node in graph.node]


def test_recurrent_layers_are_loops(tmp_path: Path) -> None:
    """Of all devices together, and for any number of examples: more times take no larger graph."""
    torch.manual_seed(1)
    layer = nn.LSTM(5, 6, batch_first=True)
    short, long = (recurrent_bundle(tmp_path / str(time), layer, 6, time=time) for time in (3, 40))
    for rows in (4, 1):
        check(short, rows, [2, 0, 1, 2])
    assert nodes_of(short).count("Scan") == 4, "forwards and backwards, in each of two steps"
    assert nodes_of(long) == nodes_of(short)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", LAYERS)
def test_recurrent_layers_of_each_kind(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    layer = LAYERS[kind](5, 6, num_layers=2, bidirectional=True, batch_first=True)
    size = 6 if kind == "projected lstm" else 12
    bundle = recurrent_bundle(tmp_path / "b", layer, size, time=4)
    assert nodes_of(bundle).count("Scan") == 16, "each layer and direction, as above"
    for rows in (3, 1):
        check(bundle, rows, [2, 0, 1, 2])


@pytest.mark.parametrize("many", [TrainMany(1, 5), 7])
def test_what_is_not_a_block_is_refused(tmp_path: Path, many: Any) -> None:
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    with pytest.raises(ExportError, match=r"expected TrainMany\(devices, steps\)"):
        export_bundle(nn.Linear(5, 3), functional.cross_entropy, (x, y), tmp_path / "b", many=many)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_learning_rate_for_each_step_of_each_device(tmp_path: Path, optimizer: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4)
    bundle = export_bundle(
        model,
        functional.cross_entropy,
        (x, torch.tensor([0, 1, 2, 0, 1])),
        tmp_path / "rates.bundle",
        step=LocalStep(optimizer),
        many=TrainMany(3, 4, lr_by_step=True),
    ).bundle
    assert bundle.manifest.many == TrainMany(3, 4, lr_by_step=True)
    (rate,) = [row for row in session_of(bundle, TRAIN_MANY).get_inputs() if row.name == RATE]
    assert rate.shape == [3, 4]
    check(bundle, 5, [4, 2, 0])


def test_a_step_without_lr_has_none_for_each_step(tmp_path: Path) -> None:
    def own(params: Any, state: Any, batch: Any, hyper: Any, *, objective: Any) -> Any:
        found = objective(params, batch)
        moved = {
            name: params[name] - hyper["rate"] * gradient
            for name, gradient in found.gradients.items()
        }
        return {**params, **moved}, state, {"loss": found.loss}

    with pytest.raises(ExportError, match="no hyper-parameter lr; it has rate"):
        export_bundle(
            nn.Linear(4, 3),
            functional.cross_entropy,
            (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])),
            tmp_path / "own.bundle",
            step=own,
            hyper={"rate": 0.1},
            many=TrainMany(3, 4, lr_by_step=True),
        )
