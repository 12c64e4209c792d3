"""Parts of a tensor: slices, single rows, diagonals, splits; tensors with a part replaced; and
their gradients."""

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
    fixed_size,
    fixed_sizes,
    same_size,
)
from fleetlearn_export.emission.operators.creation import eye

aten = torch.ops.aten
END = 2**63 - 1


def sliced(
    graph: Emitter,
    out: Tensor,
    x: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> str:
    axis = axis_of(dim, x.rank)
    if same_size(out.shape[axis], x.shape[axis]) and step == 1:
        return x.name
    return _slice(graph, x, axis, 0 if start is None else start, END if end is None else end, step)


def _slice(graph: Emitter, x: Source, axis: int, start: Size, end: Size, step: int = 1) -> str:
    return graph.node(
        "Slice",
        x,
        graph.size(start),
        graph.size(end),
        graph.integers([axis]),
        graph.integers([step]),
    )


def selected(graph: Emitter, out: Tensor, x: Value, dim: int, index: Any) -> str:
    return graph.node("Gather", x, graph.number(index, torch.int64), axis=axis_of(dim, x.rank))


def split(graph: Emitter, out: Sequence[Tensor], x: Value, sizes: Any, dim: int = 0) -> list[str]:
    axis = axis_of(dim, x.rank)
    if len(out) == 1:
        return [x.name]
    return graph.nodes_outputs(
        "Split", len(out), x, graph.shape([part.shape[axis] for part in out]), axis=axis
    )


def unbound(graph: Emitter, out: Sequence[Tensor], x: Value, dim: int = 0) -> list[str]:
    return [selected(graph, part, x, dim, index) for index, part in enumerate(out)]


def _bounds(size: Size, start: Any, end: Any, count: Size, step: int) -> tuple[Size, Size]:
    """Return where a slice of ``count`` elements begins, and how many elements are behind its last
    one."""
    size = fixed_size(size)
    if isinstance(size, int) and isinstance(start, int | None) and isinstance(end, int | None):
        begin: Size = slice(start, end).indices(size)[0]
    else:
        begin = 0 if start is None else start
        if isinstance(begin, int) and begin < 0:
            begin = size + begin
    return begin, size - begin - (count - 1) * step - 1


def placed(
    graph: Emitter,
    x: Source,
    shape: Sequence[Size],
    axis: int,
    before: Size,
    after: Size,
    step: int = 1,
) -> str:
    """Return ``x``, of this shape, with zeros before, after and (for a step above 1) between
    elements of an axis."""
    rank = len(shape)
    if step > 1:
        x = graph.reshaped(x, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
        x = graph.padded(x, rank + 1, {axis + 1: (0, step - 1)})
        x = graph.reshaped(x, [*shape[:axis], shape[axis] * step, *shape[axis + 1 :]])
        after = after - (step - 1)
    return graph.padded(x, rank, {axis: (before, after)})


def slice_backward(
    graph: Emitter,
    out: Tensor,
    grad: Value,
    input_sizes: Sequence[Any],
    dim: int,
    start: Any,
    end: Any,
    step: int,
) -> str:
    axis = axis_of(dim, out.dim())
    before, after = _bounds(out.shape[axis], start, end, grad.shape[axis], step)
    return placed(graph, grad, grad.shape, axis, before, after, step)


def select_backward(
    graph: Emitter, out: Tensor, grad: Value, input_sizes: Sequence[Any], dim: int, index: Any
) -> str:
    axis = axis_of(dim, out.dim())
    before, after = _bounds(out.shape[axis], index, None, 1, 1)
    shape = [*out.shape[:axis], 1, *out.shape[axis + 1 :]]
    return placed(graph, graph.reshaped(grad, shape), shape, axis, before, after)


def slice_scatter(
    graph: Emitter,
    out: Tensor,
    x: Value,
    src: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> str:
    axis = axis_of(dim, x.rank)
    source, count = graph.cast(src, out.dtype), src.shape[axis]
    before, after = _bounds(x.shape[axis], start, end, count, step)
    if step == 1:
        return _replaced(graph, x, source, axis, before, before + count)
    (size,) = fixed_sizes(x, [axis])
    chosen = torch.zeros(size, dtype=torch.bool)
    chosen[start:end:step] = True
    mask = graph.array(chosen.reshape([-1, *[1] * (x.rank - axis - 1)]).numpy())
    return graph.node("Where", mask, placed(graph, source, src.shape, axis, before, after, step), x)


def select_scatter(graph: Emitter, out: Tensor, x: Value, src: Value, dim: int, index: Any) -> str:
    axis = axis_of(dim, x.rank)
    before, _ = _bounds(x.shape[axis], index, None, 1, 1)
    source = graph.reshaped(
        graph.cast(src, out.dtype), [*out.shape[:axis], 1, *out.shape[axis + 1 :]]
    )
    return _replaced(graph, x, source, axis, before, before + 1)


def _replaced(graph: Emitter, x: Value, source: str, axis: int, begin: Size, end: Size) -> str:
    """Return ``x`` with ``source`` in place of the elements from begin to end along an axis."""
    size, begin, end = (fixed_size(row) for row in (x.shape[axis], begin, end))
    parts = [source]
    if not same_size(begin, 0):
        parts.insert(0, _slice(graph, x, axis, 0, begin))
    if not same_size(end, size):
        parts.append(_slice(graph, x, axis, end, END))
    return source if len(parts) == 1 else graph.node("Concat", *parts, axis=axis)


def diagonal(
    graph: Emitter, out: Tensor, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> str:
    """A diagonal is a slice with steps along the two axes as one, where these sizes are known."""
    if _is_by_examples(x.shape, offset):
        elements = graph.node("Where", _on_diagonal(graph, x.shape), x, graph.number(0, x.dtype))
        return graph.node("ReduceSum", elements, graph.constant([1], torch.int64), keepdims=0)
    order, rows, columns = _matrices(x.shape, dim1, dim2)
    count = int(out.shape[-1])
    moved = graph.reshaped(graph.transposed(x, order), [*out.shape[:-1], rows * columns])
    begin = _first_of_diagonal(offset, columns)
    return _slice(
        graph, moved, out.dim() - 1, begin, begin + (count - 1) * (columns + 1) + 1, columns + 1
    )


def diagonal_backward(
    graph: Emitter,
    out: Tensor,
    grad: Value,
    input_sizes: Sequence[Any],
    offset: int,
    dim1: int,
    dim2: int,
) -> str:
    if _is_by_examples(out.shape, offset):
        rows_of_grad = graph.reshaped(grad, [*grad.shape, 1])
        return graph.node(
            "Where", _on_diagonal(graph, out.shape), rows_of_grad, graph.number(0, grad.dtype)
        )
    order, rows, columns = _matrices(list(out.shape), dim1, dim2)
    count = int(grad.shape[-1])
    begin = _first_of_diagonal(offset, columns)
    after = rows * columns - begin - (count - 1) * (columns + 1) - 1
    flat = placed(graph, grad, grad.shape, grad.rank - 1, begin, after, columns + 1)
    moved = graph.reshaped(flat, [*grad.shape[:-1], rows, columns])
    return graph.transposed(moved, [order.index(axis) for axis in range(out.dim())])


def diagonal_scatter(
    graph: Emitter, out: Tensor, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> str:
    def on_diagonal(row: Value) -> str:
        return diagonal_backward(graph, out, row, x.shape, offset, dim1, dim2)

    ones = Value(graph.filled(1, src.shape, src.dtype), src.traced)
    replaced = graph.cast_node(on_diagonal(ones), torch.bool)
    return graph.node("Where", replaced, on_diagonal(src), x)


def _is_by_examples(shape: Sequence[Size], offset: int) -> bool:
    """Whether it is the main diagonal of a matrix that compares all examples with each other, as in
    CLIP's loss."""
    return (
        len(shape) == 2
        and offset == 0
        and not isinstance(fixed_size(shape[0]), int)
        and same_size(*shape)
    )


def _on_diagonal(graph: Emitter, shape: Sequence[Size]) -> str:
    """Return bool (n, n), whether the element is on the diagonal."""
    return eye(graph, torch.empty(list(shape), dtype=torch.bool, device="meta"))


def _matrices(shape: Sequence[Size], dim1: int, dim2: int) -> tuple[list[int], int, int]:
    """Return an order of the axes that moves the two to the end, and their sizes."""
    first, second = axis_of(dim1, len(shape)), axis_of(dim2, len(shape))
    order = [axis for axis in range(len(shape)) if axis not in (first, second)] + [first, second]
    rows, columns = fixed_size(shape[first]), fixed_size(shape[second])
    if not (isinstance(rows, int) and isinstance(columns, int)):
        raise EmissionError("a diagonal along the axis of the examples")
    return order, rows, columns


def _first_of_diagonal(offset: int, columns: int) -> int:
    return offset if offset >= 0 else -offset * columns


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.slice.Tensor: sliced,
    aten.slice_backward.default: slice_backward,
    aten.slice_scatter.default: slice_scatter,
    aten.select.int: selected,
    aten.select_backward.default: select_backward,
    aten.select_scatter.default: select_scatter,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.unsafe_split.Tensor: split,
    aten.unsafe_split_with_sizes.default: split,
    aten.unbind.int: unbound,
    aten.diagonal.default: diagonal,
    aten.diagonal_backward.default: diagonal_backward,
    aten.diagonal_scatter.default: diagonal_scatter,
}
