"""What a training graph costs, and which ONNX Runtime can run it: shapes, FLOPs, peak memory, lowest version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from fleetlearn_protocol import Manifest
from onnx import NodeProto, helper

from fleetlearn_export.places import explained

SIZES = (2, 3)
"""Batch sizes of the two runs that show how every axis grows with the batch."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MIB = 2**20
BASE = 67 * MIB
"""Python 3.11, numpy, ONNX Runtime 1.31.1 and fleetlearn_device after the first step of a tiny model, on x86-64
Linux: resident bytes, measured; 54 MiB of them are there once the packages are imported."""
BYTES_OF_A_NODE = 4096
"""What a session keeps for each operator, measured on graphs of 50 to 720 operators."""
COPIES_OF_CONSTANTS = 2
"""The graph's initializers: the session's own, and the file's while it is read."""
COPIES_OF_INTERMEDIATES = 2
"""The first step allocates each value by itself. From the second on ONNX Runtime has a plan of them all and takes one
block for it (its memory pattern), while its arena keeps what the first step had."""
ROUNDING = 256
"""ONNX Runtime's arena allocates multiples of so many bytes."""

PRODUCTS = _names("Conv ConvTranspose Einsum Gemm MatMul")
MOVES = _names(
    "Cast CastLike CenterCropPad Compress Concat Constant ConstantOfShape DepthToSpace Dropout Expand EyeLike Flatten "
    "Gather GatherElements GatherND Identity MaxUnpool NonZero OneHot Pad Range Reshape ReverseSequence Shape Size "
    "Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze Where"
)
"""Operators that compute nothing: they move, make or choose elements."""
PER_INPUT = _names(
    "ArgMax ArgMin CumSum GlobalAveragePool GlobalMaxPool ReduceL1 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "TopK"
)
"""Reductions: 1 for each element of what is reduced."""
SEVERAL = {
    **dict.fromkeys(("ReduceL2", "ReduceSumSquare"), 2),
    "ReduceLogSumExp": 4,
    **dict.fromkeys(("Softmax", "LogSoftmax"), 5),
    **dict.fromkeys(("BatchNormalization", "HardSwish"), 2),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "LayerNormalization"), 7),
}
"""So many for each element of the first input: maximum, subtraction, exponential, sum and quotient of a softmax; mean,
subtraction, square, mean, quotient, scale and shift of a normalisation."""

ALIASES = _names("Flatten Identity Reshape Squeeze Unsqueeze")
"""Operators whose output is their input's memory."""
IN_PLACE = _names(
    "Abs Add And Clip Div Elu Erf Exp HardSigmoid LeakyRelu Log Mul Neg Not Or Pow Reciprocal Relu Sigmoid Softplus "
    "Sqrt Sub Sum Tanh"
)
"""Operators that may write into an input of the same size which nothing reads after them."""

OPSETS = {18: (1, 14), 19: (1, 16), 20: (1, 17)}
IRS = {8: (1, 14), 9: (1, 15), 10: (1, 18)}
KERNELS: dict[tuple[int, int], dict[str, str]] = {
    (1, 17): {
        "float64": "Elu HardSigmoid HardSwish Mish Selu Softplus Softsign ThresholdedRelu",
        "int64": "Relu",
        "float16": "LayerNormalization LogSoftmax Softmax",
    },
    (1, 19): {"bool": "Trilu"},
    (1, 20): {"int64": "ArgMax ArgMin ReduceMean", "uint8": "ArgMin", "float64": "ReduceProd"},
    (1, 21): dict.fromkeys(
        ("uint8", "uint32", "uint64"), "Add Div Equal Greater GreaterOrEqual Less LessOrEqual Mul Sub"
    ),
    (1, 24): {"uint8": "Max Min"},
    (1, 29): {"float64": "Cos", "int32": "Trilu"},
}
"""The first ONNX Runtime that has a kernel on the CPU for an operator of opset 18 over a dtype (of its first input).
1.14 has every other one that later ones have (int8 apart, and unsigned integers in a few operators that move elements).

Found by loading a graph of each operator over each dtype (1478 graphs) in 1.14.0, 1.15.1, 1.16.3, 1.17.3, 1.18.1,
1.19.2, 1.20.1, 1.21.1, 1.22.1, 1.23.2, 1.24.4, 1.26.0, 1.28.0, 1.29.0, 1.30.0 and 1.31.1. 1.13.1 refuses opset 18. The
train, eval and infer graphs of the tests' 21 models all ran on 1.14.0 (of npm's onnxruntime-node) and 1.15.1, and a
step on those two gave what it gives on 1.31.1, with differences to 2e-6. OPSETS and IRS were found with one operator in the same way."""


