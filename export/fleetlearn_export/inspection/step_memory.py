"""An estimate of the memory that a training step needs on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import onnx
from fleetlearn_protocol import Manifest
from onnx import NodeProto

from fleetlearn_export.graphs.micro_batches import joined
from fleetlearn_export.graphs.reading import reads
from fleetlearn_export.graphs.recompute import in_order_of_execution, words
from fleetlearn_export.inspection import graph_costs
from fleetlearn_export.inspection.arena import arena_bytes, rounded
from fleetlearn_export.inspection.graph_costs import Values, attribute
from fleetlearn_export.model.train_step import MEAN

MIB = 2**20
BASE = 67 * MIB
"""Measured resident bytes of Python 3.11, numpy, ONNX Runtime 1.31.1 and fleetlearn_device on
x86-64 Linux after the first step of a tiny model. The imports alone take 54 MiB of these."""
BYTES_OF_A_NODE = 4096
"""Bytes that a session keeps for each operator, measured on graphs of 50 to 720 operators."""
COPIES_OF_CONSTANTS = 2
"""The initializers are in memory twice: in the session, and in the file while it is read."""
ALIASES = words("Flatten Identity Reshape Squeeze Unsqueeze")
"""Operators whose output shares their input's memory."""
IN_PLACE = words(
    "Celu Clip Elu HardSigmoid LeakyRelu LogSoftmax Relu Selu Sigmoid Softmax Softplus Softsign "
    "Tanh ThresholdedRelu"
)
"""Operators that write their output into their input's memory, if no later operator reads that
input. Those with two tensors, such as Add and Mul, do not, nor do Abs, Erf, Exp, Log, Neg,
Reciprocal and Sqrt (ONNX Runtime 1.31.1)."""


class Memory(NamedTuple):
    """An estimate of a device's resident bytes at the peak of a step, by use."""

    runtime: int
    """Python, numpy and ONNX Runtime (BASE), and the session of this graph."""
    vectors: int
    """Parameters, references and state, each a flat vector, and the batch."""
    constants: int
    """Frozen parameters and other constant tensors of the graph."""
    intermediates: int
    """Results that one operator passes to another, and the gaps between them in ONNX Runtime's
    arena."""

    @property
    def total(self) -> int:
        return sum(self)


def estimate(manifest: Manifest, model: onnx.ModelProto, batch: int) -> Memory:
    """Estimate the peak of a process that trains the bundle with fleetlearn_device's runtime
    ``onnx``, one thread.

    batch: the number of examples in a step. Raises ExportError if the installed ONNX Runtime cannot
    run the graph.
    """
    elements = (
        2 * manifest.local_size
        + len({"anchor", *manifest.references}) * manifest.size
        + 2 * manifest.state_size
    )
    divided = joined(model)
    if divided is None or divided.size >= batch:
        whole = model if divided is None else divided.model
        return estimate_graph(whole, graph_costs.values(whole, batch), elements)
    values = graph_costs.values(divided.model, divided.size)
    return with_micro_batches(
        estimate_graph(divided.model, values, elements), divided.model, values, batch
    )


