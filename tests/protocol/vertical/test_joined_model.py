"""One file of bottoms and top: what it computes is what the parts compute one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from fleetlearn_protocol.vertical.joined_model import (
    PartModel,
    PartOrigin,
    joined_model,
    origin_of,
    with_origin,
)
from onnx import TensorProto, helper, numpy_helper

TAKES = {"bank": "activations_bank", "shop": "activations_shop"}


def value(name: str, columns: int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", columns])


def tensor(name: str, seed: int, *shape: int) -> Any:
    random = np.random.default_rng(seed)
    return numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name)


def file(nodes: list[Any], inputs: list[Any], outputs: list[Any], tensors: list[Any],
         opset: int = 18) -> bytes:  # fmt: skip
    graph = helper.make_graph(nodes, "part", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def bottom(features: int, made: int, seed: int, opset: int = 18) -> bytes:
    """Return a part whose values have the same names as every other's."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["v1"], "v1"),
        helper.make_node("Tanh", ["v1"], ["output"]),
    ]
    tensors = [tensor("w", seed, features, made)]
    return file(nodes, [value("x", features)], [value("output", made)], tensors, opset)


def top() -> bytes:
    """Return a part with a graph inside a node, which reads values of the graph around it."""
    inner = [
        helper.make_graph([helper.make_node(kind, ["v1"], [name])], name, [], [value(name, 2)])
        for kind, name in (("Relu", "then"), ("Neg", "else"))
    ]
    nodes = [
        helper.make_node("Concat", list(TAKES.values()), ["joined"], axis=1),
        helper.make_node("MatMul", ["joined", "w"], ["v1"]),
        helper.make_node("If", ["always"], ["output"], then_branch=inner[0], else_branch=inner[1]),
    ]
    tensors = [tensor("w", 3, 5, 2), numpy_helper.from_array(np.array(False), "always")]
    inputs = [value("activations_bank", 3), value("activations_shop", 2)]
    return file(nodes, inputs, [value("output", 2)], tensors)


PARTS = [PartModel("bank", bottom(4, 3, 1)), PartModel("shop", bottom(2, 2, 2))]


def ran(content: bytes, **feed: Any) -> Any:
    return onnxruntime.InferenceSession(content).run(None, feed)[0]


def test_the_file_computes_what_its_parts_compute() -> None:
    content = joined_model(PARTS, TAKES, top())
    model = onnx.load_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    assert [row.name for row in model.graph.input] == ["bank.x", "shop.x"]
    assert [row.name for row in model.graph.output] == ["output"]
    random = np.random.default_rng(0)
    bank, shop = (random.normal(size=(7, size)).astype(np.float32) for size in (4, 2))
    made = {
        TAKES[part.party]: ran(part.content, x=x)
        for part, x in zip(PARTS, (bank, shop), strict=True)
    }
    expected = ran(top(), **made)
    assert (expected > 0).any()
    assert np.array_equal(ran(content, **{"bank.x": bank, "shop.x": shop}), expected)


def test_the_input_of_a_single_bottom_keeps_its_name() -> None:
    nodes = [helper.make_node("Relu", ["activations_device"], ["output"])]
    above = file(nodes, [value("activations_device", 3)], [value("output", 3)], [])
    parts = [PartModel("device", bottom(4, 3, 1))]
    content = joined_model(parts, {"device": "activations_device"}, above)
    x = np.ones((2, 4), np.float32)
    expected = np.maximum(ran(parts[0].content, x=x), 0)
    assert np.array_equal(ran(content, x=x), expected)


def test_a_part_says_what_it_is_of_and_runs_all_the_same() -> None:
    origin = PartOrigin("a" * 64, 300)
    content = with_origin(PARTS[0].content, origin)
    assert origin_of(content) == origin
    assert origin_of(PARTS[0].content) is None
    x = np.ones((1, 4), np.float32)
    assert np.array_equal(ran(content, x=x), ran(PARTS[0].content, x=x))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (PARTS[:1], "the top takes activations_bank, activations_shop; the bottoms make"),
        ([PARTS[0], PartModel("shop", b"no model")], "the file of shop is no ONNX model"),
        ([PARTS[0], PartModel("shop", b"")], "the file of shop is no ONNX model: it has no graph"),
        ([PARTS[0], PartModel("shop", bottom(2, 2, 2, 17))], "version 17 of the operators ai.onnx"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts: list[PartModel], said: str) -> None:
    above = top()
    if "version" in said:
        assert joined_model(PARTS, TAKES, above)
    with pytest.raises(ValueError, match=said):
        joined_model(parts, TAKES, above)
