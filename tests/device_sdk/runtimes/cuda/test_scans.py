"""Loops of recurrent layers, written out for a GPU: run on the CPU against the originals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from fleetlearn_device.runtimes.cuda.graphs import for_cuda
from fleetlearn_device.runtimes.cuda.scans import MOST_NODES, WIDEST
from fleetlearn_device.runtimes.providers import CPU
from fleetlearn_export import export_bundle
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional

FEATURES, CLASSES, EXAMPLES = 4, 3, 6


class Last(nn.Module):
    """Classifies by what a recurrent layer says at the last time."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        size = layer.proj_size or layer.hidden_size
        self.last = nn.Linear(size * (1 + layer.bidirectional), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layer(x)[0][:, -1])
        return found


LAYERS = {
    "lstm": (lambda: nn.LSTM(FEATURES, 5, batch_first=True), 40),
    "both ways": (lambda: nn.LSTM(FEATURES, 5, 2, bidirectional=True, batch_first=True), 3),
    "projected": (lambda: nn.LSTM(FEATURES, 6, proj_size=2, batch_first=True), 4),
    "gru": (lambda: nn.GRU(FEATURES, 5, batch_first=True), WIDEST + 1),
    "gru both ways": (lambda: nn.GRU(FEATURES, 5, bidirectional=True, batch_first=True), 2),
    "rnn": (lambda: nn.RNN(FEATURES, 5, batch_first=True), 7),
    "rnn with relu": (lambda: nn.RNN(FEATURES, 5, nonlinearity="relu", batch_first=True), 7),
    "one step": (lambda: nn.GRU(FEATURES, 5, batch_first=True), 1),
}


def results(model: bytes, given: dict[str, Any]) -> list[Any]:
    return list(onnxruntime.InferenceSession(model, providers=[CPU]).run(None, given))


def operators(model: bytes) -> Counter[str]:
    parsed = onnx.load_from_string(model)
    onnx.checker.check_model(parsed)
    return Counter(node.op_type for node in parsed.graph.node)


def written(model: bytes) -> bytes:
    found = for_cuda(model)
    assert found is not None
    return found


def train_graph(layer: nn.RNNBase, steps: int, folder: Path) -> bytes:
    x, y = torch.zeros(2, steps, FEATURES), torch.zeros(2, dtype=torch.int64)
    export_bundle(Last(layer), functional.cross_entropy, (x, y), folder / "bundle")
    return (folder / "bundle/graphs/train.onnx").read_bytes()


