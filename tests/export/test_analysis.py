from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_cases import Case, mcmahan_cnn
from fleetlearn_export import ExportError, analysis
from fleetlearn_export.analysis import MIB, Flops
from fleetlearn_protocol.manifest import TRAIN
from onnx import TensorProto, helper
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

DEVICE_PYTHON = Path(__file__).parents[2] / ".venv/device/bin/python"
"""Holds what a device holds: the stock ONNX Runtime, and no PyTorch."""


def graph(
    nodes: Iterable[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: list[str],
    constants: dict[str, np.ndarray[Any, Any]] | None = None,
    opset: int = 18,
    ir: int = 8,
) -> onnx.ModelProto:
    """A model; an axis named ``n`` is the batch's."""
    made = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


node = helper.make_node
FLOAT = TensorProto.FLOAT


def train_graph(case: Case) -> onnx.ModelProto:
    return onnx.load_model_from_string(case.exported.bundle.read(TRAIN))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_every_tensor_has_the_shape_and_dtype_of_a_real_run(cases: Callable[[str], Case], name: str) -> None:
    model, data = train_graph(cases(name)), cases(name)
    found = analysis.values(model, 7)
    names = [output for row in model.graph.node for output in row.output if output]
    assert {*names, *(row.name for row in model.graph.input)} <= set(found)

    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=output) for output in names)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    vector, table = data.exported.bundle.parameters(), data.exported.bundle.manifest.parameters
    feed: dict[str, Any] = {"batch.x": data.x[:7].numpy(), "batch.y": data.y[:7].numpy()}
    for row in table:
        value = vector[row.offset :][: int(np.prod(row.shape))].reshape(row.shape)
        feed |= {f"param.{row.name}": value, f"anchor.{row.name}": value}
    feed |= {"hyper.lr": np.array(0.1, np.float32), "hyper.mu": np.array(0.1, np.float32)}
    feed = {row.name: feed[row.name] for row in session.get_inputs()}
    for output, value in zip(names, session.run(None, feed), strict=True):
        assert found[output] == (np.shape(value), np.asarray(value).dtype), output


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
    assert analysis.flops(model, analysis.values(model, n)) == expected


def test_convolutions_and_matrix_products_count_as_in_pytorch(cases: Callable[[str], Case]) -> None:
    model = mcmahan_cnn()
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(torch.rand(5, 1, 28, 28)), torch.zeros(5, dtype=torch.int64)).backward()
    exported = train_graph(cases("mcmahan"))
    found = analysis.flops(exported, analysis.values(exported, 5))
    assert found.products == counter.get_total_flops()
    assert found.products < found.total < 1.2 * found.products


def test_peak_of_intermediates_worked_out_by_hand() -> None:
    """1 unit = 1024 bytes: x (n, 256) with one example."""
    model = graph(
        [
            node("MatMul", ["x", "w"], ["a"]),  # a: 2 units; alive to the end
            node("Relu", ["a"], ["b"]),  # not in place, a is read later: 4 units
            node("Tanh", ["b"], ["c"]),  # in place
            node("Reshape", ["c", "s"], ["d"]),  # the same memory
            node("Concat", ["d", "d"], ["e"], axis=1),  # 4 more: 8 units
            node("ReduceSum", ["e"], ["f"], keepdims=1),  # 256 bytes, rounded up
            node("Add", ["a", "f"], ["g"]),  # an output, which the device has memory for
        ],
        {"x": (FLOAT, ["n", 256])},
        ["g"],
        {"w": np.zeros((256, 512), np.float32), "s": np.array([0, -1])},
    )
    assert analysis.peak_of_intermediates(model, analysis.values(model, 1)) == 8 * 1024 + 256 - 256
    assert analysis.peak_of_intermediates(model, analysis.values(model, 3)) == 3 * 8 * 1024


def test_a_transposition_inside_a_product_and_a_convolutions_workspace() -> None:
    matrices = [node("Transpose", ["w"], ["v"], perm=[1, 0]), node("MatMul", ["x", "v"], ["y"])]
    inputs = {"x": (FLOAT, ["n", 64]), "w": (FLOAT, [32, 64])}
    model = graph(matrices, inputs, ["y"])
    assert analysis.peak_of_intermediates(model, analysis.values(model, 4)) == 0
    model = graph([*matrices, node("Relu", ["v"], ["z"])], inputs, ["y", "z"])
    assert analysis.peak_of_intermediates(model, analysis.values(model, 4)) == 4 * 32 * 64

    for filters, expected in ((16, 4 * 9 * (3 * 4)), (8, 0)):  # more, or fewer, than the 9 places
        convolution = graph(
            [node("Conv", ["x", "w"], ["y"])],
            {"x": (FLOAT, ["n", 3, 4, 4]), "w": (FLOAT, [filters, 3, 2, 2])},
            ["y"],
        )
        assert analysis.peak_of_intermediates(convolution, analysis.values(convolution, 2)) == expected


MEASURE = """
import json, sys
import numpy as np
from fleetlearn_device import open_runtime
runtime, random = open_runtime(sys.argv[1], kind="onnx"), np.random.default_rng(0)
shapes = [((int(sys.argv[2]), *row.shape), row.dtype) for row in runtime.manifest.batch]
batch = tuple(random.random(shape, np.float32) if dtype == "float32" else random.integers(0, 10, shape)
              for shape, dtype in shapes)
for _ in range(4):
    runtime.step(batch, lr=0.01)
status = dict(line.split(":") for line in open("/proc/self/status"))
print(json.dumps(1024 * int(status["VmHWM"].split()[0])))
"""


@pytest.mark.skipif(not DEVICE_PYTHON.exists(), reason="there is no .venv/device with the stock ONNX Runtime")
@pytest.mark.parametrize("batch", [20, 100])
@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn", "mcmahan"])
def test_memory_is_within_a_quarter_of_what_is_measured(cases: Callable[[str], Case], name: str, batch: int) -> None:
    bundle, model = cases(name).exported.bundle, train_graph(cases(name))
    done = subprocess.run(
        [str(DEVICE_PYTHON), "-c", MEASURE, str(bundle.path), str(batch)], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout)
    estimate = analysis.memory(bundle.manifest, model, analysis.values(model, batch))
    assert estimate.total == pytest.approx(measured, rel=0.25), estimate
    if name == "mcmahan":
        above = estimate.total - analysis.BASE
        assert above == pytest.approx(measured - analysis.BASE, rel=0.35), (above / MIB, measured / MIB)


def test_lowest_runtime() -> None:
    def lowest(nodes: list[onnx.NodeProto], kind: int = FLOAT, **version: int) -> tuple[str, str]:
        model = graph(nodes, {"x": (kind, ["n", 2])}, ["y"], **version)
        return analysis.lowest_runtime(model, {"x": analysis.Value((2, 2), np.dtype(np.float64))})

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
        {"w": np.zeros((3, 4), np.float32), "s": np.array([0, 4]), "half": np.array(0.5, np.float32)},
    )
    assert analysis.constants(model) == (12, 1)


def test_a_graph_that_the_installed_runtime_cannot_run_is_an_error() -> None:
    model = graph([node("Elu", ["x"], ["y"])], {"x": (TensorProto.INT64, ["n", 2])}, ["y"])
    with pytest.raises(ExportError, match="cannot run the graph to measure it"):
        analysis.values(model, 2)
