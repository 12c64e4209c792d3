"""Ensembles as ONNX files predict what the devices' own functions do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from computing import computed
from fleetlearn_device.computations import boosted_components, boosted_trees
from fleetlearn_protocol.bundle import open_bundle, write_inference_model
from fleetlearn_protocol.computations.boosting_settings import (
    BoostColumn,
    BoostedComponents,
    BoostedTrees,
)
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_protocol.computations.components_layout import components_state
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.settings import NumberColumn, Statistics, kind_of
from fleetlearn_protocol.computations.trees_layout import bin_table, first_trees, trees_state
from fleetlearn_protocol.errors import BundleError

COLUMNS = (
    BoostColumn("a"),
    BoostColumn("kind", categories=4),
    BoostColumn("b"),
    BoostColumn("size", categories=3),
)


def table(loss: str, count: int = 300) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(6)
    x = np.column_stack(
        [
            1e4 + rng.normal(size=count),
            rng.integers(0, 4, count),
            rng.exponential(size=count) * 1e-3,
            rng.integers(0, 3, count),
        ]
    ).astype(np.float32)
    signal = x[:, 0] - 1e4 + (x[:, 1] == 2) - (x[:, 3] == 0) + np.sin(4e3 * x[:, 2])
    y = {
        "squared": (50 * signal).astype(np.float32),
        "logistic": (signal > 0.3).astype(np.int64),
        "softmax": np.digitize(signal, [-0.5, 1]).astype(np.int64),
    }[loss]
    x[rng.random(x.shape) < 0.15] = np.nan
    return {"x": x, "y": y}


def odd_rows(x: np.ndarray) -> np.ndarray:
    """Return the rows, and some with values that training never saw."""
    odd = np.array(
        [
            [np.nan] * 4,
            [np.inf, 9, -np.inf, -1],
            [-np.inf, 1.5, np.inf, 2],
            [0, 3, 0, -0.0],
        ],
        np.float32,
    )
    return np.concatenate([x, odd])


def run(model: bytes, x: np.ndarray) -> dict[str, np.ndarray]:
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


def expected_outputs(scores: np.ndarray, loss: str) -> dict[str, np.ndarray]:
    if loss == "squared":
        return {"output": scores[:, 0]}
    if loss == "logistic":
        chance = 1 / (1 + np.exp(-scores[:, 0]))
        return {"class": scores[:, 0] > 0, "probabilities": np.column_stack([1 - chance, chance])}
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    return {"class": scores.argmax(axis=1), "probabilities": shares}


def agree(found: dict[str, np.ndarray], scores: np.ndarray, loss: str) -> None:
    expected = expected_outputs(scores, loss)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].shape == values.shape
        scale = max(1.0, float(np.abs(values).max()))
        assert np.abs(found[name] - values).max() <= 2e-6 * scale, name
    if loss != "squared":
        assert found["class"].dtype == np.int64


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_trees_predict_the_same_in_onnx_runtime(loss: str) -> None:
    told = BoostedTrees(
        columns=COLUMNS,
        loss=loss,
        classes=3 if loss == "softmax" else 0,
        rounds=8,
        depth=4,
        bins=16,
        learning_rate=0.4,
    )
    rows = table(loss)
    _, states = computed(told, [rows])
    values, x = trees_state(told).unpack(states[-1]), odd_rows(rows["x"])
    bins = boosted_trees.bins_of(x, values["edges"], bin_table(told))
    scores = boosted_trees.scores(values, bins, told, int(values["kept"]))
    assert len({*scores[:, 0].tolist()}) > 50
    used = KINDS["boosted-trees"].infer
    assert used is not None
    agree(run(used(told, states[-1]), x), scores, loss)


def test_before_the_first_tree_everybody_gets_the_base() -> None:
    told = BoostedTrees(columns=COLUMNS, rounds=2)
    infer = KINDS["boosted-trees"].infer
    assert infer is not None
    assert (
        run(infer(told, first_trees(told)), table("squared")["x"])["output"].tolist() == [0] * 300
    )


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize(
    "changed",
    [{}, {"learners": ("spline",), "degrees_of_freedom": 5.0}, {"columns": COLUMNS[1::2]}],
    ids=["all", "splines", "categories"],
)
def test_components_predict_the_same_in_onnx_runtime(loss: str, changed: dict[str, Any]) -> None:
    told = BoostedComponents(**{"columns": COLUMNS, "loss": loss, "iterations": 60, **changed})
    rows = table(loss)
    if "columns" in changed:
        rows["x"] = rows["x"][:, 1::2].copy()
    _, states = computed(told, [rows])
    x = odd_rows(table(loss)["x"])[:, 1::2] if "columns" in changed else odd_rows(rows["x"])
    values = components_state(told).unpack(states[-1])
    scores = boosted_components.component_scores(values, x, told)[:, None]
    infer = KINDS[kind_of(told)].infer
    assert infer is not None
    agree(run(infer(told, states[-1]), np.ascontiguousarray(x)), scores, loss)


def test_a_bundle_s_model_is_written_of_its_state(tmp_path: Path) -> None:
    told = BoostedComponents(columns=COLUMNS, iterations=5)
    _, states = computed(told, [table("squared")])
    bundle = open_bundle(write_computation_bundle(tmp_path / "b.bundle", "effects", told))
    infer = KINDS[kind_of(told)].infer
    assert infer is not None
    assert write_inference_model(bundle, states[-1]) == infer(told, states[-1])
    numbers = Statistics(numbers=(NumberColumn("a"),))
    other = open_bundle(write_computation_bundle(tmp_path / "s.bundle", "ages", numbers))
    with pytest.raises(BundleError, match="computes statistics, which predicts nothing"):
        write_inference_model(other, KINDS["statistics"].first(numbers))
