from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_export.checks.comparison import open_session
from fleetlearn_export.emission.constants import Constants, is_large, key_of, size_of
from graphs import graph
from onnx import TensorProto, helper, numpy_helper

random = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.bool_, np.int64, np.float64])
def test_a_graph_runs_with_constants_that_are_kept_apart(dtype: type) -> None:
    value = (10 * random.standard_normal((40, 60))).astype(dtype)
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["c", "x"], ["y"]),
    ]
    model = graph(nodes, {"x": (TensorProto.FLOAT, [])}, ["y"], {"w": value})
    whole = model.SerializeToString()
    constants = Constants()
    small = constants.take(model).SerializeToString()
    assert len(small) < 500 < len(whole)
    (row,) = model.graph.initializer
    assert key_of(row) in constants.arrays
    assert size_of(row) == value.nbytes
    np.testing.assert_array_equal(constants.array(row), value)
    session = open_session(small, constants=constants)
    expected = open_session(whole).run({"x": np.float32(2)})["y"]
    np.testing.assert_array_equal(session.run({"x": np.float32(2)})["y"], expected)
    for row in model.graph.initializer:
        row.CopyFrom(numpy_helper.from_array(constants.array(row), row.name))
    assert model.SerializeToString() == whole


def test_equal_constants_are_one_and_lie_where_the_model_has_them() -> None:
    constants = Constants()
    value = random.standard_normal((40, 60)).astype(np.float32)
    rows = [constants.reference(name, value) for name in ("one", "two")]
    other = constants.reference("turned", value.reshape(60, 40))
    assert len(constants.arrays) == 2
    assert all(np.shares_memory(array, value) for array in constants.arrays.values())
    assert set(constants.named([*rows, other])) == {"one", "two", "turned"}


def test_small_constants_stay_in_the_graph() -> None:
    assert is_large(np.zeros(1025, np.float32))
    assert not is_large(np.zeros(1024, np.float32))
    assert not is_large(np.zeros(1025, np.complex64))
    assert key_of(numpy_helper.from_array(np.zeros(1025), "w")) is None