class Value(NamedTuple):
    """A tensor in the graph."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Values = Mapping[str, Value]


class Flops(NamedTuple):
    """Operations of one run."""

    total: int
    products: int
    """Of them, in convolutions and matrix products."""


class Memory(NamedTuple):
    """An estimate of a device's resident bytes at the peak of a step, by what they are for."""

    runtime: int
    """Python, numpy and ONNX Runtime (BASE), and the session of this graph."""
    vectors: int
    """Parameters, references and state, each a flat vector, and the batch."""
    constants: int
    """Frozen parameters and other constant tensors of the graph."""
    intermediates: int
    """What the operators hand to one another."""

    @property
    def total(self) -> int:
        return sum(self)


def values(model: onnx.ModelProto, batch: int) -> dict[str, Value]:
    """Shape and dtype of every tensor of the graph at this batch size: inputs, initializers, outputs of all operators.

    The graph runs twice, unoptimised, on batches of 2 and 3 examples of zeros, which works whatever operators it has;
    each axis is a constant plus a multiple of the batch size, so the two tell it for all. An axis that depends on the
    data (NonZero) is as it is for zeros; tensors inside subgraphs (If, Loop, Scan) are not there.

    Raises ExportError: the ONNX Runtime that is installed cannot run the graph.
    """
    names = [name for node in model.graph.node for name in node.output if name]
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails raises
    with explained("ONNX Runtime cannot run the graph to measure it"):
        session = onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
        small, larger = (_run(session, names, _zeros(model, size)) for size in SIZES)
    found = {row.name: Value(tuple(row.dims), _dtype(row.data_type)) for row in model.graph.initializer}
    for name, (shape, dtype) in small.items():
        grown = zip(shape, larger[name].shape, strict=True)
        found[name] = Value(tuple(a + (b - a) * (batch - SIZES[0]) for a, b in grown), dtype)
    return found


def _zeros(model: onnx.ModelProto, size: int) -> dict[str, np.ndarray[Any, Any]]:
    constant = {row.name for row in model.graph.initializer}
    return {
        row.name: np.zeros(
            [axis.dim_value if axis.HasField("dim_value") else size for axis in row.type.tensor_type.shape.dim],
            _dtype(row.type.tensor_type.elem_type),
        )
        for row in model.graph.input
        if row.name not in constant
    }


def _run(session: Any, names: list[str], feed: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Value]:
    given = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feed.items()}
    outputs = session.run_with_ort_values(names, given)
    return {name: Value(array.shape, array.dtype) for name, array in feed.items()} | {
        name: Value(tuple(value.shape()), _dtype(value.element_type()))
        for name, value in zip(names, outputs, strict=True)
        if value.is_tensor()
    }


def _dtype(kind: int) -> np.dtype[Any]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind))


def flops(model: onnx.ModelProto, values: Values) -> Flops:
    """Floating-point operations of one run, a multiplication with an addition being 2.

    Matrix products and convolutions by their sizes (a bias is 1 for each output element), pooling by its window,
    reductions by what they read (``PER_INPUT``, ``SEVERAL``), moves nothing (``MOVES``), all others 1 for each element
    of the first output, integers too.
    """
    total = products = 0
    for node in model.graph.node:
        if node.op_type in PRODUCTS:
            product = _product(node, values)
            products += product
            bias = len(node.input) > 2 and node.input[2]
            total += product + (prod(values[node.output[0]].shape) if bias else 0)
        else:
            total += _others(node, values)
    return Flops(total, products)


