"""Nodes that cut tensors, reduce them and repeat their elements, shared by the functions of this
folder."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from fleetlearn_export.emission.emitter import Emitter, Size, Source, fixed_size

LONG = 2**14
"""From this number of elements for each example on, a sum is computed in two steps. ONNX Runtime
adds all of them to a few sums in float32, so that the mean of 5 million squares is wrong by 3e-4 of
its size."""
ROW = 2**12
"""Most elements that the first step adds,"""
SHORT_ROW = 2**5
"""and fewest. Where no power of two from there on divides the number of elements, rows are those of
the last axis."""


def sliced(
    graph: Emitter,
    x: Source,
    axes: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    steps: Sequence[int],
) -> str:
    """Return ``x[begin:end:step]`` along the axes."""
    return graph.node("Slice", x, *map(graph.integers, (begins, ends, axes, steps)))


def total(graph: Emitter, x: Source, axes: Sequence[int], keep: bool = False) -> str:
    """Return the sum along the axes."""
    return graph.node("ReduceSum", x, graph.integers(axes), keepdims=int(keep))


def mean(graph: Emitter, x: Source, axes: Sequence[int], keep: bool = False) -> str:
    """Return the mean along the axes."""
    return graph.node("ReduceMean", x, graph.integers(axes), keepdims=int(keep))


def column(graph: Emitter, vector: Source, channels: Size, rank: int) -> str:
    """Return a vector of one number for each channel so that it broadcasts over (n, channels,
    ...)."""
    return graph.reshaped(vector, [1, channels, *[1] * (rank - 2)])


def enlarged(graph: Emitter, x: Source, rank: int, kernel: Sequence[int]) -> str:
    """Repeat each element of the last axes to a block of the kernel's size."""
    scales = graph.constant([1] * (rank - len(kernel)) + list(kernel))
    return graph.node(
        "Resize",
        x,
        None,
        scales,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


def sum_or_mean(
    graph: Emitter, operator: str, x: Source, shape: Sequence[Size], axes: Sequence[int], keep: bool
) -> str:
    """Return the sum or the mean (ReduceSum, ReduceMean) along the axes of ``x``, which has this
    shape.

    If it is along the last axes and long, two steps compute it: one for each row, one for the rows'
    results.
    """
    rank, front = len(shape), len(shape) - len(axes)
    added = [fixed_size(size) for size in shape[front:]]
    count = prod(
        size if isinstance(size, int) else int(size.node.expr.as_coeff_Mul()[0]) for size in added
    )
    row = gcd(count, ROW)
    long = count >= LONG and sorted(axes) == list(range(front, rank))
    if not long or row < SHORT_ROW:
        if long and len(axes) > 1:
            x = graph.node(operator, x, graph.integers([rank - 1]), keepdims=1)
        return graph.node(
            operator, x, graph.integers(axes) if front or not rank else None, keepdims=int(keep)
        )
    rows = graph.reshaped(x, [*shape[:front], prod(added) // row, row])
    for axis in (front + 1, front):
        rows = graph.node(operator, rows, graph.integers([axis]), keepdims=0)
    return graph.reshaped(rows, [*shape[:front], *[1] * len(axes)]) if keep else rows
