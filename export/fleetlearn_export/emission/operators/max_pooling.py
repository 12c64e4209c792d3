"""Max pooling and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from math import inf, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Source, Value, fixed_sizes
from fleetlearn_export.emission.operators.layout import enlarged, sliced
from fleetlearn_export.tracing.windows import MANY_TAPS, per_axis

aten = torch.ops.aten


class PoolingGeometry(NamedTuple):
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
            and all(
                size % length == 0 for size, length in zip(self.sizes, self.kernel, strict=True)
            )
        )

    @property
    def few_taps(self) -> bool:
        """Whether a graph with a few operators for each element along the kernel's axes is not too
        long."""
        return sum(self.kernel) <= MANY_TAPS and all(
            1 in pair for pair in zip(self.stride, self.dilation, strict=True)
        )

    @property
    def end_padding(self) -> list[int]:
        """What is padded at the end, so that all windows fit.

        Sizes are rounded up by this: with ceil_mode, ONNX Runtime 1.19 keeps a last window that
        begins beyond the image. PyTorch leaves that window out.
        """
        return [
            max(pad, (windows - 1) * step + gap * (length - 1) + 1 - size - pad)
            for length, step, pad, gap, size, windows in zip(*self, strict=True)
        ]


def _pool(
    x: Value,
    out: Tensor | Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    count: int,
) -> PoolingGeometry:
    kernel = per_axis(kernel_size, count)
    return PoolingGeometry(
        kernel,
        per_axis(stride, count, kernel),
        per_axis(padding, count),
        per_axis(dilation, count),
        fixed_sizes(x, slice(-count, None)),
        fixed_sizes(out.traced if isinstance(out, Value) else out, slice(-count, None)),
    )


def _max_pool(graph: Emitter, image: Source, pool: PoolingGeometry, outputs: int) -> list[str]:
    """Return the maxima, and with 2 outputs their indices in the whole array."""
    return graph.nodes_outputs(
        "MaxPool",
        outputs,
        image,
        kernel_shape=pool.kernel,
        strides=pool.stride,
        pads=pool.padding + pool.end_padding,
        dilations=pool.dilation,
    )


def _indices(graph: Emitter, x: Value, pool: PoolingGeometry) -> str:
    """Return the maxima's indices in the whole array."""
    return _max_pool(
        graph, x if x.rank == len(pool.kernel) + 2 else graph.reshaped(x, [1, *x.shape]), pool, 2
    )[1]


def _maxima(graph: Emitter, x: Source, pool: PoolingGeometry, channels: int) -> str:
    """Return the maxima of images that have one channel, ``channels`` of them below each other, as
    (n, 1, ...).

    Several channels ONNX Runtime would reorder for this one operator (20 x 64 x 32 x 32: 0.60
    CPU-ms, not 0.28).
    """
    flat = graph.node(
        "Reshape", x, graph.integers([-1, 1, channels * pool.sizes[0], *pool.sizes[1:]])
    )
    return _max_pool(graph, flat, pool, 1)[0]


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
    """Return the maxima and their indices in one image of one channel, which ONNX numbers over the
    whole array.

    The backward pass does not read these indices. So they are mostly not read, and dropped.
    """
    count = 3 if len(kernel_size) == 3 else 2
    pool = _pool(x, out[0], kernel_size, stride, padding, dilation, count)
    maxima = _maxima(graph, x, pool, prod(fixed_sizes(x, slice(1, -count))) if pool.covers else 1)
    indices = graph.node("Mod", _indices(graph, x, pool), graph.integers([prod(pool.sizes)]))
    return [graph.reshaped(maxima, list(out[0].shape)), graph.reshaped(indices, list(out[0].shape))]


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
    """Add each output's gradient at its window's first maximum. The forward pass's indices are not
    needed for it: ONNX Runtime takes many times longer for them than for the maxima, and in their
    place finds them by comparing."""
    count = 3 if len(kernel_size) == 3 else 2
    pool = _pool(x, grad, kernel_size, stride, padding, dilation, count)
    if pool.covers:
        return _at_first_maxima(graph, grad, x, pool)
    if pool.few_taps:
        return _axis_by_axis(graph, grad, x, pool)
    flat = graph.integers([-1])
    zeros = graph.node(
        "Expand", graph.number(0, grad.dtype), graph.node("Reshape", graph.node("Size", x), flat)
    )
    scattered = graph.node(
        "ScatterElements",
        zeros,
        graph.node("Reshape", _indices(graph, x, pool), flat),
        graph.node("Reshape", grad, flat),
        axis=0,
        reduction="add",
    )
    return graph.node("Reshape", scattered, graph.node("Shape", x))