def _product(node: NodeProto, values: Values) -> int:
    """Of a convolution or matrix product, without its bias."""
    left, *rest = (values[name].shape for name in node.input if name)
    out = values[node.output[0]].shape
    match node.op_type:
        case "Conv":  # weights (out, in / groups, *kernel)
            return 2 * prod(out) * prod(rest[0][1:])
        case "ConvTranspose":  # weights (in, out / groups, *kernel)
            return 2 * prod(left) * prod(rest[0][1:])
        case "Gemm":
            return 2 * prod(out) * left[0 if _attribute(node, "transA", 0) else 1]
        case "MatMul":
            return 2 * prod(out) * left[-1]
    terms = _attribute(node, "equation", b"").decode().replace(" ", "").split("->")[0].split(",")
    pairs = (zip(term, shape, strict=False) for term, shape in zip(terms, (left, *rest), strict=True))
    return 2 * prod(dict(chain.from_iterable(pairs)).values()) if rest else 0


def _others(node: NodeProto, values: Values) -> int:
    if node.op_type in MOVES or node.output[0] not in values:
        return 0
    if node.op_type in PER_INPUT or node.op_type in SEVERAL:
        return prod(values[node.input[0]].shape) * SEVERAL.get(node.op_type, 1)
    if node.op_type in ("ScatterElements", "ScatterND"):
        added = _attribute(node, "reduction", b"none") != b"none"
        return prod(values[node.input[2]].shape) if added else 0
    window: Sequence[int] = _attribute(node, "kernel_shape", ())
    return prod(values[node.output[0]].shape) * prod(window)


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(row) for row in node.attribute if row.name == name), default)


def memory(manifest: Manifest, model: onnx.ModelProto, values: Values) -> Memory:
    """Peak resident bytes of a process that trains the bundle with fleetlearn_device's runtime ``onnx``, one thread.

    An estimate: the tests hold it within 25 % of what is measured on x86-64 Linux. ``values`` carry the batch size.
    """
    elements = 2 * manifest.local_size + len(manifest.references) * manifest.size + 2 * manifest.state_size
    batch = sum(values[f"batch.{row.name}"].bytes for row in manifest.batch if f"batch.{row.name}" in values)
    return Memory(
        runtime=BASE + BYTES_OF_A_NODE * len(model.graph.node),
        vectors=4 * elements + batch,
        constants=COPIES_OF_CONSTANTS * sum(values[row.name].bytes for row in model.graph.initializer),
        intermediates=COPIES_OF_INTERMEDIATES * peak_of_intermediates(model, values),
    )


