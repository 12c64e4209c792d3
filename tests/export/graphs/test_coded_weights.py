from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from fleetlearn_export.graphs.coded_weights import code_weights
from fleetlearn_export.model.frozen_weights import Stored, encode
from graphs import graph
from onnx import TensorProto, helper

FEWER: list[Stored] = ["int8", "float16"]
random = np.random.default_rng(0)
node = helper.make_node


def made_of(stored: Stored) -> onnx.ModelProto:
    """A convolution, two matrix products in a row, and a table whose rows are looked up."""
    shapes = {"filters": (32, 4, 3, 3), "one": (32, 64), "table": (50, 64), "unrounded": (64, 16)}
    constants = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    constants |= {
        name: encode(value, stored).decode()
        for name, value in constants.items()
        if name != "unrounded"
    }
    constants["two"] = np.ascontiguousarray(
        encode(random.standard_normal((16, 64)).astype(np.float32), stored).decode().T
    )
    constants["small"] = np.ones((2, 3), np.float32)
    return graph(
        [
            node("Conv", ["x", "filters"], ["conv"], pads=[1, 1, 1, 1]),
            node("GlobalAveragePool", ["conv"], ["pool"]),
            node("Flatten", ["pool"], ["flat"]),
            node("MatMul", ["flat", "one"], ["hidden"]),
            node("Gather", ["table", "words"], ["rows"]),
            node("Add", ["hidden", "rows"], ["sum"]),
            node("MatMul", ["sum", "two"], ["coded"]),
            node("MatMul", ["sum", "unrounded"], ["plain"]),
            node("Add", ["coded", "plain"], ["out"]),
        ],
        {"x": (TensorProto.FLOAT, ["n", 4, 8, 8]), "words": (TensorProto.INT64, ["n"])},
        ["out"],
        constants,
    )


FEED = {"x": random.standard_normal((3, 4, 8, 8)).astype(np.float32), "words": np.array([0, 49, 7])}


def run(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    assert [row.name for row in session.get_inputs()] == ["x", "words"]
    return np.asarray(session.run(None, FEED)[0])


@pytest.mark.parametrize("for_people", [False, True])
@pytest.mark.parametrize("stored", FEWER)
def test_the_graph_gives_the_same(stored: Stored, for_people: bool) -> None:
    model = made_of(stored)
    before = run(model)
    size = model.ByteSize()
    coded = code_weights(model, stored, for_people=for_people)
    np.testing.assert_allclose(run(coded), before, rtol=0, atol=1e-5 * np.abs(before).max())
    kinds = {row.name: row.data_type for row in coded.graph.initializer}
    kind = TensorProto.INT8 if stored == "int8" else TensorProto.FLOAT16
    assert all(kinds[f"{name}.codes"] == kind for name in ("filters", "one", "two", "table"))
    assert kinds["unrounded"] == kinds["small"] == TensorProto.FLOAT
    assert coded.ByteSize() < size * (0.5 if stored == "int8" else 0.7)
    assert [row.name for row in coded.graph.input if row.name in ("x", "words")] == ["x", "words"]
    if for_people:
        assert len(coded.graph.input) == 2


def test_of_a_table_only_the_rows_that_are_looked_up_are_decoded() -> None:
    coded = code_weights(made_of("int8"), "int8")
    decoded = {row.input[0] for row in coded.graph.node if row.op_type == "DequantizeLinear"}
    assert decoded == {"filters.codes", "one.codes", "two.codes"}


def test_float32_changes_nothing() -> None:
    model = made_of("int8")
    content = model.SerializeToString()
    assert code_weights(model, "float32").SerializeToString() == content


@pytest.mark.parametrize("stored", FEWER)
def test_the_runtime_does_not_decode_when_it_loads(stored: Stored, tmp_path: Path) -> None:
    """And it decodes each weight just before the operator that reads it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    content = code_weights(made_of(stored), stored).SerializeToString()
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    graph = onnx.load(tmp_path / "optimised.onnx").graph
    decoding = "DequantizeLinear" if stored == "int8" else "Cast"
    assert sum(row.op_type == decoding for row in graph.node) >= 3
    assert not any(row.name in ("filters", "one", "two") for row in graph.initializer)
    places = {name: place for place, row in enumerate(graph.node) for name in row.output}
    product = next(place for place, row in enumerate(graph.node) if "two" in row.input)
    assert product - places["two"] <= 2
