"""What is read of an encoded model, against the package onnx."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from fleetlearn_device.runtimes.cuda import encoding
from fleetlearn_device.runtimes.cuda.encoding import Node, fields, tensor
from onnx import TensorProto, helper, numpy_helper


def node_of(*attributes: onnx.AttributeProto) -> Node:
    node = helper.make_node("Some", ["a", ""], ["b"])
    node.attribute.extend(attributes)
    model = helper.make_graph([node], "g", [], []).SerializeToString()
    (field,) = (row for row in fields(model) if row.number == 1)
    return Node(field)


def test_a_node_and_its_attributes() -> None:
    node = node_of(
        helper.make_attribute("whole", -7),
        helper.make_attribute("none", 0),
        helper.make_attribute("part", 0.25),
        helper.make_attribute("row", [3, -1, 300]),
    )
    assert (node.operator, node.inputs, node.outputs) == ("Some", ["a", ""], ["b"])
    assert node.integer("whole", 1) == -7
    assert node.integer("none", 1) == 0
    assert node.integer("other", 1) == 1
    assert node.number("part", 1.0) == 0.25
    assert node.number("other", 1.0) == 1.0
    assert node.integers("row", []) == [3, -1, 300]
    assert node.integers("other", [5]) == [5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 200)])
@pytest.mark.parametrize("raw", [True, False])
def test_tensors(dtype: Any, shape: tuple[int, ...], raw: bool) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype) - 2
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    made = helper.make_tensor(
        "t", kind, shape, values.tobytes() if raw else values.ravel().tolist(), raw
    )
    name, found = tensor(made.SerializeToString())
    assert name == "t"
    if dtype is np.float32 and not raw:
        assert found is None  # nothing reads such constants
    else:
        assert found is not None
        np.testing.assert_array_equal(found, values)
        assert found.dtype == dtype


def test_tensors_that_are_not_read() -> None:
    """Of other dtypes, or with their values in a file."""
    name, found = tensor(numpy_helper.from_array(np.array([True]), "flags").SerializeToString())
    assert (name, found) == ("flags", None)
    outside = TensorProto(
        name="far", data_type=TensorProto.INT64, dims=[4], data_location=TensorProto.EXTERNAL
    )
    outside.external_data.add(key="location", value="frozen.bin")
    assert tensor(outside.SerializeToString()) == ("far", None)


@pytest.mark.parametrize(
    "values", [np.arange(6).reshape(2, 3), np.float32([0.5, -1.5]), np.array(2.5)]
)
def test_what_is_written_is_what_onnx_reads(values: Any) -> None:
    parts = (
        encoding.constant("c", values),
        encoding.node("Op", ["x"], ["y"], encoding.integer("i", -3), encoding.floating("f", 0.1)),
    )
    graph = onnx.GraphProto.FromString(b"".join(parts))
    constant, other = graph.node
    np.testing.assert_array_equal(numpy_helper.to_array(constant.attribute[0].t), values)
    assert constant.output == ["c"]
    assert [helper.get_attribute_value(row) for row in other.attribute] == [-3, pytest.approx(0.1)]
    assert (other.op_type, list(other.input), list(other.output)) == ("Op", ["x"], ["y"])