def peak_of_intermediates(model: onnx.ModelProto, values: Values) -> int:
    """Most bytes that lie between operators at one time: from the operator that makes a tensor to its last reader.

    Inputs, constants and outputs of the graph do not count (the device binds memory of its own to them). As in ONNX
    Runtime, reshapes share memory, elementwise operators write over an input that nobody reads after them, and a
    transposition which only matrix products read becomes a part of these. A convolution's workspace counts.
    """
    nodes = _in_order_of_execution(model)
    last = {name: place for place, node in enumerate(nodes) for name in node.input}
    readers: dict[str, set[str]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    outputs = {row.name for row in model.graph.output}
    owner: dict[str, str] = {}
    """Of a tensor that lives: whose memory it is in."""
    sharing: dict[str, int] = {}
    """Of memory: how many tensors are in it."""
    now = peak = 0
    for place, node in enumerate(nodes):
        dying = [name for name in dict.fromkeys(node.input) if name in owner and last[name] == place]
        made = [name for name in node.output if name in values and name not in outputs]
        if node.op_type == "Constant" or (_is_view(node, readers) and node.input[0] not in owner):
            made = []  # constants, and views of what the device binds
        for name in made:
            shared = node.input[0] if _is_view(node, readers) else None
            if node.op_type in IN_PLACE:
                free = (row for row in dying if sharing[owner[row]] == 1 and values[row].bytes == values[name].bytes)
                shared = next(free, None)
            owner[name] = owner[shared] if shared else name
            sharing[owner[name]] = sharing.get(owner[name], 0) + 1
            now += 0 if shared else _allocated(values[name].bytes)
        peak = max(peak, now + _workspace(node, values))
        for name in (*dying, *(row for row in made if row not in last)):
            memory = owner.pop(name)
            sharing[memory] -= 1
            if not sharing[memory]:
                now -= _allocated(values[memory].bytes)
    return peak


def _is_view(node: NodeProto, readers: Mapping[str, set[str]]) -> bool:
    if node.op_type == "Transpose":
        return readers.get(node.output[0], {"none"}) <= {"MatMul", "Gemm"}
    return node.op_type in ALIASES


def _allocated(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def _in_order_of_execution(model: onnx.ModelProto) -> list[NodeProto]:
    """ONNX Runtime's order: depth first from the operators that nobody reads, each after all that it reads."""
    nodes = model.graph.node
    maker = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    read = {name for node in nodes for name in node.input}
    order, seen = [], set()
    stack = [(place, False) for place, node in enumerate(nodes) if read.isdisjoint(node.output)][::-1]
    while stack:
        place, done = stack.pop()
        if done:
            order.append(nodes[place])
        elif place not in seen:
            seen.add(place)
            stack.append((place, True))
            stack += ((maker[name], False) for name in nodes[place].input if name in maker)
    return order


def _workspace(node: NodeProto, values: Values) -> int:
    """Bytes that a convolution unfolds its input into (MLAS does so for all of one image where it has more filters
    than output places; ConvTranspose always)."""
    if node.op_type not in ("Conv", "ConvTranspose"):
        return 0
    image, weights = (values[name] for name in node.input[:2])
    if node.op_type == "ConvTranspose":
        return prod(image.shape[2:]) * prod(weights.shape[1:]) * image.dtype.itemsize
    places = prod(values[node.output[0]].shape[2:])
    wide = weights.shape[0] // _attribute(node, "group", 1) > places
    return places * prod(weights.shape[1:]) * image.dtype.itemsize if wide else 0


def lowest_runtime(model: onnx.ModelProto, values: Values) -> tuple[str, str]:
    """The lowest version of ONNX Runtime (CPU) that runs the graph, such as ``1.14``, and what asks for it.

    Raises ValueError on an opset or IR version that exporters of bundles do not write.
    """
    opset = max(row.version for row in model.opset_import if row.domain in ("", "ai.onnx"))
    if opset > max(OPSETS) or model.ir_version > max(IRS):
        raise ValueError(f"opset {opset}, IR {model.ir_version}: up to opset {max(OPSETS)} and IR {max(IRS)} are known")
    needs = [
        (OPSETS[max(opset, min(OPSETS))], f"opset {opset}"),
        (IRS[max(model.ir_version, min(IRS))], f"IR {model.ir_version}"),
        *_kernels(model.graph.node, values),
    ]
    version, reason = max(needs, key=lambda row: row[0])
    return ".".join(map(str, version)), reason


def _kernels(nodes: Iterable[NodeProto], values: Values) -> Iterable[tuple[tuple[int, int], str]]:
    since = {
        (kind, dtype): version
        for version, table in KERNELS.items()
        for dtype, kinds in table.items()
        for kind in kinds.split()
    }
    for node in nodes:
        if node.input and node.input[0] in values:
            key = node.op_type, values[node.input[0]].dtype.name
            if key in since:
                yield since[key], f"{key[0]} over {key[1]}"


def constants(model: onnx.ModelProto) -> tuple[int, int]:
    """Elements and number of the graph's constant floating-point tensors with axes: frozen parameters, above all."""
    sizes = [prod(row.dims) for row in model.graph.initializer if row.dims and _dtype(row.data_type).kind == "f"]
    return sum(sizes), len(sizes)
