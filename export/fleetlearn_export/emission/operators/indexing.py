"""Operators that pick or place elements by index.

Sums at repeated indices use ScatterElements: ScatterND loses some summands in ONNX Runtime 1.19 on
several threads.
"""

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
    Source,
    Value,
    axis_of,
    same_size,
)

aten = torch.ops.aten
REDUCTIONS = {
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
}
"""PyTorch's names of reductions -> the names that ScatterElements has."""


def embedding(
    graph: Emitter, out: Tensor, weight: Value, indices: Value, *_: Any, **__: Any
) -> str:
    return graph.node("Gather", weight, indices, axis=0)


def index_select(graph: Emitter, out: Tensor, x: Value, dim: int, index: Value) -> str:
    axis = axis_of(dim, x.rank)
    source: Source = x if x.rank else graph.reshaped(x, [1])
    found = graph.node("Gather", source, graph.reshaped(index, [index.traced.numel()]), axis=axis)
    return found if x.rank else graph.reshaped(found, out.shape)


def take(graph: Emitter, out: Tensor, x: Value, index: Value) -> str:
    return graph.node("Gather", graph.reshaped(x, [x.traced.numel()]), index, axis=0)


def put(
    graph: Emitter, out: Tensor, x: Value, index: Value, source: Value, accumulate: bool = False
) -> str:
    """Place elements at indices into the elements of ``x`` in one row; the gradient of take."""
    flat = graph.reshaped(x, [x.traced.numel()])
    places, values = (graph.reshaped(row, [index.traced.numel()]) for row in (index, source))
    reduction = "add" if accumulate else None
    return graph.reshaped(
        graph.node("ScatterElements", flat, places, values, axis=0, reduction=reduction), x.shape
    )


def gather(graph: Emitter, out: Tensor, x: Value, dim: int, index: Value, **_: Any) -> str:
    axis = axis_of(dim, x.rank)
    found = graph.node(
        "GatherElements", _at_least_one_axis(graph, x), _at_least_one_axis(graph, index), axis=axis
    )
    return found if out.dim() else graph.reshaped(found, [])


def _at_least_one_axis(graph: Emitter, x: Value) -> str:
    return x.name if x.rank else graph.reshaped(x, [1])


def scatter(
    graph: Emitter,
    out: Tensor,
    x: Value,
    dim: int,
    index: Value,
    src: Any,
    reduce: str | None = None,
) -> str:
    """Place ``src``, a tensor or a number, at indices along an axis."""
    if isinstance(src, Value):
        source = _at_least_one_axis(graph, src)
        for axis, (size, wanted) in enumerate(zip(src.shape, index.shape, strict=True)):
            if not same_size(size, wanted):  # more than there are indices
                source = graph.node(
                    "Slice", source, graph.integers([0]), graph.size(wanted), graph.integers([axis])
                )
    else:
        source = graph.filled(src, index.shape or [1], x.dtype)
    reduction = REDUCTIONS[reduce] if reduce else None
    places = _at_least_one_axis(graph, index)
    scattered = graph.node(
        "ScatterElements",
        _at_least_one_axis(graph, x),
        places,
        source,
        axis=axis_of(dim, x.rank),
        reduction=reduction,
    )
    return scattered if out.dim() else graph.reshaped(scattered, [])


def scatter_add(graph: Emitter, out: Tensor, x: Value, dim: int, index: Value, src: Value) -> str:
    return scatter(graph, out, x, dim, index, src, "add")


def scatter_reduce(
    graph: Emitter,
    out: Tensor,
    x: Value,
    dim: int,
    index: Value,
    src: Value,
    reduce: str,
    include_self: bool = True,
) -> str:
    if reduce == "mean":
        return _scatter_mean(graph, out, x, dim, index, src, include_self)
    if reduce not in REDUCTIONS:
        raise EmissionError(f"reduce={reduce!r}")
    if not include_self:
        floating = x.dtype.is_floating_point
        limits = torch.finfo(x.dtype) if floating else torch.iinfo(x.dtype)
        low, high = (-float("inf"), float("inf")) if floating else (limits.min, limits.max)
        neutral = {"add": 0, "mul": 1, "max": low, "min": high}[REDUCTIONS[reduce]]
        x = Value(scatter(graph, out, x, dim, index, neutral), x.traced)
    return scatter(graph, out, x, dim, index, src, reduce)


