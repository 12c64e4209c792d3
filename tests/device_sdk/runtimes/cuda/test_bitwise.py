"""Bitwise operators as they are rewritten for CUDA: on ONNX Runtime's CPU, against numpy and the
original operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from fleetlearn_device.runtimes.cuda.graphs import for_cuda
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

WORD = 2**32 - 1
Nodes = list[onnx.NodeProto]


def graph_of(
    nodes: Nodes, inputs: list[str], constants: dict[str, Any], name: str = "words"
) -> onnx.GraphProto:
    result = nodes[-1].output[0]
    return helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(row, TensorProto.INT64, None) for row in inputs],
        [helper.make_tensor_value_info(result, TensorProto.INT64, None)],
        [numpy_helper.from_array(np.asarray(value), row) for row, value in constants.items()],
    )


def model_of(graph: onnx.GraphProto) -> bytes:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return bytes(model.SerializeToString())


def operators(model: bytes) -> set[str]:
    return {node.op_type for node in onnx.load_from_string(model).graph.node}


def run(model: bytes, **inputs: NDArray[Any]) -> NDArray[Any]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, inputs)
    return np.asarray(found)


def rewritten(model: bytes) -> bytes:
    found = for_cuda(model)
    assert found is not None
    return found


def shifted(value: str, by: int, result: str) -> tuple[Nodes, dict[str, Any]]:
    """Return nodes that shift right, as bundles do: by a product in float64."""
    factor = f"{result}.factor"
    nodes = [
        helper.make_node("Cast", [value], [f"{result}.double"], to=TensorProto.DOUBLE),
        helper.make_node("Mul", [f"{result}.double", factor], [f"{result}.product"]),
        helper.make_node("Cast", [f"{result}.product"], [result], to=TensorProto.INT64),
    ]
    return nodes, {factor: 2.0**-by}


def xor_model() -> bytes:
    masked = [
        helper.make_node("BitwiseAnd", [name, "mask"], [f"{name}.word"]) for name in ("a", "b")
    ]
    node = helper.make_node("BitwiseXor", ["a.word", "b.word"], ["c"])
    return model_of(graph_of([*masked, node], ["a", "b"], {"mask": WORD}))


XOR = rewritten(xor_model())
INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(INT64, INT64), min_size=1, max_size=20))
def test_xor_of_two_words(pairs: list[tuple[int, int]]) -> None:
    """The lowest 32 bits of any integers, those below 0 too."""
    a, b = np.array(pairs, np.int64).T
    np.testing.assert_array_equal(run(XOR, a=a, b=b), (a & WORD) ^ (b & WORD))


def test_no_bitwise_operator_is_left() -> None:
    assert not {row for row in operators(XOR) if row.startswith("Bitwise")}


@pytest.mark.parametrize("by", [1, 5, 14, 15, 16, 23, 24, 31])
@pytest.mark.parametrize("swapped", [False, True])
def test_xor_of_a_word_with_itself_shifted(by: int, swapped: bool) -> None:
    shift, constants = shifted("w", by, "s")
    both = ["s", "w"] if swapped else ["w", "s"]
    nodes = [
        helper.make_node("BitwiseAnd", ["mask", "x"], ["w"]),
        *shift,
        helper.make_node("BitwiseXor", both, ["c"]),
    ]
    model = rewritten(model_of(graph_of(nodes, ["x"], constants | {"mask": WORD})))
    assert not {row for row in operators(model) if row.startswith("Bitwise")}
    drawn = np.random.default_rng(by).integers(0, 2**32, [50, 40])
    x = np.concatenate([drawn.ravel(), [0, 1, WORD, 2**31, 2**16, 2**18 - 1, 2**18, 511, 512]])
    np.testing.assert_array_equal(run(model, x=x), x ^ (x >> by))


def test_words_of_the_seed() -> None:
    """Its lower and its upper part, which is below 2^21, and a constant."""
    shift, constants = shifted("seed", 32, "upper")
    nodes = [
        helper.make_node("BitwiseAnd", ["seed", "mask"], ["lower"]),
        *shift,
        helper.make_node("BitwiseXor", ["lower", "golden"], ["mixed"]),
        helper.make_node("BitwiseXor", ["mixed", "upper"], ["c"]),
    ]
    model = model_of(graph_of(nodes, ["seed"], constants | {"mask": WORD, "golden": 0x9E3779B1}))
    assert "BitwiseXor" not in operators(rewritten(model))
    for seed in (0, 1, 2**53 - 1, 2**40 + 12345):
        assert run(rewritten(model), seed=np.array(seed)) == (seed & WORD) ^ 0x9E3779B1 ^ (
            seed >> 32
        )


@pytest.mark.parametrize("bits", [1, 16, 31, 32, 40])
def test_and_with_ones(bits: int) -> None:
    mask = 2**bits - 1
    node = helper.make_node("BitwiseAnd", ["x", "mask"], ["c"])
    model = rewritten(model_of(graph_of([node], ["x"], {"mask": mask})))
    assert operators(model) == {"Constant", "Mod"}
    x = np.array([0, 5, -1, -5, mask, mask + 1, -mask - 1, 2**63 - 1, -(2**63)])
    np.testing.assert_array_equal(run(model, x=x), x & mask)


@pytest.mark.parametrize(
    ("operator", "mask"),
    [
        ("BitwiseAnd", 6),
        ("BitwiseAnd", -6),
        ("BitwiseAnd", 2**63 - 1),
        ("BitwiseAnd", -(2**63)),
        ("BitwiseAnd", [255]),
        ("BitwiseAnd", [1, 3]),
        ("BitwiseXor", 1),
        ("BitwiseXor", -1),
    ],
)
def test_what_cannot_be_known_to_be_right_stays(operator: str, mask: Any) -> None:
    """Other masks, masks that change the shape, and integers that may be below 0."""
    node = helper.make_node(operator, ["x", "mask"], ["c"])
    model = model_of(graph_of([node], ["x"], {"mask": mask}))
    assert for_cuda(model) == model


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bits", [0, 1, 8, 30])
def test_and_without_the_lowest_bits(bits: int, dtype: Any) -> None:
    """As bundles round uniform numbers: in int32."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    mask = np.array(-(2**bits), dtype)
    graph = helper.make_graph(
        [helper.make_node("BitwiseAnd", ["mask", "x"], ["c"])],
        "lowest",
        [helper.make_tensor_value_info("x", kind, None)],
        [helper.make_tensor_value_info("c", kind, None)],
        [numpy_helper.from_array(mask, "mask")],
    )
    model = rewritten(model_of(graph))
    assert operators(model) == {"Constant", "Mod", "Sub"}
    limits = np.iinfo(dtype)
    x = np.array([0, 1, -1, 255, 256, -255, -256, 2**30, limits.max, limits.min], dtype)
    np.testing.assert_array_equal(run(model, x=x), x & mask)


