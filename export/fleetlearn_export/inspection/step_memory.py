"""An estimate of the memory that a training step takes on a device."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import onnx
from fleetlearn_protocol import Manifest
from onnx import NodeProto

from fleetlearn_export.inspection.graph_costs import Values, attribute, names

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

ALIASES = names("Flatten Identity Reshape Squeeze Unsqueeze")
"""Operators whose output is their input's memory."""
IN_PLACE = names(
    "Abs Add And Clip Div Elu Erf Exp HardSigmoid LeakyRelu Log Mul Neg Not Or Pow Reciprocal Relu Sigmoid Softplus "
    "Sqrt Sub Sum Tanh"
)
"""Operators that may write into an input of the same size which nothing reads after them."""


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


def estimate(manifest: Manifest, model: onnx.ModelProto, values: Values) -> Memory:
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
            place_of = owner.pop(name)
            sharing[place_of] -= 1
            if not sharing[place_of]:
                now -= _allocated(values[place_of].bytes)
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
    wide = weights.shape[0] // attribute(node, "group", 1) > places
    return places * prod(weights.shape[1:]) * image.dtype.itemsize if wide else 0
