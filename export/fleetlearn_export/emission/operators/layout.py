"""Nodes that cut, pad and turn tensors, shared by the functions of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from fleetlearn_export.emission.emitter import Emitter, Size, Source


def per_axis(value: Sequence[int] | int, count: int, default: Sequence[int] = ()) -> list[int]:
    """Return one number for each of the image's axes. An operator may give one number for all, or none."""
    values = [value] if isinstance(value, int) else list(value) or list(default)
    return values * count if len(values) == 1 else values


def sliced(
    graph: Emitter, x: Source, axes: Sequence[int], begins: Sequence[int], ends: Sequence[int], steps: Sequence[int]
) -> str:
    """Return ``x[begin:end:step]`` along the axes."""
    return graph.node("Slice", x, *map(graph.integers, (begins, ends, axes, steps)))


def padded(graph: Emitter, x: Source, begins: Sequence[int], ends: Sequence[int]) -> Source:
    """Return ``x`` with zeros around it: counts for each axis, at its begin and its end."""
    if not any(begins) and not any(ends):
        return x
    return graph.node("Pad", x, graph.integers([*begins, *ends]))


def turned(graph: Emitter, x: Source, order: Sequence[int]) -> str:
    """Return ``x`` with its axes in another order."""
    return graph.node("Transpose", x, perm=list(order))


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