def _at_first_maxima(graph: Emitter, grad: Value, x: Value, pool: PoolingGeometry) -> str:
    """Place each gradient at its window's first maximum, for windows that cover the image."""
    channels = prod(fixed_sizes(x, slice(1, -len(pool.kernel))))
    rows = pool.windows[0] * channels
    order = _order(graph, pool, channels)
    rank = len(pool.kernel) + 2
    image = graph.node(
        "Reshape", x, graph.integers([-1, 1, channels * pool.sizes[0], *pool.sizes[1:]])
    )
    largest = graph.node(
        "Equal", image, enlarged(graph, _maxima(graph, x, pool, channels), rank, pool.kernel)
    )
    marked = graph.node("Mul", graph.cast_node(largest, x.dtype), order)
    first = graph.node("MaxPool", marked, kernel_shape=pool.kernel, strides=pool.kernel)
    here = graph.node("Equal", enlarged(graph, first, rank, pool.kernel), order)
    share = graph.node("Reshape", grad, graph.integers([-1, 1, rows, *pool.windows[1:]]))
    spread = graph.node(
        "Mul", enlarged(graph, share, rank, pool.kernel), graph.cast_node(here, grad.dtype)
    )
    return graph.reshaped(spread, x.shape)


def _order(graph: Emitter, pool: PoolingGeometry, channels: int) -> str:
    """Return for each element of the image, its channels one below the other, its rank in its
    window: the first has the largest number, none has 0.

    The graph holds it for one window. ONNX Runtime repeats it once, when it loads the graph.
    """
    order = np.arange(prod(pool.kernel), 0, -1, dtype=np.float32).reshape(pool.kernel)
    return graph.node(
        "Tile", graph.array(order), graph.integers([channels * pool.windows[0], *pool.windows[1:]])
    )


def _axis_by_axis(graph: Emitter, grad: Value, x: Value, pool: PoolingGeometry) -> str:
    """Place each gradient at its window's first maximum, along one axis of the image after the
    other.

    A window's maximum is the greatest of its rows' maxima, and its first maximum is in the first
    row that has it. So an axis compares only as many elements as the kernel is long. With the
    channels last, what a tap sees are whole runs, which are cheap to copy. Windows of 3 x 3 two
    apart on 20 x 64 x 32 x 32 take 5.2 CPU-ms; MaxPool with indices and ScatterElements took 9.3.
    """
    channels = x.rank - len(pool.kernel) - 1
    last = [*range(channels), *range(channels + 1, x.rank), channels]
    image, share = graph.transposed(x, last), graph.transposed(grad, last)
    compared = []
    for axis in reversed(range(len(pool.kernel))):
        if (pool.kernel[axis], pool.stride[axis], pool.padding[axis]) != (1, 1, 0):
            taps = _taps(graph, image, pool, axis, x)
            image = graph.node("Max", *taps)
            compared.append((axis, taps, image))
    for axis, taps, maxima in reversed(compared):
        shares = []
        for tap in taps[:-1]:
            here = graph.cast_node(graph.node("Equal", tap, maxima), grad.dtype)
            shares.append(graph.node("Mul", share, here))
            share = graph.node("Sub", share, shares[-1])  # what no tap has taken yet
        share = _spread(graph, [*shares, share], pool, axis, x)
    return graph.transposed(share, [*range(channels), x.rank - 1, *range(channels, x.rank - 1)])


def _taps(graph: Emitter, image: str, pool: PoolingGeometry, axis: int, x: Value) -> list[str]:
    """Return what each element along one axis of the kernel sees in the windows of an image with
    the channels last."""
    image_axis = x.rank - 1 - len(pool.kernel) + axis
    step, gap, windows = pool.stride[axis], pool.dilation[axis], pool.windows[axis]
    ends = pool.padding[axis], pool.end_padding[axis]
    whole = graph.padded(image, x.rank, {image_axis: ends}, value=graph.number(-inf, x.dtype))
    begins = [tap * gap for tap in range(pool.kernel[axis])]
    return [
        sliced(graph, whole, [image_axis], [begin], [begin + (windows - 1) * step + 1], [step])
        for begin in begins
    ]


def _spread(
    graph: Emitter, shares: Sequence[str], pool: PoolingGeometry, axis: int, x: Value
) -> str:
    """Undo ``_taps``: add up, for each element of the image, the shares of the taps that see it."""
    image_axis = x.rank - 1 - len(pool.kernel) + axis
    kernel, step, pad, gap, size, windows = (value[axis] for value in pool)
    places = -(-max(pad + size, (windows - 1) * step + gap * (kernel - 1) + 1) // step)
    phases = []
    for phase in range(min(step, kernel)):  # the elements at ``step * place + phase``
        parts = []
        for tap in range(kernel):
            if tap * gap % step == phase:
                before = tap * gap // step
                parts.append(
                    graph.padded(
                        shares[tap], x.rank, {image_axis: (before, places - windows - before)}
                    )
                )
        phases.append(reduce(partial(graph.node, "Add"), parts))
    whole = phases[0]
    if step > 1:
        rows = [graph.node("Unsqueeze", row, graph.integers([image_axis + 1])) for row in phases]
        whole = graph.node("Concat", *rows, axis=image_axis + 1)
        whole = graph.padded(whole, x.rank + 1, {image_axis + 1: (0, step - len(phases))})
        sizes = [0] * image_axis + [places * step] + pool.windows[axis + 1 :] + [-1]
        whole = graph.node("Reshape", whole, graph.integers(sizes))
    return graph.padded(whole, x.rank, {image_axis: (-pad, pad + size - places * step)})


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.max_pool2d_with_indices.default: max_pool_with_indices,
    aten.max_pool3d_with_indices.default: max_pool_with_indices,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.max_pool3d_with_indices_backward.default: max_pool_backward,
}
