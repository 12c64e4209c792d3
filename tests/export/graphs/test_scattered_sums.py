from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from fleetlearn_export.graphs.scattered_sums import scatter_into_sums
from graphs import graph
from onnx import NodeProto, TensorProto, helper

random = np.random.default_rng(0)
SHAPE = [7, 3]
INPUTS = {
    "p": (TensorProto.FLOAT, SHAPE),
    "lr": (TensorProto.FLOAT, []),
    "bias": (TensorProto.FLOAT, [3]),
    "i": (TensorProto.INT64, ["n", 3]),
    "u": (TensorProto.FLOAT, ["n", 3]),
}
FEED = {
    "p": random.standard_normal(SHAPE).astype(np.float32),
    "lr": np.array(0.3, np.float32),
    "bias": random.standard_normal(3).astype(np.float32),
    "i": np.repeat(np.array([[2], [5], [-5], [0]]), 3, 1),  # row 2 twice
    "u": random.standard_normal((4, 3)).astype(np.float32),
}
node = helper.make_node


def rows(name: str, of: str = "zeros", updates: str = "u", reduction: str = "add") -> NodeProto:
    return node("ScatterElements", [of, "i", updates], [name], axis=0, reduction=reduction)


def made(nodes: list[NodeProto], *outputs: str, zero: float = 0.0) -> onnx.ModelProto:
    constants = {"zero": np.array(zero, np.float32), "shape": np.array(SHAPE)}
    before = [node("Expand", ["zero", "shape"], ["zeros"]), node("Mul", ["p", "p"], ["square"])]
    return graph([*before, *nodes], INPUTS, list(outputs), constants)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return [np.asarray(row) for row in session.run(None, FEED)]


def changed(model: onnx.ModelProto) -> Counter[str]:
    """Return the operators of the changed graph, which gives what it gave."""
    before = run(model)
    scatter_into_sums(model)
    for one, other in zip(run(model), before, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    return Counter(row.op_type for row in model.graph.node)


STEP = [rows("g"), node("Mul", ["lr", "g"], ["move"]), node("Sub", ["p", "move"], ["out"])]


def test_a_step_adds_rows_to_the_parameter() -> None:
    assert changed(made(STEP, "out")) == {"Neg": 1, "Mul": 1, "ScatterElements": 1}


@pytest.mark.parametrize(
    ("nodes", "operators"),
    [
        ([rows("g"), node("Add", ["g", "square"], ["out"])], {"Mul": 1, "ScatterElements": 1}),
        ([rows("g"), node("Add", ["square", "g"], ["out"])], {"Mul": 1, "ScatterElements": 1}),
        ([rows("g"), node("Sub", ["p", "g"], ["out"])], {"Neg": 1, "ScatterElements": 1}),
        ([rows("g"), rows("h", "g"), node("Add", ["h", "p"], ["out"])], {"ScatterElements": 2}),
        (
            [rows("g"), rows("h", updates="twice"), node("Add", ["g", "h"], ["both"]), *STEP[1:]],
            {"Add": 1, "Neg": 1, "Mul": 2, "ScatterElements": 2},
        ),
    ],
)
def test_rows_are_added_to_any_sum(nodes: list[NodeProto], operators: dict[str, int]) -> None:
    """One row of an index twice, one tensor of zeros for two gradients, a gradient that has two
    parts."""
    if any("twice" in row.input for row in nodes):
        nodes = [node("Add", ["u", "u"], ["twice"]), *nodes]
        nodes[-2] = node("Mul", ["lr", "both"], ["move"])
    assert changed(made(nodes, "out")) == operators


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (STEP, ("out", "g")),
        ([*STEP, node("ReduceMax", ["g"], ["largest"])], ("out", "largest")),
        ([rows("g"), node("Add", ["g", "bias"], ["out"])], ("out",)),
        (
            [rows("g"), node("Mul", ["bias", "g"], ["move"]), node("Sub", ["p", "move"], ["out"])],
            ("out",),
        ),
        ([rows("g"), node("Sub", ["g", "p"], ["out"])], ("out",)),
        ([rows("g", reduction="max"), *STEP[1:]], ("out",)),
        ([rows("g", "p"), *STEP[1:]], ("out",)),
        ([rows("g"), node("Mul", ["g", "lr"], ["m"]), node("Mul", ["m", "lr"], ["out"])], ("out",)),
    ],
)
def test_other_graphs_stay(nodes: list[NodeProto], outputs: tuple[str, ...]) -> None:
    """Gradients that others read too, sums and factors of another shape, rows that are not added,
    or not to zeros."""
    model = made(nodes, *outputs)
    del model.graph.node[1]  # the square
    before = Counter(row.op_type for row in model.graph.node)
    assert changed(model) == before


def test_ones_stay() -> None:
    assert changed(made(STEP, "out", zero=1.0))["Sub"] == 1
