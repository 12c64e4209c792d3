"""Max pooling and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Source, Value, fixed_sizes
from fleetlearn_export.emission.operators.layout import enlarged
from fleetlearn_export.tracing.windows import per_axis

aten = torch.ops.aten


class Pool(NamedTuple):
    """A max pooling's geometry: one number for each of the image's axes."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    sizes: list[int]
    """The image's."""
    windows: list[int]
    """The result's size."""

    @property
    def covers(self) -> bool:
        """Whether each element of the image is in exactly one window."""
        return (
            self.stride == self.kernel
            and not any(self.padding)
            and all(gap == 1 for gap in self.dilation)
            and all(size % length == 0 for size, length in zip(self.sizes, self.kernel, strict=True))
        )

    @property
    def apart(self) -> bool:
        """Whether no element is in two windows."""
        reach = [(size - 1) * gap + 1 for size, gap in zip(self.kernel, self.dilation, strict=True)]
        return all(size <= step for size, step in zip(reach, self.stride, strict=True))


def _pool(
    x: Value,
    out: Tensor | Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    count: int,
) -> Pool:
    kernel = per_axis(kernel_size, count)
    return Pool(
        kernel,
        per_axis(stride, count, kernel),
        per_axis(padding, count),
        per_axis(dilation, count),
        fixed_sizes(x, slice(-count, None)),
        fixed_sizes(out.traced if isinstance(out, Value) else out, slice(-count, None)),
    )


def _max_pool(graph: Emitter, x: Value, pool: Pool, outputs: int) -> list[str]:
    """Return the maxima, and with 2 outputs their indices in the whole array.

    Sizes are rounded up by padding at the end: with ceil_mode, ONNX Runtime 1.19 keeps a last window that begins beyond
    the image. PyTorch leaves that window out.
    """
    end = [
        max(pad, (windows - 1) * step + gap * (length - 1) + 1 - size - pad)
        for length, step, pad, gap, size, windows in zip(*pool, strict=True)
    ]
    image: Source = x if x.rank == len(pool.kernel) + 2 else graph.reshaped(x, [1, *x.shape])
    return graph.nodes_outputs(
        "MaxPool",
        outputs,
        image,
        kernel_shape=pool.kernel,
        strides=pool.stride,
        pads=pool.padding + end,
        dilations=pool.dilation,
    )


def _maxima(graph: Emitter, x: Source, pool: Pool, channels: int) -> str:
    """Return the maxima of windows that cover the image, as (n, 1, ...).

    ONNX Runtime gets the image as one channel: it would reorder several channels for this one operator.
    """
    flat = graph.node("Reshape", x, graph.integers([-1, 1, channels * pool.sizes[0], *pool.sizes[1:]]))
    return graph.node("MaxPool", flat, kernel_shape=pool.kernel, strides=pool.kernel)


def max_pool_with_indices(
    graph: Emitter,
    out: tuple[Tensor, Tensor],
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> list[str]:
    """Return the maxima and their indices in one image of one channel, which ONNX numbers over the whole array.

    The backward pass does not read these indices. So they are mostly not read, and dropped.
    """
    count = 3 if len(kernel_size) == 3 else 2
    pool = _pool(x, out[0], kernel_size, stride, padding, dilation, count)
    maxima, indices = _max_pool(graph, x, pool, 2)
    if pool.covers:
        maxima = _maxima(graph, x, pool, prod(fixed_sizes(x, slice(1, -count))))
    if pool.covers or x.rank != count + 2:
        maxima = graph.reshaped(maxima, list(out[0].shape))
    indices = graph.node("Mod", indices, graph.integers([prod(pool.sizes)]))
    return [maxima, indices if x.rank == count + 2 else graph.reshaped(indices, list(out[0].shape))]


def max_pool_backward(
    graph: Emitter,
    out: Tensor,
    grad: Value,
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
) -> str:
    """Add each output's gradient at the index of its maximum.

    ``indices`` are the forward pass's, so they are found again from x: a node that is in the graph already.
    """
    count = 3 if len(kernel_size) == 3 else 2
    pool = _pool(x, grad, kernel_size, stride, padding, dilation, count)
    if pool.covers:
        return _at_first_maxima(graph, grad, x, pool)
    places = _max_pool(graph, x, pool, 2)[1]
    if pool.apart and x.rank == count + 2:
        # MaxUnpool needs the indices only. With the pool's own kernel ONNX Runtime refuses shapes that were rounded.
        ones = [1] * count
        return graph.node("MaxUnpool", grad, places, graph.node("Shape", x), kernel_shape=ones, strides=ones)
    flat = graph.integers([-1])
    zeros = graph.node("Expand", graph.number(0, grad.dtype), graph.node("Reshape", graph.node("Size", x), flat))
    scattered = graph.node(
        "ScatterElements",
        zeros,
        graph.node("Reshape", places, flat),
        graph.node("Reshape", grad, flat),
        axis=0,
        reduction="add",
    )
    return graph.node("Reshape", scattered, graph.node("Shape", x))


def _at_first_maxima(graph: Emitter, grad: Value, x: Value, pool: Pool) -> str:
    """Place each gradient at its window's first maximum, for windows that cover the image.

    ONNX Runtime takes many times longer for the indices of maxima than for the maxima. So the first element that equals
    the maximum is found by comparing.
    """
    channels = prod(fixed_sizes(x, slice(1, -len(pool.kernel))))
    rows = pool.windows[0] * channels
    order = _order(graph, pool, channels)
    rank = len(pool.kernel) + 2
    image = graph.node("Reshape", x, graph.integers([-1, 1, channels * pool.sizes[0], *pool.sizes[1:]]))
    largest = graph.node("Equal", image, enlarged(graph, _maxima(graph, x, pool, channels), rank, pool.kernel))
    marked = graph.node("Mul", graph.cast_node(largest, x.dtype), order)
    first = graph.node("MaxPool", marked, kernel_shape=pool.kernel, strides=pool.kernel)
    here = graph.node("Equal", enlarged(graph, first, rank, pool.kernel), order)
    share = graph.node("Reshape", grad, graph.integers([-1, 1, rows, *pool.windows[1:]]))
    spread = graph.node("Mul", enlarged(graph, share, rank, pool.kernel), graph.cast_node(here, grad.dtype))
    return graph.reshaped(spread, x.shape)


def _order(graph: Emitter, pool: Pool, channels: int) -> str:
    """Return for each element of the image, its channels one below the other, its rank in its window: the first has
    the largest number, none has 0.

    The graph holds it for one window. ONNX Runtime repeats it once, when it loads the graph.
    """
    order = np.arange(prod(pool.kernel), 0, -1, dtype=np.float32).reshape(pool.kernel)
    return graph.node("Tile", graph.array(order), graph.integers([channels * pool.windows[0], *pool.windows[1:]]))


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.max_pool2d_with_indices.default: max_pool_with_indices,
    aten.max_pool3d_with_indices.default: max_pool_with_indices,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.max_pool3d_with_indices_backward.default: max_pool_backward,
}
