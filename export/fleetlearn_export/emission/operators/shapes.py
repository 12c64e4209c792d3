"""Operators that move elements without computing with them: reshapes, transposes, joins.
``slices.py`` has parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import (
    EmissionError,
    Emitter,
    Handler,
    Value,
    axis_of,
    fixed_size,
    is_reshape,
)

aten = torch.ops.aten


def same(graph: Emitter, out: Tensor, x: Value, *_: Any, **__: Any) -> str:
    """A copy, or a view of all elements in the same shape: the value itself."""
    return x.name


def reshaped(graph: Emitter, out: Tensor, x: Value, *_: Any, **__: Any) -> str:
    return graph.reshaped(x, list(out.shape))


def expanded(graph: Emitter, out: Tensor, x: Value, *_: Any, **__: Any) -> str:
    return graph.expanded(x, list(out.shape))


def repeated(graph: Emitter, out: Tensor, x: Value, repeats: Sequence[Any]) -> str:
    if not out.dim():
        return x.name
    return graph.node(
        "Tile", graph.reshaped(x, [*[1] * (len(repeats) - x.rank), *x.shape]), graph.shape(repeats)
    )


def permuted(graph: Emitter, out: Tensor, x: Value, axes: Sequence[int]) -> str:
    return graph.transposed(x, [axis_of(axis, x.rank) for axis in axes])


def transposed(graph: Emitter, out: Tensor, x: Value, one: int = 0, other: int = 1) -> str:
    order = list(range(x.rank))
    if x.rank > 1:
        order[one], order[other] = order[other], order[one]
    return graph.transposed(x, order)


def converted(graph: Emitter, out: Tensor, x: Value | float, **_: Any) -> str:
    """Write a change of dtype; vmap changes a number's too."""
    return graph.operand(x, out.dtype)


def joined(graph: Emitter, out: Tensor, tensors: Sequence[Value], dim: int = 0) -> str:
    """Join along an axis. PyTorch leaves out empty vectors, of whatever shape the others are."""
    parts = [x for x in tensors if not (x.rank == 1 and fixed_size(x.shape[0]) == 0)] or tensors[:1]
    names = [graph.cast(x, out.dtype) for x in parts]
    return (
        names[0] if len(names) == 1 else graph.node("Concat", *names, axis=axis_of(dim, out.dim()))
    )


def stacked(graph: Emitter, out: Tensor, tensors: Sequence[Value], dim: int = 0) -> str:
    axis = axis_of(dim, out.dim())
    rows = [
        graph.node("Unsqueeze", graph.cast(x, out.dtype), graph.integers([axis])) for x in tensors
    ]
    return rows[0] if len(rows) == 1 else graph.node("Concat", *rows, axis=axis)


def flipped(graph: Emitter, out: Tensor, x: Value, dims: Sequence[int]) -> str:
    axes = sorted(axis_of(axis, x.rank) for axis in dims) if x.rank else []
    return graph.flipped(x, axes)


def rolled(
    graph: Emitter, out: Tensor, x: Value, shifts: Sequence[Any], dims: Sequence[int] = ()
) -> str:
    if not dims:
        count = graph.integers([-1])
        flat = _rolled(graph, graph.node("Reshape", x, count), 0, shifts[0], out.numel())
        return graph.reshaped(flat, x.shape)
    name = x.name
    for shift, axis in zip(shifts, dims, strict=True):
        name = _rolled(graph, name, axis_of(axis, x.rank), shift, x.shape[axis_of(axis, x.rank)])
    return name


def _rolled(graph: Emitter, name: str, axis: int, shift: Any, size: Any) -> str:
    begin = graph.node("Mod", graph.size(-shift), graph.size(size))
    if isinstance(fixed_size(size), int) and isinstance(shift, int):
        begin = graph.integers([-shift % int(size)])
    axes = graph.integers([axis])
    tail = graph.node("Slice", name, begin, graph.integers([2**63 - 1]), axes)
    return graph.node(
        "Concat", tail, graph.node("Slice", name, graph.integers([0]), begin, axes), axis=axis
    )


def triangle(upper: int) -> Handler:
    """Return the handler of triu (1) or tril (0)."""

    def handler(graph: Emitter, out: Tensor, x: Value, diagonal: int = 0) -> str:
        # ONNX Runtime has Trilu for these types alone.
        kept = x.dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
        wider = torch.float32 if x.dtype.is_floating_point else torch.int64
        name = x.name if kept else graph.cast(x, wider)
        found = graph.node("Trilu", name, graph.constant(diagonal, torch.int64), upper=upper)
        return found if kept else graph.cast_node(found, out.dtype)

    return handler


def windows(graph: Emitter, out: Tensor, x: Value, dimension: int, size: int, step: int) -> str:
    """Write unfold: windows along an axis, as a new last axis."""
    axis = axis_of(dimension, x.rank)
    if not x.rank:
        return graph.reshaped(x, [1])
    count = fixed_size(out.shape[axis])
    if not isinstance(count, int):
        raise EmissionError("windows along the axis of the examples")
    begins = torch.arange(count).unsqueeze(1) * step
    pieces = graph.node("Gather", x, graph.array((begins + torch.arange(size)).numpy()), axis=axis)
    rank = x.rank + 1
    return graph.transposed(
        pieces, [other_axis for other_axis in range(rank) if other_axis != axis + 1] + [axis + 1]
    )


def strided(
    graph: Emitter,
    out: Tensor,
    x: Value,
    size: Sequence[Any],
    stride: Sequence[Any],
    offset: int | None = None,
) -> str:
    """Write as_strided where it is a plain reshape."""
    if not is_reshape(out, x.traced, offset):
        raise EmissionError("other strides than its shape has")
    return graph.reshaped(x, list(out.shape))


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.alias.default: same,
    aten.clone.default: same,
    aten.contiguous.default: same,
    aten.detach.default: same,
    aten.lift.default: same,
    aten.lift_fresh.default: same,
    aten.lift_fresh_copy.default: same,
    aten._to_copy.default: converted,
    aten.view.default: reshaped,
    aten._unsafe_view.default: reshaped,
    aten._reshape_alias.default: reshaped,
    aten.reshape.default: reshaped,
    aten.reshape_as.default: reshaped,
    aten.squeeze.dim: reshaped,
    aten.squeeze.dims: reshaped,
    aten.unsqueeze.default: reshaped,
    aten.expand.default: expanded,
    aten.repeat.default: repeated,
    aten.permute.default: permuted,
    aten.t.default: transposed,
    aten.transpose.int: transposed,
    aten.cat.default: joined,
    aten.stack.default: stacked,
    aten.flip.default: flipped,
    aten.roll.default: rolled,
    aten.tril.default: triangle(0),
    aten.triu.default: triangle(1),
    aten.unfold.default: windows,
    aten.as_strided.default: strided,
}
