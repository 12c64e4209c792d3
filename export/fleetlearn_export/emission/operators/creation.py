"""Tensors that are made from numbers: constants, ranges, diagonals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, fixed_size

aten = torch.ops.aten
SMALL = 64
"""Up to this many elements a range or a diagonal is stored in the graph."""


def filled(value: float) -> Handler:
    """Return the handler of an operator that makes a tensor of one number, whatever its arguments
    besides the shape."""

    def handler(graph: Emitter, out: Tensor, *_: Any, **__: Any) -> str:
        return graph.filled(value, list(out.shape), out.dtype)

    return handler


def full(graph: Emitter, out: Tensor, size: Any, value: Any, **_: Any) -> str:
    return graph.filled(value, list(out.shape), out.dtype)


def scalar(graph: Emitter, out: Tensor, value: Any, **_: Any) -> str:
    return graph.number(value, out.dtype)


def arange(graph: Emitter, out: Tensor, end: Any, **_: Any) -> str:
    return _range(graph, out, 0, 1)


def arange_from(graph: Emitter, out: Tensor, start: Any, end: Any, step: Any = 1, **_: Any) -> str:
    return _range(graph, out, start, step)


def _range(graph: Emitter, out: Tensor, start: Any, step: Any) -> str:
    """Count in whole numbers: ONNX Runtime's Range of floats adds up the rounding errors of its
    steps."""
    count = fixed_size(out.shape[0])
    if (
        isinstance(count, int)
        and count <= SMALL
        and isinstance(start, int | float)
        and isinstance(step, int | float)
    ):
        return graph.array(
            (start + torch.arange(count, dtype=torch.float64) * step).to(out.dtype).numpy()
        )
    number = graph.number
    places = graph.node(
        "Range", number(0, torch.int64), number(out.shape[0], torch.int64), number(1, torch.int64)
    )
    values = places if out.dtype == torch.int64 else graph.cast_node(places, out.dtype)
    if step != 1:
        values = graph.node("Mul", values, number(step, out.dtype))
    return (
        values
        if isinstance(start, int | float) and start == 0
        else graph.node("Add", values, number(start, out.dtype))
    )


def eye(graph: Emitter, out: Tensor, *_: Any, **__: Any) -> str:
    rows, columns = (
        graph.reshaped(
            _range(graph, torch.empty(out.shape[axis], dtype=torch.int64, device="meta"), 0, 1),
            shape,
        )
        for axis, shape in enumerate(([out.shape[0], 1], [1, out.shape[1]]))
    )
    equal = graph.node("Equal", rows, columns)
    return equal if out.dtype == torch.bool else graph.cast_node(equal, out.dtype)


def linspace(graph: Emitter, out: Tensor, start: float, end: float, steps: int, **_: Any) -> str:
    return graph.array(torch.linspace(start, end, steps, dtype=out.dtype).numpy())


def indices_of_triangle(function: Any) -> Handler:
    """Return the handler of tril_indices or triu_indices, whose sizes are numbers."""

    def handler(graph: Emitter, out: Tensor, row: int, col: int, offset: int = 0, **_: Any) -> str:
        return graph.array(function(row, col, offset, dtype=out.dtype).numpy())

    return handler


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.full.default: full,
    aten.full_like.default: full,
    aten.new_full.default: lambda graph, out, x, size, value, **_: full(graph, out, size, value),
    aten.zeros.default: filled(0),
    aten.zeros_like.default: filled(0),
    aten.new_zeros.default: filled(0),
    aten.zero.default: filled(0),
    aten.ones.default: filled(1),
    aten.ones_like.default: filled(1),
    aten.new_ones.default: filled(1),
    # Whatever an empty tensor holds, the program overwrites it before it reads it.
    aten.empty.memory_format: filled(0),
    aten.empty_like.default: filled(0),
    aten.empty_strided.default: filled(0),
    aten.empty_permuted.default: filled(0),
    aten.new_empty.default: filled(0),
    aten.new_empty_strided.default: filled(0),
    aten.scalar_tensor.default: scalar,
    aten.arange.default: arange,
    aten.arange.start: arange_from,
    aten.arange.start_step: arange_from,
    aten.eye.default: eye,
    aten.eye.m: eye,
    aten.linspace.default: linspace,
    aten.tril_indices.default: indices_of_triangle(torch.tril_indices),
    aten.triu_indices.default: indices_of_triangle(torch.triu_indices),
}
