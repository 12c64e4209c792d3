"""Rewrites what ONNX Runtime's CUDA provider (1.31) cannot run: operators that have no kernel, or
one that refuses.

Batch statistics: its kernel of BatchNormalization takes given statistics only. With
``training_mode`` it ends the session: "Training mode does not support BN opset 14 (or higher) yet"
(core/providers/cuda/nn/batch_norm.h). On the CPU that operator is three times as fast as sums, so
bundles have it, and it becomes sums here (of opset 18, as bundles).

Col2Im runs on the CPU, and its images are copied there and back. Bundles have it for small images
(fleetlearn_export/emission/operators/small_images.py): the sum of each place's taps is then a
product with a matrix of zeros and ones.

Bitwise operators run on the CPU too. They make the random numbers of dropout: see bitwise.py.

A session without operators on the CPU can be recorded and replayed as a whole (recorded_step.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.runtimes.cuda.bitwise import BitwiseRewriter
from fleetlearn_device.runtimes.cuda.encoding import (
    Field,
    Node,
    constant,
    fields,
    floating,
    framed,
    integer,
    node,
    tensor,
)
from fleetlearn_device.runtimes.cuda.scans import described, written_out

LARGEST_MATRIX = 2**20
"""Elements of a matrix in Col2Im's place, at most."""
Constants = dict[str, NDArray[Any]]


def for_cuda(model: bytes) -> bytes | None:
    """Return the graph (an encoded ModelProto) as the CUDA provider can run it; None if it has
    nothing to rewrite.

    Raises ValueError if ``model`` is no encoded message.
    """
    if not any(word in model for word in (b"training_mode", b"Col2Im", b"Bitwise", b"Scan")):
        return None
    return b"".join(
        _graph(field, {}, "bitwise") if field.number == 7 else field.whole
        for field in fields(model)
    )


def _graph(field: Field, outer: Constants, prefix: str) -> bytes:
    """Return a field that is a graph, with other nodes. ``outer``: constants of the graph around
    it."""
    rows = list(fields(field.value))
    constants = {**outer, **dict(_constants(row.value for row in rows if row.number == 5))}
    seeded = any(
        row.number == 11 and b"seed" in [part.value for part in fields(row.value)] for row in rows
    )
    bitwise = BitwiseRewriter(constants, prefix, seeded)
    sizes = dict(described(row) for row in rows if row.number in (11, 13))
    parts = [
        _nodes(Node(row), constants, sizes, bitwise, prefix) if row.number == 1 else row.whole
        for row in rows
    ]
    return framed(field.number, bitwise.constants() + b"".join(parts))


def _constants(initializers: Iterable[bytes]) -> Iterator[tuple[str, NDArray[Any]]]:
    for message in initializers:
        name, values = tensor(message)
        if values is not None:
            yield name, values


def _nodes(
    operation: Node,
    constants: Constants,
    sizes: Mapping[str, Sequence[int]],
    bitwise: BitwiseRewriter,
    prefix: str,
) -> bytes:
    """Return a node, or the nodes in its place. ``sizes``: of the graph's values, by name."""
    if operation.operator == "Scan" and (found := written_out(operation, sizes)) is not None:
        return found
    if operation.operator == "BatchNormalization":
        return b"".join(_batch_norm(operation))
    if operation.operator == "Col2Im":
        return b"".join(_col2im(operation, constants))
    if operation.operator in ("If", "Loop", "Scan"):
        inner = f"{prefix}.inner"
        rows = (
            row.whole if row.number != 5 else _with_other_graphs(row, constants, inner)
            for row in operation.rows
        )
        return framed(1, b"".join(rows))
    return bitwise.rewritten(operation) or operation.field.whole


def _with_other_graphs(attribute: Field, outer: Constants, prefix: str) -> bytes:
    """Return an attribute of an If, a Loop or a Scan with other nodes in its graphs."""
    rows = fields(attribute.value)
    return framed(
        5,
        b"".join(
            _graph(row, outer, prefix) if row.number in (6, 11) else row.whole for row in rows
        ),
    )


def _batch_norm(operation: Node) -> Iterator[bytes]:
    """Yield nodes that give the result and the batch's mean and variance. The input is (examples,
    channels, ...)."""
    # With another momentum the outputs are not the batch's own statistics.
    if (
        not operation.integer("training_mode", 0)
        or operation.number("momentum", 0.9)
        or len(operation.outputs) != 3
    ):
        yield operation.field.whole
        return
    (x, scale, shift), (result, mean, variance) = operation.inputs[:3], operation.outputs
    name = f"{result}.sums."
    three, axes, one = name + "three", name + "axes", name + "one"
    flat, middle, centred, squared = (
        name + "flat",
        name + "middle",
        name + "centred",
        name + "squared",
    )
    yield constant(three, np.array([0, 0, -1], np.int64))  # 0: as it is
    yield constant(axes, np.array([0, 2], np.int64))
    yield constant(one, np.array([-1], np.int64))
    yield node("Reshape", [x, three], [flat])
    yield node("ReduceMean", [flat, axes], [middle], integer("keepdims", 1))
    yield node("Sub", [flat, middle], [centred])
    yield node("Mul", [centred, centred], [squared])
    yield node("ReduceMean", [squared, axes], [variance], integer("keepdims", 0))
    yield node("Reshape", [middle, one], [mean])
    epsilon = floating("epsilon", operation.number("epsilon", 1e-5))
    yield node("BatchNormalization", [x, scale, shift, mean, variance], [result], epsilon)


def _col2im(operation: Node, constants: Constants) -> Iterator[bytes]:
    """Yield a product with the matrix that says which taps are added to which place of the
    image."""
    columns, image, block = operation.inputs
    if image not in constants or block not in constants:
        yield operation.field.whole
        return
    sizes, kernel = constants[image].tolist(), constants[block].tolist()
    axes = len(sizes)
    pads, steps, gaps = (
        operation.integers(name, [default] * count)
        for name, default, count in (
            ("pads", 0, 2 * axes),
            ("strides", 1, axes),
            ("dilations", 1, axes),
        )
    )
    adds = np.ones([1, 1, 1], np.float32)
    for axis, (size, taps, step, gap) in enumerate(zip(sizes, kernel, steps, gaps, strict=True)):
        places = (size + pads[axis] + pads[axes + axis] - gap * (taps - 1) - 1) // step + 1
        target = np.arange(taps)[:, None] * gap + np.arange(places) * step - pads[axis]
        along = (target[..., None] == np.arange(size)).astype(np.float32)  # (taps, places, size)
        if adds.size * along.size > LARGEST_MATRIX:
            yield operation.field.whole
            return
        shape = [a * b for a, b in zip(adds.shape, along.shape, strict=True)]
        # (taps, places, size of the image)
        adds = np.einsum("abc,def->adbecf", adds, along).reshape(shape)
    name = f"{operation.outputs[0]}.adds."
    matrix, rows, flat, product = name + "matrix", name + "rows", name + "flat", name + "product"
    yield constant(matrix, adds.reshape(-1, adds.shape[2]))
    yield constant(rows, np.array([0, -1, adds.shape[0] * adds.shape[1]], np.int64))
    yield constant(f"{name}image", np.array([0, -1, *sizes], np.int64))
    yield node("Reshape", [columns, rows], [flat])
    yield node("MatMul", [flat, matrix], [product])
    yield node("Reshape", [product, f"{name}image"], operation.outputs)
