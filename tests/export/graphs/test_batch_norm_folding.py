from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from fleetlearn_export.graphs.batch_norm_folding import fold_batch_norms
from fleetlearn_export.graphs.coded_weights import code_weights
from fleetlearn_export.model.frozen_weights import encode
from graphs import graph
from onnx import TensorProto, helper

random = np.random.default_rng(0)
node = helper.make_node
X = random.standard_normal((3, 4, 8, 8)).astype(np.float32)
NORM = {
    "scale": random.uniform(-2, 2, 16).astype(np.float32),
    "shift": random.standard_normal(16).astype(np.float32),
    "mean": random.standard_normal(16).astype(np.float32),
    "var": random.uniform(0.1, 2, 16).astype(np.float32),
}
WEIGHTS = encode(random.standard_normal((16, 2, 3, 3)).astype(np.float32), "int8").decode()


def made(bias: bool = True, readers: int = 1, inputs: tuple[str, ...] = ()) -> onnx.ModelProto:
    """A grouped convolution and BatchNorm; what ``inputs`` names is an input of the graph, not a
    constant."""
    constants = {
        "w": WEIGHTS,
        **NORM,
        **({"b": random.standard_normal(16).astype(np.float32)} if bias else {}),
    }
    nodes = [
        node(
            "Conv",
            ["x", "w", *(["b"] if bias else [])],
            ["c"],
            group=2,
            pads=[1, 1, 1, 1],
            strides=[2, 2],
        ),
        node("BatchNormalization", ["c", *NORM], ["n"], epsilon=1e-3),
        node("Relu", ["n"], ["r"]),
        *([node("Neg", ["c"], ["other"])] if readers > 1 else []),
    ]
    taken = {name: (TensorProto.FLOAT, list(constants.pop(name).shape)) for name in inputs}
    outputs = ["r", *(["other"] if readers > 1 else [])]
    return graph(nodes, {"x": (TensorProto.FLOAT, ["n", 4, 8, 8]), **taken}, outputs, constants)


def run(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": X})[0])


@pytest.mark.parametrize("bias", [False, True])
def test_the_graph_gives_the_same_without_the_batch_norm(bias: bool) -> None:
    model = made(bias)
    before = run(model)
    folded = fold_batch_norms(model)
    assert [row.op_type for row in folded.graph.node] == ["Conv", "Relu"]
    assert len(folded.graph.initializer) == 2
    np.testing.assert_allclose(run(folded), before, atol=1e-5)


def test_codes_of_rounded_weights_outlast_the_folding() -> None:
    model = made()
    before = run(model)
    folded = code_weights(fold_batch_norms(model), "int8")
    assert [row.op_type for row in folded.graph.node] == ["DequantizeLinear", "Conv", "Relu"]
    np.testing.assert_allclose(run(folded), before, atol=1e-4)


@pytest.mark.parametrize("options", [{"readers": 2}, {"inputs": ("scale",)}, {"inputs": ("w",)}])
def test_what_is_not_folded(options: dict[str, object]) -> None:
    model = made(**options)  # type: ignore[arg-type]
    content = model.SerializeToString()
    assert fold_batch_norms(model).SerializeToString() == content
