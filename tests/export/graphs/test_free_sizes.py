"""Names for sizes that depend on the number of examples."""

from __future__ import annotations

import re
from collections.abc import Callable

import onnx
import pytest
from export_cases import Case
from fleetlearn_export.graphs.free_sizes import name_free_sizes
from onnx import TensorProto, helper

KNOWN = re.compile(r"(\d+\*)?n( [+-] \d+)?")


def described(node: onnx.NodeProto, **constants: list[int]) -> list[int | str | None]:
    """Return the shape that ``r``, the result of the node, is given. Its input ``x`` is (n, 6,
    4)."""
    rows = [
        helper.make_tensor(name, TensorProto.INT64, [len(row)], row)
        for name, row in constants.items()
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    last = helper.make_node("Relu", ["r"], ["y"])
    model = helper.make_model(
        helper.make_graph([node, last], "g", [x], [y], rows),
        opset_imports=[helper.make_opsetid("", 18)],
    )
    name_free_sizes(model)
    # fails where it finds another size
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    sizes = next(
        (row.type.tensor_type.shape.dim for row in model.graph.value_info if row.name == "r"), []
    )
    return [size.dim_value or size.dim_param or None for size in sizes]


def test_a_size_is_an_expression_of_n() -> None:
    assert described(helper.make_node("Reshape", ["x", "s"], ["r"]), s=[-1, 4]) == ["6*n", 4]
    assert described(helper.make_node("Reshape", ["x", "s"], ["r"]), s=[-1, 3, 8]) == ["n", 3, 8]
    assert described(helper.make_node("Pad", ["x", "s"], ["r"]), s=[1, 0, 0, 2, 0, 0]) == [
        "n + 3",
        6,
        4,
    ]
    assert described(helper.make_node("Slice", ["x", "s", "e"], ["r"]), s=[2], e=[1000]) == [
        "n - 2",
        6,
        4,
    ]


def test_what_is_no_such_expression_is_left_out() -> None:
    """Half of the examples is one thing for even numbers, another for odd ones."""
    half = helper.make_node("Slice", ["x", "s", "e", "a", "t"], ["r"])
    assert described(half, s=[0], e=[1000], a=[0], t=[2]) == []


def test_a_fixed_shape_is_left_to_inference() -> None:
    shape = helper.make_node("Slice", ["x", "s", "e", "a"], ["r"])
    assert described(shape, s=[0], e=[1], a=[0]) == []


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_all_free_sizes_of_an_exported_graph_have_names(
    cases: Callable[[str], Case], name: str
) -> None:
    model = onnx.load_model_from_string(cases(name).exported.bundle.read("graphs/train.onnx"))
    found = onnx.shape_inference.infer_shapes(model, data_prop=True)
    free = {
        size.dim_param for row in found.graph.value_info for size in row.type.tensor_type.shape.dim
    }
    assert all(KNOWN.fullmatch(size) for size in free - {""}), free
