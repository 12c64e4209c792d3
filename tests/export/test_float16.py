"""Bundles whose products take float16. Here ONNX Runtime has no float16 kernels: to see what a
device with such kernels computes, the graph rounds in a session that is not optimised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from backbone import classifier, images
from bundle_cache import cached_export
from by_hand import GraphTraining
from export_cases import DIGITS
from fleetlearn_device import open_runtime
from fleetlearn_export import Exported, ExportError, LocalStep, export_bundle
from fleetlearn_export.graphs.half_precision import with_every_rounding
from fleetlearn_export.inspection.summary import summary
from fleetlearn_export.model.loss_scaling import FIRST
from fleetlearn_protocol.manifest import TRAIN, TrainMany
from torch.nn import functional

STEPS, BATCH, LR = 100, 32, 0.05
DATA = DIGITS["data"]()


def exported(folder: Path, **options: Any) -> Exported:
    torch.manual_seed(7)
    x, y = torch.from_numpy(DATA.x_train), torch.from_numpy(DATA.y_train)
    model, step = DIGITS["model"](), LocalStep("momentum")
    return cached_export(
        model, DIGITS["loss"], (x[:4], y[:4]), folder / "digits.bundle", step=step, **options
    )


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(tmp_path_factory.mktemp("half"), compute="float16")


class Training(GraphTraining):
    """A task on train.onnx. ``rounded``: as float16 kernels would round."""

    def __init__(self, made: Exported, *, rounded: bool) -> None:
        super().__init__(made.bundle, {"lr": LR})
        if rounded:
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.intra_op_num_threads = 1
            graph = with_every_rounding(onnx.load(made.bundle.path / TRAIN)).SerializeToString()
            self.session = onnxruntime.InferenceSession(
                graph, options, providers=["CPUExecutionProvider"]
            )


def curve(made: Exported, *, rounded: bool) -> np.ndarray:
    training, random = Training(made, rounded=rounded), np.random.default_rng(3)
    rows = [random.choice(len(DATA.x_train), BATCH, replace=False) for _ in range(STEPS)]
    return np.array([training.step((DATA.x_train[row], DATA.y_train[row]))["loss"] for row in rows])


def test_the_training_curve_is_float32s(half: Exported, tmp_path: Path) -> None:
    """At first each loss differs by a few roundings; later, as any two, the models drift apart and
    learn the same."""
    expected = curve(exported(tmp_path), rounded=False)
    assert expected[-20:].mean() < 0.3 * expected[0], "float32 learns"
    for rounded in (True, False):
        found = curve(half, rounded=rounded)
        assert found[:30] == pytest.approx(expected[:30], rel=0.02)
        assert found[-20:].mean() == pytest.approx(expected[-20:].mean(), rel=0.1)
        assert not np.array_equal(found, expected)


def test_an_overflow_is_skipped_and_training_goes_on(half: Exported) -> None:
    training = Training(half, rounded=True)
    x, y = DATA.x_train[:BATCH], DATA.y_train[:BATCH]
    training.step((x, y))
    parameters, state = training.parameters, training.state
    training.step((x * np.float32(1e5), y))  # finite in float32, and not in float16
    assert all(
        np.array_equal(value, parameters[name]) for name, value in training.parameters.items()
    )
    changed = {
        name for name, value in training.state.items() if not np.array_equal(value, state[name])
    }
    assert changed == {"loss_scale", "loss_scale_steps"}, "momentum is that before the step"
    assert float(training.state["loss_scale"]) == FIRST / 2
    training.step((x, y))
    assert not np.array_equal(training.parameters["0.weight"], parameters["0.weight"])


def test_a_device_trains_it_and_each_task_begins_with_the_first_scale(half: Exported) -> None:
    runtime = open_runtime(half.bundle.path)
    places = {row.name: row.offset for row in runtime.manifest.state}
    first = runtime.step((DATA.x_train[:BATCH], DATA.y_train[:BATCH]), lr=LR)
    assert runtime.step((DATA.x_train[:BATCH], DATA.y_train[:BATCH]), lr=LR) < first
    before = runtime.parameters.copy()
    runtime.step((np.full_like(DATA.x_train[:BATCH], np.inf), DATA.y_train[:BATCH]), lr=LR)
    assert np.array_equal(runtime.parameters, before)
    assert runtime.state[places["loss_scale"]] == FIRST / 2
    runtime.load(before)
    assert runtime.state[places["loss_scale"]] == FIRST


def test_the_manifest_and_the_summary_say_so(half: Exported, tmp_path: Path) -> None:
    assert half.bundle.manifest.compute == "float16"
    lines = {line.label: line.text for group in summary(half.bundle) for line in group}
    assert (
        lines["products"]
        == "float16, computed in float32 where a device has no float16 kernels; the loss is scaled"
    )
    assert '"compute"' not in (exported(tmp_path).bundle.path / "manifest.json").read_text()


def test_frozen_weights_in_few_bits(tmp_path: Path) -> None:
    made = export_bundle(
        classifier(),
        functional.cross_entropy,
        images(8),
        tmp_path / "head",
        train="head.*",
        frozen="int8",
        compute="float16",
    )
    runtime = open_runtime(made.bundle.path)
    batch = tuple(value.numpy() for value in images(8))
    assert runtime.step(batch, lr=LR) > runtime.step(batch, lr=LR)


def test_a_model_that_needs_larger_numbers_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    x, y = torch.from_numpy(DATA.x_train[:4]) * 1e6, torch.from_numpy(DATA.y_train[:4])
    with pytest.raises(ExportError, match="the step in float16 "):
        export_bundle(
            model, functional.cross_entropy, (x, y), tmp_path / "large", compute="float16"
        )


@pytest.mark.parametrize(
    "options",
    [
        {"many": TrainMany(2, 2)},
        {"memory": "1 GiB", "batch": 4},
        {"cache_features": True, "train": "3.*"},
    ],
)
def test_what_it_cannot_be_combined_with_is_named(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"cannot be combined with {next(iter(options))}"):
        exported(tmp_path, compute="float16", **options)
