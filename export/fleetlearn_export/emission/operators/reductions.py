"""Sums, means, variances, norms, extrema: operators that combine elements along axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import (
    Emitter,
    Handler,
    Size,
    Value,
    axes_of,
    axis_of,
    fixed_sizes,
)
from fleetlearn_export.emission.operators.arithmetic import COMPUTED_AS
from fleetlearn_export.emission.operators.layout import sum_or_mean

aten = torch.ops.aten
Axes = Sequence[int] | int | None


def reduce(
    graph: Emitter, operator: str, x: Value | str, axes: Axes, rank: int, keepdims: bool
) -> str:
    """Add a reduction along the axes; along all of them for None or an empty list."""
    if not rank and operator in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
        return x.name if isinstance(x, Value) else x
    reduced = axes_of(axes, rank)
    if (
        isinstance(x, Value)
        and operator in ("ReduceSum", "ReduceMean")
        and x.dtype.is_floating_point
    ):
        return sum_or_mean(graph, operator, x, x.shape, reduced, keepdims)
    axes_input = graph.integers(reduced) if len(reduced) < rank else None
    return graph.node(
        operator, *([x] if axes_input is None else [x, axes_input]), keepdims=int(keepdims)
    )


def reduction(operator: str) -> Handler:
    """Return the handler of a sum, a mean, a product, the largest or the smallest."""

    def handler(
        graph: Emitter, out: Tensor, x: Value, axes: Axes = None, keepdim: bool = False, **_: Any
    ) -> str:
        dtype = COMPUTED_AS.get(out.dtype, out.dtype)
        result = reduce(
            graph, operator, x if x.dtype == dtype else graph.cast(x, dtype), axes, x.rank, keepdim
        )
        return result if dtype == out.dtype else graph.cast_node(result, out.dtype)

    return handler


def any_or_all(operator: str) -> Handler:
    def handler(
        graph: Emitter, out: Tensor, x: Value, axes: Axes = None, keepdim: bool = False
    ) -> str:
        truth = graph.cast_node(graph.cast(x, torch.bool), torch.int32)
        return graph.cast_node(reduce(graph, operator, truth, axes, x.rank, keepdim), out.dtype)

    return handler


def variance_and_mean(
    graph: Emitter,
    out: Sequence[Tensor],
    x: Value,
    axes: Axes = None,
    *,
    correction: Any = None,
    keepdim: bool = False,
) -> list[str]:
    """Write the mean of squared distances from the mean, with ``count - correction`` (1 if None) as
    the divisor."""
    correction = 1 if correction is None else correction
    reduced = axes_of(axes, x.rank)
    mean = reduce(graph, "ReduceMean", x, reduced, x.rank, True)
    squares = reduce(graph, "ReduceSumSquare", graph.node("Sub", x, mean), reduced, x.rank, keepdim)
    divisor = graph.count([x.shape[axis] for axis in reduced], x.dtype)
    if correction:
        divisor = graph.node("Sub", divisor, graph.number(correction, x.dtype))
        divisor = graph.node("Max", divisor, graph.number(0, x.dtype))
    variance = graph.node("Div", squares, divisor)
    return [variance, mean if keepdim else graph.reshaped(mean, list(out[1].shape))]


def variance(graph: Emitter, out: Tensor, x: Value, axes: Axes = None, **options: Any) -> str:
    return variance_and_mean(graph, (out, out), x, axes, **options)[0]


def deviation(graph: Emitter, out: Tensor, x: Value, axes: Axes = None, **options: Any) -> str:
    return graph.node("Sqrt", variance(graph, out, x, axes, **options))


def deviation_and_mean(
    graph: Emitter, out: Sequence[Tensor], x: Value, axes: Axes = None, **options: Any
) -> list[str]:
    square, mean = variance_and_mean(graph, out, x, axes, **options)
    return [graph.node("Sqrt", square), mean]


def vector_norm(
    graph: Emitter,
    out: Tensor,
    x: Value,
    order: Any = 2,
    axes: Axes = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> str:
    value = graph.cast(x, out.dtype)
    if not x.rank:
        return graph.node("Abs", value)
    if order in (1, 2):
        return reduce(graph, f"ReduceL{int(order)}", value, axes, x.rank, keepdim)
    size = graph.node("Abs", value)
    if math.isinf(order):
        return reduce(graph, "ReduceMax" if order > 0 else "ReduceMin", size, axes, x.rank, keepdim)
    if order == 0:
        counted = graph.cast_node(
            graph.node("Greater", size, graph.number(0, out.dtype)), out.dtype
        )
        return reduce(graph, "ReduceSum", counted, axes, x.rank, keepdim)
    powers = graph.node("Pow", size, graph.number(order, out.dtype))
    total = reduce(graph, "ReduceSum", powers, axes, x.rank, keepdim)
    return graph.node("Pow", total, graph.number(1 / order, out.dtype))


def log_sum_exp(graph: Emitter, out: Tensor, x: Value, axes: Axes, keepdim: bool = False) -> str:
    """Subtract the largest element first, where it is finite."""
    value = graph.cast(x, out.dtype)
    if not x.rank:
        return value
    limit = torch.finfo(out.dtype).max
    peak = reduce(graph, "ReduceMax", value, axes, x.rank, True)
    peak = graph.node("Clip", peak, graph.number(-limit, out.dtype), graph.number(limit, out.dtype))
    powers = graph.node("Exp", graph.node("Sub", value, peak))
    result = graph.node(
        "Add", graph.node("Log", reduce(graph, "ReduceSum", powers, axes, x.rank, True)), peak
    )
    return result if keepdim else graph.reshaped(result, list(out.shape))


def cumulative_sum(
    graph: Emitter, out: Tensor, x: Value, axis: int, *, dtype: torch.dtype | None = None
) -> str:
    value = graph.cast(x, out.dtype)
    return (
        graph.node("CumSum", value, graph.constant(axis_of(axis, x.rank), torch.int64))
        if x.rank
        else value
    )


def cumulative_product(
    graph: Emitter, out: Tensor, x: Value, axis: int, *, dtype: torch.dtype | None = None
) -> str:
    """Multiply rows of a square in which what comes later is 1: ONNX has no such operator."""
    value = graph.cast(x, out.dtype)
    if not x.rank:
        return value
    axis = axis_of(axis, x.rank)
    (size,) = fixed_sizes(x, [axis])
    earlier = np.tril(np.ones((size, size), np.bool_)).reshape(
        size, size, *[1] * (x.rank - axis - 1)
    )
    rows = graph.node("Unsqueeze", value, graph.integers([axis]))
    square = graph.node("Where", graph.array(earlier), rows, graph.number(1, out.dtype))
    return graph.node("ReduceProd", square, graph.integers([axis + 1]), keepdims=0)


def place_of_extremum(largest: bool) -> Handler:
    """Return the handler of ArgMax or ArgMin: the first place where several are equal."""

    def handler(
        graph: Emitter, out: Tensor, x: Value, axis: int | None = None, keepdim: bool = False
    ) -> str:
        if not x.rank:
            return graph.constant(0, torch.int64)
        value = graph.cast(x, COMPUTED_AS.get(x.dtype, x.dtype))
        if axis is None:
            value = graph.reshaped(value, [-1])
        along = 0 if axis is None else axis_of(axis, x.rank)
        if x.dtype == torch.int64:  # ONNX Runtime's ArgMax and ArgMin do not take it
            index = _top(graph, value, graph.integers([1]), along, largest)[1]
        else:
            index = graph.node("ArgMax" if largest else "ArgMin", value, axis=along, keepdims=1)
        return graph.reshaped(index, list(out.shape))

    return handler


def extremum_and_place(largest: bool) -> Handler:
    """Return the handler of the largest or smallest along an axis, and its first place."""
    extremum, place = reduction("ReduceMax" if largest else "ReduceMin"), place_of_extremum(largest)

    def handler(
        graph: Emitter, out: Sequence[Tensor], x: Value, axis: int, keepdim: bool = False
    ) -> list[Any]:
        return [extremum(graph, out[0], x, axis, keepdim), place(graph, out[1], x, axis, keepdim)]

    return handler


def _top(graph: Emitter, x: str, count: str, axis: int, largest: bool) -> list[str]:
    """Return the ``count`` largest or smallest, in order, and their places; the first ones where
    several are equal."""
    return graph.nodes_outputs("TopK", 2, x, count, axis=axis, largest=int(largest))


def top(graph: Emitter, x: Value, count: Size, axis: int, largest: bool) -> list[str]:
    if not x.rank:
        return [x.name, graph.constant(0, torch.int64)]
    dtype = COMPUTED_AS.get(x.dtype, x.dtype)
    values, places = _top(
        graph, graph.cast(x, dtype), graph.size(count), axis_of(axis, x.rank), largest
    )
    return [values if dtype == x.dtype else graph.cast_node(values, x.dtype), places]


def top_k(
    graph: Emitter,
    out: Any,
    x: Value,
    count: Size,
    axis: int = -1,
    largest: bool = True,
    *_: Any,
    **__: Any,
) -> list[str]:
    return top(graph, x, count, axis, largest)


def sort(graph: Emitter, out: Any, x: Value, axis: int = -1, descending: bool = False) -> list[str]:
    """Equal elements stay in order."""
    return top(graph, x, x.shape[axis] if x.rank else 1, axis, descending)


def stable_sort(
    graph: Emitter,
    out: Any,
    x: Value,
    *,
    stable: bool | None = None,
    dim: int = -1,
    descending: bool = False,
) -> list[str]:
    return sort(graph, out, x, dim, descending)


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.sum.default: reduction("ReduceSum"),
    aten.sum.dim_IntList: reduction("ReduceSum"),
    aten.mean.default: reduction("ReduceMean"),
    aten.mean.dim: reduction("ReduceMean"),
    aten.prod.default: reduction("ReduceProd"),
    aten.prod.dim_int: reduction("ReduceProd"),
    aten.amax.default: reduction("ReduceMax"),
    aten.amin.default: reduction("ReduceMin"),
    aten.max.default: reduction("ReduceMax"),
    aten.min.default: reduction("ReduceMin"),
    aten.max.dim: extremum_and_place(largest=True),
    aten.min.dim: extremum_and_place(largest=False),
    aten.argmax.default: place_of_extremum(largest=True),
    aten.argmin.default: place_of_extremum(largest=False),
    aten.any.default: any_or_all("ReduceMax"),
    aten.any.dim: any_or_all("ReduceMax"),
    aten.any.dims: any_or_all("ReduceMax"),
    aten.all.default: any_or_all("ReduceMin"),
    aten.all.dim: any_or_all("ReduceMin"),
    aten.all.dims: any_or_all("ReduceMin"),
    aten.var.correction: variance,
    aten.std.correction: deviation,
    aten.var_mean.correction: variance_and_mean,
    aten.std_mean.correction: deviation_and_mean,
    aten.linalg_vector_norm.default: vector_norm,
    aten.logsumexp.default: log_sum_exp,
    aten.cumsum.default: cumulative_sum,
    aten.cumprod.default: cumulative_product,
    aten.topk.default: top_k,
    aten.sort.default: sort,
    aten.sort.stable: stable_sort,
}
