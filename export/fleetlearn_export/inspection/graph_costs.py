"""The sizes of a graph's tensors, its FLOPs, and the lowest version of ONNX Runtime that can run
it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import NodeProto, helper

from fleetlearn_export.graphs.recompute import words
from fleetlearn_export.model.source_locations import as_export_error

MEASURED_BATCHES = (2, 3)
"""The batch sizes of two runs, which show how every axis grows with the batch."""


PRODUCTS = words("Conv ConvTranspose Einsum Gemm MatMul")
ALONG_TIME = words("GRU LSTM RNN Scan")
MOVES = words(
    "Cast CastLike CenterCropPad Compress Concat Constant ConstantOfShape DepthToSpace Dropout "
    "Expand EyeLike Flatten Gather GatherElements GatherND Identity MaxUnpool NonZero OneHot Pad "
    "Range Reshape ReverseSequence Shape Size Slice SpaceToDepth Split Squeeze Tile Transpose "
    "Trilu Unsqueeze Where"
)
"""Operators that compute nothing: they move, create or select elements."""
REDUCTIONS = words(
    "ArgMax ArgMin CumSum GlobalAveragePool GlobalMaxPool ReduceL1 ReduceMax ReduceMean ReduceMin "
    "ReduceProd ReduceSum TopK"
)
"""Operators that cost 1 for each element of their first input."""
FLOPS_PER_ELEMENT = {
    **dict.fromkeys(("ReduceL2", "ReduceSumSquare"), 2),
    "ReduceLogSumExp": 4,
    **dict.fromkeys(("Softmax", "LogSoftmax"), 5),
    **dict.fromkeys(("BatchNormalization", "HardSwish"), 2),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "LayerNormalization"), 7),
}
"""Operators that cost this many for each element of their first input. A softmax has maximum,
subtraction, exponential, sum and quotient; a normalisation has mean, subtraction, square, mean,
quotient, scale and shift."""

OPSETS_SINCE = {18: (1, 14), 19: (1, 16), 20: (1, 17)}
IRS_SINCE = {8: (1, 14), 9: (1, 15), 10: (1, 18)}
KERNELS_SINCE: dict[tuple[int, int], dict[str, str]] = {
    (1, 17): {
        "float64": "Elu HardSigmoid HardSwish Mish Selu Softplus Softsign ThresholdedRelu",
        "int64": "Relu",
        "float16": "LayerNormalization LogSoftmax Softmax",
    },
    (1, 19): {"bool": "Trilu"},
    (1, 20): {"int64": "ArgMax ArgMin ReduceMean", "uint8": "ArgMin", "float64": "ReduceProd"},
    (1, 21): dict.fromkeys(
        ("uint8", "uint32", "uint64"),
        "Add Div Equal Greater GreaterOrEqual Less LessOrEqual Mul Sub",
    ),
    (1, 24): {"uint8": "Max Min"},
    (1, 29): {"float64": "Cos", "int32": "Trilu"},
}
"""Version of ONNX Runtime -> dtype of the first input -> operators of opset 18 whose CPU kernel it
had first. 1.14 has all other kernels of later versions, except int8, and unsigned integers in a few
operators that move elements.