def _scatter_mean(
    graph: Emitter, out: Tensor, x: Value, dim: int, index: Value, src: Value, include_self: bool
) -> str:
    """The sum at each place, divided by the number of summands there. A place that no index names
    keeps its value."""
    if not x.dtype.is_floating_point:
        raise EmissionError("reduce='mean' of integers")
    total = scatter_reduce(graph, out, x, dim, index, src, "sum", include_self)
    itself = Value(graph.filled(1 if include_self else 0, x.shape, x.dtype), x.traced)
    summands = scatter(graph, out, itself, dim, index, 1, "add")
    if not include_self:
        summands = graph.node("Max", summands, graph.number(1, x.dtype))
    return graph.node("Div", total, summands)


def along_axis(reduction: str | None) -> Handler:
    """Return the handler of index_add ("add") or index_copy (None): rows, or one number, at indices
    on an axis."""

    def handler(
        graph: Emitter, out: Tensor, x: Value, dim: int, index: Value, source: Any, alpha: Any = 1
    ) -> str:
        axis, count = axis_of(dim, x.rank), index.traced.numel()
        shape = [*x.shape[:axis], count, *x.shape[axis + 1 :]] if x.rank else [1]
        if isinstance(source, Value) and source.rank:
            rows = graph.cast(source, out.dtype)
        elif isinstance(source, Value):
            rows = graph.node("Expand", graph.cast(source, out.dtype), graph.shape(shape))
        else:
            rows = graph.filled(source, shape, out.dtype)
        if alpha != 1:
            rows = graph.node("Mul", rows, graph.number(alpha, out.dtype))
        flat = graph.reshaped(index, [count, *[1] * (len(shape) - 1 - axis)])
        places = graph.node("Expand", flat, graph.shape(shape))
        scattered = graph.node(
            "ScatterElements",
            _at_least_one_axis(graph, x),
            places,
            rows,
            axis=axis,
            reduction=reduction,
        )
        return scattered if out.dim() else graph.reshaped(scattered, [])

    return handler


class Chosen:
    """The axes that several index tensors index together, and those tensors in one shape."""

    def __init__(self, graph: Emitter, x: Value, indices: Sequence[Value | None]) -> None:
        indexed = [(axis, index) for axis, index in enumerate(indices) if index is not None]
        if any(row.dtype in (torch.bool, torch.uint8) for _, row in indexed):
            raise EmissionError(
                "a mask as index, whose result has as many elements as the mask has ones"
            )
        self.axes = [axis for axis, _ in indexed]
        self.shape: list[Size] = _broadcast([row.shape for _, row in indexed])
        self.indices = [
            graph.cast_node(graph.expanded(row, self.shape), torch.int64)
            if row.dtype != torch.int64
            else graph.expanded(row, self.shape)
            for _, row in indexed
        ]
        adjacent = self.axes == list(range(self.axes[0], self.axes[-1] + 1))
        self.front = self.axes[0] if adjacent else 0
        """Where the indices' axes are in the result."""
        self.others = [axis for axis in range(x.rank) if axis not in self.axes]
        self.order = [*self.axes, *self.others]
        """An order of the axes of ``x`` with the indexed ones in front."""
        self.rest = [x.shape[axis] for axis in self.others]

    def pairs(self, graph: Emitter) -> str:
        """Return the indices as one tensor whose last axis has one index for each indexed axis."""
        last = graph.integers([len(self.shape)])
        rows = [graph.node("Unsqueeze", row, last) for row in self.indices]
        return rows[0] if len(rows) == 1 else graph.node("Concat", *rows, axis=len(self.shape))

    def moved_back(self) -> list[int]:
        """Return the order of axes that moves the indices' axes from the front to their place."""
        count = len(self.shape)
        return [
            *range(count, count + self.front),
            *range(count),
            *range(count + self.front, count + len(self.rest)),
        ]


def index(graph: Emitter, out: Tensor, x: Value, indices: Sequence[Value | None]) -> str:
    chosen = Chosen(graph, x, indices)
    if len(chosen.axes) == 1:
        return graph.node("Gather", x, chosen.indices[0], axis=chosen.axes[0])
    found = graph.node("GatherND", graph.transposed(x, chosen.order), chosen.pairs(graph))
    return graph.transposed(found, chosen.moved_back())


def index_put(
    graph: Emitter,
    out: Tensor,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    unsafe: bool = False,
) -> str:
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool:
        return _masked_put(graph, x, indices[0], values, accumulate)
    chosen = Chosen(graph, x, indices)
    # Values broadcast to the shape of x[indices]; then the indices' axes move to the front.
    shape = [*chosen.rest[: chosen.front], *chosen.shape, *chosen.rest[chosen.front :]]
    back = chosen.moved_back()
    rows = graph.transposed(
        graph.expanded(values, shape), [back.index(place) for place in range(len(back))]
    )
    moved = graph.transposed(x, chosen.order)
    if accumulate:
        changed = _added_rows(graph, x, chosen, moved, rows)
    else:
        changed = graph.node("ScatterND", moved, chosen.pairs(graph), rows)
    return graph.transposed(changed, [chosen.order.index(axis) for axis in range(x.rank)])