def with_micro_batches(
    memory: Memory, model: onnx.ModelProto, values: Values, batch: int
) -> Memory:
    """Return the memory of a step with micro-batches. ``memory`` and ``values`` are those of one
    micro-batch.

    Besides, the device holds the whole batch, and the Loop two sets of sums: it reads one and makes
    the next.
    """
    rows = [values[input_.name] for input_ in model.graph.input if input_.name.startswith("batch.")]
    example = sum(row.bytes // row.shape[0] for row in rows)
    sums = sum(
        values[output.name].bytes for output in model.graph.output if output.name.startswith(MEAN)
    )
    return memory._replace(
        vectors=memory.vectors + (batch - rows[0].shape[0]) * example,
        intermediates=memory.intermediates + 2 * sums,
    )


def estimate_graph(model: onnx.ModelProto, values: Values, elements: int) -> Memory:
    """Estimate the same from the graph and the number of elements of all vectors that the device
    holds.

    The tests hold the estimate within 10 % of a measurement on x86-64 Linux.
    """
    batch = sum(
        values[input_.name].bytes
        for input_ in model.graph.input
        if input_.name.startswith("batch.")
    )
    return Memory(
        runtime=BASE + BYTES_OF_A_NODE * len(model.graph.node),
        vectors=4 * elements + batch,
        constants=COPIES_OF_CONSTANTS
        * sum(values[tensor.name].bytes for tensor in model.graph.initializer),
        intermediates=arena_bytes(allocations(model, values)),
    )


def peak_of_intermediates(model: onnx.ModelProto, values: Values) -> int:
    """Return the most bytes of intermediate results at one time."""
    sizes: dict[str, int] = {}
    now = peak = 0
    for name, size in allocations(model, values):
        sizes[name], now = size, now + size - sizes.get(name, 0)
        peak = max(peak, now)
    return peak


def allocations(model: onnx.ModelProto, values: Values) -> Iterator[tuple[str, int]]:
    """Yield a tensor's name with its bytes when they are allocated, and with 0 when they are free.

    A result lives from its operator to its last reader. The graph's inputs, constants and outputs
    do not count: the device binds its own memory to them. As in ONNX Runtime, reshapes share
    memory, the operators of IN_PLACE overwrite an input that no later operator reads, and a
    transposition that only matrix products read becomes a part of them. A convolution's workspace
    counts, under the name "".
    """
    nodes = in_order_of_execution(model)
    last = {name: index for index, node in enumerate(nodes) for name in reads(node)}
    readers: dict[str, set[str]] = {}
    for node in nodes:
        for name in reads(node):
            readers.setdefault(name, set()).add(node.op_type)
    outputs = {output.name for output in model.graph.output}
    owner: dict[str, str] = {}
    """Live tensor -> the tensor whose memory it uses."""
    sharing: dict[str, int] = {}
    """Tensor that owns memory -> how many live tensors use it."""
    for index, node in enumerate(nodes):
        dying = [
            name for name in dict.fromkeys(reads(node)) if name in owner and last[name] == index
        ]
        made = [name for name in node.output if name in values and name not in outputs]
        if node.op_type == "Constant" or (_is_view(node, readers) and node.input[0] not in owner):
            made = []  # constants, and views of memory that the device binds
        for name in made:
            shared = node.input[0] if _is_view(node, readers) else None
            if node.op_type in IN_PLACE:
                free = (
                    value
                    for value in dying
                    if sharing[owner[value]] == 1 and values[value].bytes == values[name].bytes
                )
                shared = next(free, None)
            owner[name] = owner[shared] if shared else name
            sharing[owner[name]] = sharing.get(owner[name], 0) + 1
            if not shared:
                yield name, rounded(values[name].bytes)
        if workspace := _workspace(node, values):
            yield "", workspace
            yield "", 0
        for name in (*dying, *(value for value in made if value not in last)):
            place_of = owner.pop(name)
            sharing[place_of] -= 1
            if not sharing[place_of]:
                yield place_of, 0


def _is_view(node: NodeProto, readers: Mapping[str, set[str]]) -> bool:
    if node.op_type == "Transpose":
        return readers.get(node.output[0], {"none"}) <= {"MatMul", "Gemm"}
    return node.op_type in ALIASES


def _workspace(node: NodeProto, values: Values) -> int:
    """Return the bytes into which a convolution unfolds one image.

    MLAS, ONNX Runtime's CPU library, does so for Conv if it has more filters than output elements,
    and for ConvTranspose always.
    """
    if node.op_type not in ("Conv", "ConvTranspose"):
        return 0
    image, weights = (values[name] for name in node.input[:2])
    if node.op_type == "ConvTranspose":
        return prod(image.shape[2:]) * prod(weights.shape[1:]) * image.dtype.itemsize
    places = prod(values[node.output[0]].shape[2:])
    wide = weights.shape[0] // attribute(node, "group", 1) > places
    return places * prod(weights.shape[1:]) * image.dtype.itemsize if wide else 0
