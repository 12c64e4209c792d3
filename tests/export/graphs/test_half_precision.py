from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from fleetlearn_export import ExportError, LocalStep
from fleetlearn_export.graphs.half_precision import (
    HALF,
    check_compute,
    in_float32,
    with_every_rounding,
    with_half_products,
)
from graphs import graph
from onnx import TensorProto, helper

node = helper.make_node
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
RANDOM = np.random.default_rng(0)
X, W = (RANDOM.standard_normal(shape).astype(np.float32) for shape in ((5, 4), (4, 4)))


def layers() -> onnx.ModelProto:
    """relu(x @ w.T + b) @ w, its sum along the rows, and an update of w."""
    nodes = [
        node("Transpose", ["w"], ["turned"], "turned", perm=[1, 0]),
        node("Gemm", ["x", "turned", "b"], ["first"], "first"),
        node("Relu", ["first"], ["relu"], "relu"),
        node("MatMul", ["relu", "w"], ["second"], "second"),
        node("Reshape", ["second", "flat"], ["row"], "row"),
        node("MatMul", ["row", "ones"], ["third"], "third"),
        node("ReduceSum", ["third"], ["sum"], "sum", keepdims=0),
        node("Sub", ["w", "sum"], ["next"], "next"),
        node("MatMul", ["count", "count"], ["whole"], "whole"),
    ]
    constants = {
        "b": np.ones(4, np.float32),
        "flat": np.array([1, 20]),
        "ones": np.ones((20, 2), np.float32),
    }
    inputs: dict[str, tuple[int, list[object]]] = {
        "x": (FLOAT, [5, 4]),
        "w": (FLOAT, [4, 4]),
        "count": (INT, [2, 2]),
    }
    return graph(nodes, inputs, ["next", "whole"], constants)


def run(model: onnx.ModelProto, scale: float = 1.0) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: np.ndarray = session.run(
        ["next"], {"x": X * scale, "w": W, "count": np.ones((2, 2), np.int64)}
    )[0]
    return found


def test_products_take_float16_and_the_rest_float32() -> None:
    made = with_half_products(layers())
    kinds = {row.name: row.op_type for row in made.graph.node if row.output[0].endswith(HALF)}
    assert {"turned", "first", "second", "row", "third"} == {
        name for name, kind in kinds.items() if kind != "Cast"
    }
    casts = [row.input[0] for row in made.graph.node if row.op_type == "Cast"]
    # Each tensor once, the weight before it is turned; nothing between the second product and the
    # third.
    assert casts == ["w", "x", "b", "first/half", "relu", "ones", "third/half"]


def test_a_row_times_a_column_is_a_sum_and_stays_float32() -> None:
    nodes = [
        node("MatMul", ["row", "column"], ["sum"], "sum"),
        node("MatMul", ["column", "row"], ["product"], "product"),
    ]
    inputs: dict[str, tuple[int, list[object]]] = {
        "row": (FLOAT, [3, 1, 5]),
        "column": (FLOAT, [3, 5, 1]),
    }
    made = with_half_products(graph(nodes, inputs, ["sum", "product"]))
    assert [row.output[0] for row in made.graph.node if row.op_type == "MatMul"] == [
        "sum",
        "product/half",
    ]


def test_in_float32_it_is_the_same_graph() -> None:
    assert run(in_float32(with_half_products(layers()))) == pytest.approx(run(layers()), rel=1e-6)


def test_every_rounding_is_that_of_float16() -> None:
    def half(value: np.ndarray) -> np.ndarray:
        return value.astype(np.float16).astype(np.float32)

    first = half(half(X) @ half(W).T + 1)
    third = half(
        half(half(np.maximum(first, 0)) @ half(W)).reshape(1, 20) @ np.ones((20, 2), np.float32)
    )
    found = run(with_every_rounding(with_half_products(layers())))
    assert found == pytest.approx(W - third.sum(), rel=2**-11)
    assert found != pytest.approx(run(layers()), rel=1e-6)
    with np.errstate(over="ignore"):
        assert not np.isfinite(run(with_every_rounding(with_half_products(layers())), 1e5)).any(), (
            "float16 ends at 65504"
        )


def test_what_is_refused() -> None:
    check_compute("float16", None, [])
    check_compute("float16", LocalStep("adam"), [])
    with pytest.raises(ExportError, match="would not load the graph"):
        check_compute("bfloat16", None, [])
    with pytest.raises(ExportError, match="compute='half'; expected 'float32' or 'float16'"):
        check_compute("half", None, [])
    with pytest.raises(ExportError, match="not for a step of your own"):
        check_compute("float16", lambda params, state, batch, hyper: None, [])
    for name in ("many", "memory", "cache_features"):
        with pytest.raises(ExportError, match=f"cannot be combined with {name}"):
            check_compute("float16", None, [name])
