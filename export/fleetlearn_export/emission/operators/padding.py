"""Padding, and its backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import (
    EmissionError,
    Emitter,
    Handler,
    Size,
    Value,
    fixed_sizes,
)

aten = torch.ops.aten


def _by_axis(rank: int, padding: Sequence[Any]) -> dict[int, tuple[Size, Size]]:
    """Return axis -> elements before and after. ``padding`` begins with the last axis."""
    pairs = zip(padding[::2], padding[1::2], strict=True)
    return {rank - 1 - index: pair for index, pair in enumerate(pairs)}


def constant_pad(
    graph: Emitter, out: Tensor, x: Value, padding: Sequence[Any], value: Any = 0
) -> str:
    number = None if isinstance(value, int | float) and value == 0 else graph.number(value, x.dtype)
    return graph.padded(x, x.rank, _by_axis(x.rank, padding), value=number)


def padded_by(mode: str) -> Handler:
    """Return the handler of reflection or replication padding."""

    def handler(graph: Emitter, out: Tensor, x: Value, padding: Sequence[Any]) -> str:
        _refuse_cuts(padding)
        return graph.padded(x, x.rank, _by_axis(x.rank, padding), mode)

    return handler


def edges_added(mirrored: bool) -> Handler:
    """Return the handler of the gradient of reflection padding (``mirrored``) or replication
    padding: the gradient of each edge is added to the elements that it shows, mirrored back, or to
    the one that it repeats."""

    def handler(graph: Emitter, out: Tensor, grad: Value, x: Value, padding: Sequence[Any]) -> str:
        _refuse_cuts(padding)
        name = grad.name
        for axis, (before, after) in _by_axis(x.rank, padding).items():
            (size,) = fixed_sizes(x, [axis])
            whole, name = name, graph.padded(name, x.rank, {axis: (-before, -after)})
            for begin, count, at_end in ((0, before, False), (before + size, after, True)):
                if not count:
                    continue
                edge = graph.padded(
                    whole, x.rank, {axis: (-begin, begin + count - size - before - after)}
                )
                if mirrored:
                    shown, width, position = (
                        graph.flipped(edge, [axis]),
                        count,
                        size - 1 - count if at_end else 1,
                    )
                else:
                    shown = graph.node("ReduceSum", edge, graph.integers([axis]), keepdims=1)
                    width, position = 1, size - 1 if at_end else 0
                name = graph.node(
                    "Add",
                    name,
                    graph.padded(shown, x.rank, {axis: (position, size - position - width)}),
                )
        return name

    return handler


def _refuse_cuts(padding: Sequence[Any]) -> None:
    if min(padding) < 0:
        raise EmissionError("a negative padding: cut with a slice instead")


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.constant_pad_nd.default: constant_pad,
    aten.reflection_pad1d.default: padded_by("reflect"),
    aten.reflection_pad2d.default: padded_by("reflect"),
    aten.reflection_pad3d.default: padded_by("reflect"),
    aten.reflection_pad1d_backward.default: edges_added(mirrored=True),
    aten.reflection_pad2d_backward.default: edges_added(mirrored=True),
    aten.reflection_pad3d_backward.default: edges_added(mirrored=True),
    aten.replication_pad1d.default: padded_by("edge"),
    aten.replication_pad2d.default: padded_by("edge"),
    aten.replication_pad3d.default: padded_by("edge"),
    aten.replication_pad1d_backward.default: edges_added(mirrored=False),
    aten.replication_pad2d_backward.default: edges_added(mirrored=False),
    aten.replication_pad3d_backward.default: edges_added(mirrored=False),
}