Found by loading a graph of each operator over each dtype (1478 graphs) in 1.14.0, 1.15.1, 1.16.3,
1.17.3, 1.18.1, 1.19.2, 1.20.1, 1.21.1, 1.22.1, 1.23.2, 1.24.4, 1.26.0, 1.28.0, 1.29.0, 1.30.0 and
1.31.1. 1.13.1 refuses opset 18. The train, eval and infer graphs of the tests' 21 models all ran on
1.14.0 (of npm's onnxruntime-node) and 1.15.1, and a step on those two gave what it gives on 1.31.1,
with differences to 2e-6. OPSETS_SINCE and IRS_SINCE were found the same way."""


class ShapeAndDtype(NamedTuple):
    """The shape and dtype of a tensor of the graph."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Values = Mapping[str, ShapeAndDtype]


class Flops(NamedTuple):
    """Floating-point operations of one run."""

    total: int
    products: int
    """Floating-point operations in convolutions and matrix products."""


def values(model: onnx.ModelProto, batch: int) -> dict[str, ShapeAndDtype]:
    """Return shape and dtype of every tensor at this batch size: inputs, initializers, outputs of
    all operators.

    The graph runs twice, unoptimised, on 2 and on 3 examples of zeros. Each axis is a constant plus
    a multiple of the batch size, so the two runs determine it for every size. An axis that depends
    on the data (NonZero) has its size for zeros. Tensors inside subgraphs (If, Loop, Scan) are left
    out.

    Raises ExportError if the installed ONNX Runtime cannot run the graph.
    """
    names = [name for node in model.graph.node for name in node.output if name]
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # an error is raised, so the log need not say it too
    with as_export_error("ONNX Runtime cannot run the graph to measure it"):
        session = onnxruntime.InferenceSession(
            shown.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        small, larger = (_run(session, names, _zeros(model, size)) for size in MEASURED_BATCHES)
    described = {
        tensor.name: ShapeAndDtype(tuple(tensor.dims), _dtype(tensor.data_type))
        for tensor in model.graph.initializer
    }
    for name, (shape, dtype) in small.items():
        grown = zip(shape, larger[name].shape, strict=True)
        described[name] = ShapeAndDtype(
            tuple(a + (b - a) * (batch - MEASURED_BATCHES[0]) for a, b in grown), dtype
        )
    return described


def _zeros(model: onnx.ModelProto, size: int) -> dict[str, np.ndarray[Any, Any]]:
    constant = {tensor.name for tensor in model.graph.initializer}
    return {
        input_.name: np.zeros(
            [
                axis.dim_value if axis.HasField("dim_value") else size
                for axis in input_.type.tensor_type.shape.dim
            ],
            _dtype(input_.type.tensor_type.elem_type),
        )
        for input_ in model.graph.input
        if input_.name not in constant
    }


def _run(
    session: Any, names: list[str], feed: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, ShapeAndDtype]:
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    outputs = session.run_with_ort_values(names, values)
    return {name: ShapeAndDtype(array.shape, array.dtype) for name, array in feed.items()} | {
        name: ShapeAndDtype(tuple(value.shape()), _dtype(value.element_type()))
        for name, value in zip(names, outputs, strict=True)
        if value.is_tensor()
    }


def _dtype(kind: int) -> np.dtype[Any]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind))


def flops(model: onnx.ModelProto, values: Values) -> Flops:
    """Count the operations of one run; a multiplication with an addition counts as 2.

    Matrix products and convolutions count by their sizes (a bias is 1 for each output element),
    pooling by its window, ``REDUCTIONS`` and ``FLOPS_PER_ELEMENT`` by their first input, ``MOVES``
    nothing. All other operators count 1 for each element of their first output, also if it holds
    integers. Of recurrent operators and Scans the products are counted, those with weights that the
    body of a Scan reads from outside.
    """
    total = products = 0
    for node in model.graph.node:
        if node.op_type in PRODUCTS:
            product = _product_flops(node, values)
            products += product
            bias = len(node.input) > 2 and node.input[2]
            total += product + (prod(values[node.output[0]].shape) if bias else 0)
        elif node.op_type in ALONG_TIME:
            product = _flops_along_time(node, values)
            products, total = products + product, total + product
        else:
            total += _other_flops(node, values)
    return Flops(total, products)


