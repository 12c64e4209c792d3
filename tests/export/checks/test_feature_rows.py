"""Values whose rows depend on one example each are told from those that mix examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fleetlearn_export.checks.feature_rows import find_again, try_rows
from fleetlearn_export.emission.emit import emit
from fleetlearn_export.emission.table import decompositions
from fleetlearn_export.graphs.conversion import IR_VERSION, OPSET
from fleetlearn_export.model.user_model import UserModel
from fleetlearn_export.tracing.trace import trace
from onnx import ModelProto
from torch import Tensor, nn

X = torch.ones(4, 3, 5)  # equal examples: noise must tell them apart


def user(x: Tensor) -> UserModel:
    return UserModel(
        nn.Identity(), lambda outputs, y: outputs.mean(), {}, {"x": x, "y": torch.zeros(len(x))}, 1
    )


def model_of(function: Callable[[Tensor], Tensor], x: Tensor = X) -> ModelProto:
    arguments, rows = {"batch.x": x, "batch.y": torch.zeros(len(x))}, {"batch.x": 0, "batch.y": 0}
    module = trace(
        lambda given: {"out": function(given["batch.x"])}, arguments, rows, decompositions()
    )
    model = emit(module, list(arguments), ["out"], "batch.x").model
    model.ir_version, model.opset_import[0].version = IR_VERSION, OPSET
    return model


ROWWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "own mean": lambda x: x - x.mean((1, 2), keepdim=True),
    "softmax": lambda x: x.softmax(2),
    "exchanged axes": lambda x: x.transpose(1, 2),
    "through another shape": lambda x: x.reshape(-1, 5).exp().reshape(x.shape[0], 15),
}
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of the batch": lambda x: x - x.mean(0, keepdim=True),
    "softmax over the batch": lambda x: x.softmax(0),
    "other order": lambda x: x.flip(0),
    "running sum": lambda x: x.cumsum(0),
    "largest of the batch": lambda x: x / x.abs().max(),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_rows_of_one_example_each(name: str) -> None:
    tried = try_rows(user(X), model_of(ROWWISE[name]), ["out"])
    assert tried.mixing == set()
    assert tried.rows["out"].shape == tuple(ROWWISE[name](X).shape[1:])


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_depend_on_other_examples(name: str) -> None:
    tried = try_rows(user(X), model_of(MIXING[name]), ["out"])
    assert tried.mixing == {"out"}
    assert tried.rows == {}


def test_missing_values_do_not_hide_a_mean_of_the_batch() -> None:
    x = torch.full_like(X, torch.nan)
    assert try_rows(user(x), model_of(MIXING["mean of the batch"]), ["out"]).mixing == {"out"}


def test_a_value_of_another_number_of_rows_is_neither() -> None:
    tried = try_rows(user(X), model_of(lambda x: x.reshape(-1, 5).exp()), ["out"])
    assert (tried.rows, tried.mixing) == ({}, set())


def test_integers_are_compared_exactly() -> None:
    words = torch.arange(12).reshape(4, 3)
    assert (
        try_rows(user(words), model_of(lambda x: x + 1, words), ["out"]).rows["out"].dtype
        == "int64"
    )
    assert try_rows(user(words), model_of(lambda x: x + x.sum(), words), ["out"]).mixing == {"out"}


def test_another_graph_computes_the_same_under_another_name() -> None:
    tried = try_rows(user(X), model_of(lambda x: (x * 2).exp()), ["out"])
    other = model_of(lambda x: ((x + x).exp() + 1).sum((1, 2)))
    names = [name for node in other.graph.node for name in node.output]
    again = find_again(other, names, tried, ["out"])
    assert next(node.op_type for node in other.graph.node if again["out"] in node.output) == "Exp"
    assert find_again(model_of(lambda x: x.exp()), ["out"], tried, ["out"]) == {}
