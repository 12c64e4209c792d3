"""Operators that move elements without computing with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Value, axis_of

aten = torch.ops.aten


def same(graph: Emitter, out: Tensor, x: Value, *_: Any, **__: Any) -> str:
    """A copy, or a view of all elements in the same shape: the value itself."""
    return x.name


def reshaped(graph: Emitter, out: Tensor, x: Value, *_: Any, **__: Any) -> str:
    return graph.reshaped(x, list(out.shape))


def expanded(graph: Emitter, out: Tensor, x: Value, *_: Any, **__: Any) -> str:
    return graph.expanded(x, list(out.shape))


def permuted(graph: Emitter, out: Tensor, x: Value, axes: Sequence[int]) -> str:
    order = [axis_of(axis, x.rank) for axis in axes]
    return x.name if order == list(range(x.rank)) else graph.node("Transpose", x, perm=order)


def transposed(graph: Emitter, out: Tensor, x: Value, one: int = 0, other: int = 1) -> str:
    order = list(range(x.rank))
    if x.rank > 1:
        order[one], order[other] = order[other], order[one]
    return permuted(graph, out, x, order)


def converted(graph: Emitter, out: Tensor, x: Value, **_: Any) -> str:
    return graph.cast(x, out.dtype)


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.alias.default: same,
    aten.clone.default: same,
    aten.contiguous.default: same,
    aten.detach.default: same,
    aten.lift_fresh_copy.default: same,
    aten._to_copy.default: converted,
    aten.view.default: reshaped,
    aten._unsafe_view.default: reshaped,
    aten.reshape.default: reshaped,
    aten.squeeze.default: reshaped,
    aten.squeeze.dim: reshaped,
    aten.squeeze.dims: reshaped,
    aten.unsqueeze.default: reshaped,
    aten.expand.default: expanded,
    aten.permute.default: permuted,
    aten.t.default: transposed,
    aten.transpose.int: transposed,
}