def test_a_word_with_a_constant_below_0_or_of_several_values() -> None:
    masked = helper.make_node("BitwiseAnd", ["x", "mask"], ["w"])
    node = helper.make_node("BitwiseXor", ["w", "others"], ["c"])
    x = np.array([7, 2**40 + 3, -5])
    for others, stays in (([1, -1, 2], True), ([5, 2**31, WORD], False)):
        model = rewritten(
            model_of(graph_of([masked, node], ["x"], {"mask": WORD, "others": others}))
        )
        assert ("BitwiseXor" in operators(model)) == stays
        np.testing.assert_array_equal(run(model, x=x), (x & WORD) ^ np.array(others))


def test_ranges_that_float64_rounds_are_not_followed() -> None:
    """2^57 - 1 becomes 2^57 in float64: shifted right by 30 bits it is not below 2^27."""
    shift, constants = shifted("w", 30, "s")
    masked = helper.make_node("BitwiseAnd", ["x", "mask"], ["w"])
    low = helper.make_node("BitwiseAnd", ["x", "word"], ["v"])
    node = helper.make_node("BitwiseXor", ["v", "s"], ["c"])
    constants |= {"mask": 2**57 - 1, "word": WORD}
    model = rewritten(model_of(graph_of([masked, *shift, low, node], ["x"], constants)))
    assert "BitwiseXor" in operators(model)


def test_only_the_graphs_input_is_the_seed() -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["seed"]),
        helper.make_node("BitwiseXor", ["seed", "one"], ["c"]),
    ]
    model = model_of(graph_of(nodes, ["x"], {"one": 1}))
    assert for_cuda(model) == model


def test_other_products_and_casts_are_no_shifts() -> None:
    """A factor of 3, a factor above 1, and float32, which rounds."""
    for factor, dtype in (
        (3.0, TensorProto.DOUBLE),
        (2.0, TensorProto.DOUBLE),
        (0.5, TensorProto.FLOAT),
    ):
        constant = np.array(factor, helper.tensor_dtype_to_np_dtype(dtype))
        nodes = [
            helper.make_node("BitwiseAnd", ["x", "mask"], ["w"]),
            helper.make_node("Cast", ["w"], ["d"], to=dtype),
            helper.make_node("Mul", ["factor", "d"], ["p"]),
            helper.make_node("Cast", ["p"], ["s"], to=TensorProto.INT64),
            helper.make_node("BitwiseXor", ["w", "s"], ["c"]),
        ]
        model = model_of(graph_of(nodes, ["x"], {"factor": constant, "mask": WORD}))
        assert "BitwiseXor" in operators(rewritten(model))


def test_graphs_in_a_graph_have_constants_of_their_own() -> None:
    """Names in a graph may not be those of the graph around it."""

    def inner(name: str) -> onnx.GraphProto:
        masked = helper.make_node("BitwiseAnd", ["x", "mask"], [f"{name}.w"])
        node = helper.make_node("BitwiseXor", [f"{name}.w", "golden"], [f"{name}.c"])
        return graph_of([masked, node], [], {}, name)

    nodes = [
        helper.make_node("BitwiseAnd", ["x", "mask"], ["w"]),
        helper.make_node("BitwiseXor", ["w", "golden"], ["v"]),
        helper.make_node(
            "If", ["flag"], ["u"], then_branch=inner("then"), else_branch=inner("else")
        ),
        helper.make_node("Sub", ["u", "v"], ["c"]),
    ]
    graph = graph_of(nodes, ["x"], {"mask": WORD, "golden": 12345, "flag": True})
    model = rewritten(model_of(graph))
    assert b"Bitwise" not in model
    assert run(model, x=np.array([1, 2, 3])).tolist() == [0, 0, 0]