def _added_rows(graph: Emitter, x: Value, chosen: Chosen, moved: str, rows: str) -> str:
    """Add rows to the rows of ``moved``, whose first axes are the indexed ones, at the indices."""
    sizes = [x.shape[axis] for axis in chosen.axes]
    flat = ""
    for size, row in zip(sizes, chosen.indices, strict=True):
        number = graph.number(size, torch.int64)
        wrapped = graph.node(
            "Where",
            graph.node("Less", row, graph.number(0, torch.int64)),
            graph.node("Add", row, number),
            row,
        )
        flat = graph.node("Add", graph.node("Mul", flat, number), wrapped) if flat else wrapped
    count, width, total = _product(chosen.shape), _product(chosen.rest), _product(sizes)
    places = graph.node("Expand", graph.reshaped(flat, [count, 1]), graph.shape([1, width]))
    added = graph.node(
        "ScatterElements",
        graph.reshaped(moved, [total, width]),
        places,
        graph.reshaped(rows, [count, width]),
        axis=0,
        reduction="add",
    )
    return graph.reshaped(added, [*sizes, *chosen.rest])


def _broadcast(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    """Return the shape to which these shapes broadcast."""
    result: list[Size] = [1] * max(map(len, shapes))
    for shape in shapes:
        for axis, size in enumerate(shape, len(result) - len(shape)):
            if same_size(result[axis], 1):
                result[axis] = size
    return result


def _product(sizes: Sequence[Size]) -> Size:
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def _masked_put(graph: Emitter, x: Value, mask: Value, values: Value, accumulate: bool) -> str:
    """Write ``x[mask] = value`` for one value."""
    if not same_size(values.traced.numel(), 1):
        raise EmissionError("a mask as index, and more values than one")
    value = graph.reshaped(graph.cast(values, x.dtype), [])
    placed = graph.node("Add", x, value) if accumulate else value
    return graph.node(
        "Where", graph.reshaped(mask, [*mask.shape, *[1] * (x.rank - mask.rank)]), placed, x
    )


def bucketize(
    graph: Emitter, out: Tensor, x: Any, boundaries: Value, *, right: bool = False, **_: Any
) -> str:
    """Count the boundaries below each value, or up to it (``right``)."""
    return searchsorted(graph, out, boundaries, x, right=right)


def searchsorted(
    graph: Emitter,
    out: Tensor,
    boundaries: Value,
    x: Any,
    *,
    right: bool = False,
    side: str | None = None,
    **more: Any,
) -> str:
    if more.get("sorter") is not None:
        raise EmissionError("sorter")
    wider = (
        torch.promote_types(boundaries.dtype, x.dtype) if isinstance(x, Value) else boundaries.dtype
    )
    rows = graph.cast(boundaries, wider)
    values = graph.operand(x, wider)
    if isinstance(x, Value) and x.rank:
        values = graph.node("Unsqueeze", values, graph.integers([x.rank]))
    if boundaries.rank > 1:
        rows = graph.node("Unsqueeze", rows, graph.integers([boundaries.rank - 1]))
    below = graph.node("LessOrEqual" if right or side == "right" else "Less", rows, values)
    counted = graph.cast_node(below, torch.int64)
    indices = graph.node("ReduceSum", counted, graph.integers([-1]), keepdims=0)
    return indices if out.dtype == torch.int64 else graph.cast_node(indices, out.dtype)


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.embedding.default: embedding,
    aten.index_select.default: index_select,
    aten.take.default: take,
    aten.put.default: put,
    aten.gather.default: gather,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter.reduce: scatter,
    aten.scatter.value_reduce: scatter,
    aten.scatter_add.default: scatter_add,
    aten.scatter_reduce.two: scatter_reduce,
    aten.index_add.default: along_axis("add"),
    aten.index_copy.default: along_axis(None),
    aten.index_fill.int_Scalar: along_axis(None),
    aten.index_fill.int_Tensor: along_axis(None),
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.bucketize.Tensor: bucketize,
    aten.bucketize.Scalar: bucketize,
    aten.searchsorted.Tensor: searchsorted,
    aten.searchsorted.Scalar: searchsorted,
}