def _product_flops(node: NodeProto, values: Values) -> int:
    """Return the operations of a convolution or matrix product, without its bias."""
    left, *rest = (values[name].shape for name in node.input if name)
    out = values[node.output[0]].shape
    match node.op_type:
        case "Conv":  # weights (out, in / groups, *kernel)
            return 2 * prod(out) * prod(rest[0][1:])
        case "ConvTranspose":  # weights (in, out / groups, *kernel)
            return 2 * prod(left) * prod(rest[0][1:])
        case "Gemm":
            return 2 * prod(out) * left[0 if attribute(node, "transA", 0) else 1]
        case "MatMul":
            return 2 * prod(out) * left[-1]
    terms = attribute(node, "equation", b"").decode().replace(" ", "").split("->")[0].split(",")
    pairs = (
        zip(term, shape, strict=False) for term, shape in zip(terms, (left, *rest), strict=True)
    )
    return 2 * prod(dict(chain.from_iterable(pairs)).values()) if rest else 0


def _flops_along_time(node: NodeProto, values: Values) -> int:
    """Return the operations of the products with weights, which are the same at each time."""
    if node.op_type == "Scan":
        times, examples = values[node.input[-1]].shape[0], values[node.input[0]].shape[0]
        body = attribute(node, "body", None).node
        weights = [
            row.input[1]
            for row in body
            if row.op_type in ("Gemm", "MatMul") and row.input[1] in values
        ]
    else:
        times, examples = values[node.input[0]].shape[:2]
        weights = list(node.input[1:3])
    return 2 * times * examples * sum(prod(values[name].shape) for name in weights)


def _other_flops(node: NodeProto, values: Values) -> int:
    if node.op_type in MOVES or node.output[0] not in values:
        return 0
    if node.op_type in REDUCTIONS or node.op_type in FLOPS_PER_ELEMENT:
        return prod(values[node.input[0]].shape) * FLOPS_PER_ELEMENT.get(node.op_type, 1)
    if node.op_type in ("ScatterElements", "ScatterND"):
        added = attribute(node, "reduction", b"none") != b"none"
        return prod(values[node.input[2]].shape) if added else 0
    window: Sequence[int] = attribute(node, "kernel_shape", ())
    return prod(values[node.output[0]].shape) * prod(window)


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """Return the attribute's value, or ``default`` if the operator has no such attribute."""
    return next(
        (
            helper.get_attribute_value(attribute)
            for attribute in node.attribute
            if attribute.name == name
        ),
        default,
    )


def lowest_runtime(model: onnx.ModelProto, values: Values) -> tuple[str, str]:
    """Return the lowest version of ONNX Runtime (CPU) that runs the graph, such as ``1.14``, and
    the reason for it.

    Raises ValueError on an opset or IR version that this package does not know.
    """
    opset = max(opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx"))
    if opset > max(OPSETS_SINCE) or model.ir_version > max(IRS_SINCE):
        raise ValueError(
            f"opset {opset}, IR {model.ir_version}: up to opset {max(OPSETS_SINCE)} and IR "
            f"{max(IRS_SINCE)} are known"
        )
    needs = [
        (OPSETS_SINCE[max(opset, min(OPSETS_SINCE))], f"opset {opset}"),
        (IRS_SINCE[max(model.ir_version, min(IRS_SINCE))], f"IR {model.ir_version}"),
        *_kernel_needs(model.graph.node, values),
    ]
    version, reason = max(needs, key=lambda row: row[0])
    return ".".join(map(str, version)), reason


def _kernel_needs(
    nodes: Iterable[NodeProto], values: Values
) -> Iterable[tuple[tuple[int, int], str]]:
    since = {
        (kind, dtype): version
        for version, table in KERNELS_SINCE.items()
        for dtype, kinds in table.items()
        for kind in kinds.split()
    }
    for node in nodes:
        if node.input and node.input[0] in values:
            key = node.op_type, values[node.input[0]].dtype.name
            if key in since:
                yield since[key], f"{key[0]} over {key[1]}"


def constants(model: onnx.ModelProto) -> tuple[int, int]:
    """Return elements and number of the constant floating-point tensors with axes: mostly frozen
    parameters."""
    sizes = [
        prod(tensor.dims)
        for tensor in model.graph.initializer
        if tensor.dims and _dtype(tensor.data_type).kind == "f"
    ]
    return sum(sizes), len(sizes)
