"""Nodes that cut tensors, reduce them and repeat their elements, shared by the functions of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from fleetlearn_export.emission.emitter import Emitter, Size, Source


def sliced(
    graph: Emitter, x: Source, axes: Sequence[int], begins: Sequence[int], ends: Sequence[int], steps: Sequence[int]
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
    """Return a vector of one number for each channel so that it broadcasts over (n, channels, ...)."""
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
