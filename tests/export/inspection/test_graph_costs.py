from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_cases import Case, mcmahan_cnn
from fleetlearn_export import ExportError
from fleetlearn_export.inspection import graph_costs
from fleetlearn_export.inspection.graph_costs import Flops
from fleetlearn_protocol.manifest import TRAIN
from graphs import graph
from onnx import TensorProto, helper
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

node = helper.make_node
FLOAT = TensorProto.FLOAT


def train_graph(case: Case) -> onnx.ModelProto:
    return onnx.load_model_from_string(case.exported.bundle.read(TRAIN))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_every_tensor_has_the_shape_and_dtype_of_a_real_run(
    cases: Callable[[str], Case], name: str
) -> None:
    model, data = train_graph(cases(name)), cases(name)
    found = graph_costs.values(model, 7)
    names = [output for row in model.graph.node for output in row.output if output]
    assert {*names, *(row.name for row in model.graph.input)} <= set(found)

    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=output) for output in names)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    vector, table = data.exported.bundle.parameters(), data.exported.bundle.manifest.parameters
    feed: dict[str, Any] = {"batch.x": data.x[:7].numpy(), "batch.y": data.y[:7].numpy()}
    for row in table:
        value = vector[row.offset :][: int(np.prod(row.shape))].reshape(row.shape)
        feed |= {f"param.{row.name}": value, f"anchor.{row.name}": value}
    feed |= {"hyper.lr": np.array(0.1, np.float32), "hyper.mu": np.array(0.1, np.float32)}
    feed = {row.name: feed[row.name] for row in session.get_inputs()}
    for output, value in zip(names, session.run(None, feed), strict=True):
        assert found[output] == (np.shape(value), np.asarray(value).dtype), output


def test_products_along_time() -> None:
    """Seven times: with 9 x 4 and 9 x 3 weights of a GRU, and with 3 x 3 in a Scan."""
    given = [helper.make_tensor_value_info(name, FLOAT, [None, 3]) for name in ("state", "row")]
    made = [helper.make_tensor_value_info(name, FLOAT, [None, 3]) for name in ("next", "all")]
    rows = [
        node("MatMul", ["state", "weight"], ["product"]),
        node("Add", ["product", "row"], ["next"]),
    ]
    body = helper.make_graph([*rows, node("Tanh", ["next"], ["all"])], "body", given, made)
    model = graph(
        [
            node("GRU", ["x", "w", "r"], ["", "last"], hidden_size=3),
            node("Squeeze", ["last", "zero"], ["first"]),
            node("Scan", ["first", "y"], ["end", "states"], body=body, num_scan_inputs=1),
        ],
        {"x": (FLOAT, [7, "n", 4]), "y": (FLOAT, [7, "n", 3])},
        ["end", "states"],
        {
            "w": np.zeros((1, 9, 4), np.float32),
            "r": np.zeros((1, 9, 3), np.float32),
            "weight": np.zeros((3, 3), np.float32),
            "zero": np.zeros(1, np.int64),
        },
    )
    products = 2 * 7 * 10 * (9 * 4 + 9 * 3 + 3 * 3)
    assert graph_costs.flops(model, graph_costs.values(model, 10)) == Flops(products, products)


def test_flops_worked_out_by_hand() -> None:
    model = graph(
        [
            node("Conv", ["x", "w", "b"], ["conv"], pads=[1, 1, 1, 1], group=2),
            node("Relu", ["conv"], ["relu"]),
            node("MaxPool", ["relu"], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Flatten", ["pool"], ["flat"]),
            node("Gemm", ["flat", "v"], ["out"], transB=1),
            node("LogSoftmax", ["out"], ["log"]),
            node("Einsum", ["log", "log"], ["outer"], equation="ni,nj->ij"),
            node("ReduceSum", ["outer"], ["sum"], keepdims=0),
            node("ConvTranspose", ["pool", "t"], ["up"], strides=[2, 2]),
        ],
        {"x": (FLOAT, ["n", 4, 6, 6])},
        ["sum", "up"],
        {
            "w": np.zeros((8, 2, 3, 3), np.float32),
            "b": np.zeros(8, np.float32),
            "v": np.zeros((5, 72), np.float32),
            "t": np.zeros((8, 3, 2, 2), np.float32),
        },
    )
    n = 10
    conv = 2 * (n * 8 * 6 * 6) * (2 * 3 * 3)
    gemm = 2 * n * 5 * 72
    outer = 2 * n * 5 * 5
    up = 2 * (n * 8 * 3 * 3) * (3 * 2 * 2)
    bias, relu, pool, softmax, reduced = n * 8 * 36, n * 8 * 36, 4 * n * 8 * 9, 5 * n * 5, 25
    products = conv + gemm + outer + up
    expected = Flops(products + bias + relu + pool + softmax + reduced, products)
    assert graph_costs.flops(model, graph_costs.values(model, n)) == expected


def test_convolutions_and_matrix_products_count_as_in_pytorch(cases: Callable[[str], Case]) -> None:
    model = mcmahan_cnn()
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(torch.rand(5, 1, 28, 28)), torch.zeros(5, dtype=torch.int64)).backward()
    exported = train_graph(cases("mcmahan"))
    found = graph_costs.flops(exported, graph_costs.values(exported, 5))
    assert found.products == counter.get_total_flops()
    assert found.products < found.total < 1.2 * found.products


def test_lowest_runtime() -> None:
    def lowest(nodes: list[onnx.NodeProto], kind: int = FLOAT, **version: int) -> tuple[str, str]:
        model = graph(nodes, {"x": (kind, ["n", 2])}, ["y"], **version)
        return graph_costs.lowest_runtime(
            model, {"x": graph_costs.ShapeAndDtype((2, 2), np.dtype(np.float64))}
        )

    assert lowest([node("Relu", ["x"], ["y"])]) == ("1.14", "opset 18")
    assert lowest([node("Elu", ["x"], ["y"])]) == ("1.17", "Elu over float64")
    assert lowest([node("Relu", ["x"], ["y"])], opset=20) == ("1.17", "opset 20")
    assert lowest([node("Relu", ["x"], ["y"])], ir=10) == ("1.18", "IR 10")
    with pytest.raises(ValueError, match="opset 21, IR 8: up to opset 20"):
        lowest([node("Relu", ["x"], ["y"])], opset=21)


def test_constants_are_floating_point_tensors() -> None:
    model = graph(
        [node("MatMul", ["x", "w"], ["a"]), node("Reshape", ["a", "s"], ["y"])],
        {"x": (FLOAT, ["n", 3])},
        ["y"],
        {
            "w": np.zeros((3, 4), np.float32),
            "s": np.array([0, 4]),
            "half": np.array(0.5, np.float32),
        },
    )
    assert graph_costs.constants(model) == (12, 1)


def test_a_graph_that_the_installed_runtime_cannot_run_is_an_error() -> None:
    model = graph([node("Elu", ["x"], ["y"])], {"x": (TensorProto.INT64, ["n", 2])}, ["y"])
    with pytest.raises(ExportError, match="cannot run the graph to measure it"):
        graph_costs.values(model, 2)