def inputs_of(model: bytes) -> dict[str, Any]:
    rng, given = np.random.default_rng(3), {}
    for value in onnx.load_from_string(model).graph.input:
        kind = value.type.tensor_type
        shape = [size.dim_value or EXAMPLES for size in kind.shape.dim]
        if kind.elem_type == TensorProto.FLOAT:
            given[value.name] = rng.normal(0, 0.5, shape).astype(np.float32)
        else:
            given[value.name] = rng.integers(0, CLASSES, shape)
    return given


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "name",
    [name if name == "gru" else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS],
)
def test_a_step_without_loops_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    make, steps = LAYERS[name]
    torch.manual_seed(1)
    model = train_graph(make(), steps, tmp_path)
    assert operators(model)["Scan"]
    found = written(model)
    assert not operators(found)["Scan"]
    for node in onnx.load_from_string(found).graph.node:
        if node.op_type in ("Concat", "Split"):
            assert max(len(node.input), len(node.output)) <= WIDEST
    given = inputs_of(model)
    for one, other in zip(results(found, given), results(model, given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_what_follows_from_the_rows_alone_is_computed_once(tmp_path: Path) -> None:
    steps = 20
    model = train_graph(nn.LSTM(FEATURES, 5, batch_first=True), steps, tmp_path)
    count = operators(written(model))
    # Three products in a step, six in a step of its gradient, which multiplies 16 times.
    assert count["Mul"] <= (3 + 6) * steps + 20
    assert count["Tanh"] <= 2 * steps + 1  # of the cell state once more, for the gradient
    assert count["Sub"] <= 10


def loop(
    body: list[onnx.NodeProto],
    steps: int | None = 5,
    *,
    initializers: tuple[onnx.TensorProto, ...] = (),
    outputs: tuple[str, ...] = ("next", "row-out"),
    rank: int = 2,
    **attributes: Any,
) -> bytes:
    """A Scan over ``x`` (steps, 2) with a state ``s``; its body reads ``state`` and ``row``."""
    sizes = [2][: rank - 1]
    given = [
        helper.make_tensor_value_info("state", TensorProto.FLOAT, sizes),
        helper.make_tensor_value_info("row", TensorProto.FLOAT, sizes),
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name in outputs]
    graph = helper.make_graph(body, "step", given, made, list(initializers))
    names = ["last", "out"]
    scan = helper.make_node("Scan", ["s", "x"], names, body=graph, num_scan_inputs=1, **attributes)
    outer = helper.make_graph(
        [scan],
        "loop",
        [
            helper.make_tensor_value_info("s", TensorProto.FLOAT, sizes),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, *sizes]),
        ],
        [
            helper.make_tensor_value_info("last", TensorProto.FLOAT, sizes),
            helper.make_tensor_value_info("out", TensorProto.FLOAT, [None, *sizes]),
        ],
    )
    made_model = helper.make_model(outer, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return bytes(made_model.SerializeToString())


ADD = [
    helper.make_node("Add", ["state", "row"], ["next"]),
    helper.make_node("Mul", ["next", "row"], ["row-out"]),
]


def both_agree(model: bytes) -> None:
    given = {
        "s": np.array([1, -2], np.float32),
        "x": np.arange(10, dtype=np.float32).reshape(5, 2) / 7,
    }
    for one, other in zip(results(written(model), given), results(model, given), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("direction", [0, 1])
def test_both_directions(direction: int) -> None:
    model = loop(ADD, scan_input_directions=[direction], scan_output_directions=[direction])
    assert not operators(written(model))["Scan"]
    both_agree(model)


def test_a_state_that_is_a_row_or_stays_and_an_output_that_is_one() -> None:
    one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    names = [
        helper.make_node("Identity", ["row"], ["next"]),
        helper.make_node("Sub", ["one", "row"], ["less"]),
        helper.make_node("Identity", ["less"], ["row-out"]),
    ]
    both_agree(loop(names, initializers=(one,)))
    stays = [
        helper.make_node("Identity", ["state"], ["next"]),
        helper.make_node("Identity", ["state"], ["row-out"]),
    ]
    both_agree(loop(stays))


def test_a_constant_vector_stays_within_the_steps() -> None:
    pair = helper.make_tensor("pair", TensorProto.FLOAT, [2], [0.5, 3.0])
    body = [
        helper.make_node("Mul", ["pair", "row"], ["scaled"]),
        helper.make_node("Add", ["state", "scaled"], ["next"]),
        helper.make_node("Neg", ["next"], ["row-out"]),
    ]
    model = loop(body, initializers=(pair,))
    both_agree(model)
    assert operators(written(model))["Mul"] == 5
    assert operators(written(model))["Neg"] == 1  # of all steps at once


INNER = helper.make_graph(
    [helper.make_node("Identity", ["row"], ["same"])],
    "inner",
    [],
    [helper.make_tensor_value_info("same", TensorProto.FLOAT, None)],
)


@pytest.mark.parametrize(
    "model",
    [
        loop(ADD, None),
        loop(ADD, MOST_NODES),
        loop(ADD, scan_input_directions=[1]),
        loop(ADD, 2, scan_output_axes=[1]),
        loop(ADD, rank=1),
        loop([helper.make_node("BitwiseNot", ["row"], ["next"]), *ADD[1:]]),
        loop(
            [
                helper.make_node("If", ["flag"], ["next"], then_branch=INNER, else_branch=INNER),
                ADD[1],
            ]
        ),
    ],
    ids=["unknown steps", "many", "two directions", "axis", "numbers", "bitwise", "inner graph"],
)
def test_other_loops_stay(model: bytes) -> None:
    assert b"Scan" in written(model)
