"""Pooling and its backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Array, Emitter, Handler, Source, Value, fixed_sizes
from fleetlearn_export.emission.operators.layout import enlarged, sliced
from fleetlearn_export.tracing.windows import per_axis

aten = torch.ops.aten


def average_pool(
    graph: Emitter,
    out: Tensor,
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> str:
    """Average over windows. Sizes are rounded up by padding at the end, since runtimes differ with
    ONNX's ceil_mode."""
    count = len(kernel_size) if len(kernel_size) > 1 else x.rank - 2
    kernel, begin = per_axis(kernel_size, count), per_axis(padding, count)
    strides = per_axis(stride, count, kernel)
    sizes, windows = fixed_sizes(x, slice(-count, None)), fixed_sizes(out, slice(-count, None))
    end = [
        max(pad, (places - 1) * step + size - length - pad)
        for length, places, step, size, pad in zip(
            sizes, windows, strides, kernel, begin, strict=True
        )
    ]
    # Pooling takes one array without examples too.
    image = x if x.rank == count + 2 else graph.reshaped(x, [1, *x.shape])
    # ONNX Runtime would fuse padding into it, which it then refuses as larger than the window
    if prod(kernel) == 1:
        means = sliced(graph, image, range(2, 2 + count), [0] * count, sizes, strides)
    else:
        means = graph.node(
            "AveragePool",
            image,
            kernel_shape=kernel,
            strides=strides,
            pads=begin + end,
            count_include_pad=1,
        )
    counts = _counts(sizes, windows, kernel, strides, begin, count_include_pad, divisor_override)
    if (counts != prod(kernel)).any():
        means = graph.node("Mul", means, graph.array((prod(kernel) / counts).astype(np.float32)))
    return means if image is x else graph.reshaped(means, list(out.shape))


def _counts(
    sizes: Sequence[int],
    windows: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
    divisor_override: int | None,
) -> Array:
    """Return by what each window's sum is divided -> the windows' shape, or one number for all."""
    if divisor_override:
        return np.asarray(float(divisor_override))
    counts: Array = np.ones([1] * len(sizes))
    for axis, (size, pad) in enumerate(zip(sizes, padding, strict=True)):
        # With sizes rounded up a window may reach beyond the padding. Elements there do not count.
        begin = np.arange(windows[axis]) * strides[axis] - pad
        end = np.minimum(begin + kernel[axis], size + pad)
        if not count_include_pad:
            begin, end = np.maximum(begin, 0), np.minimum(end, size)
        counts = counts * (end - begin).reshape([-1] + [1] * (len(sizes) - 1 - axis))
    return counts if (counts != counts.flat[0]).any() else np.asarray(float(counts.flat[0]))


def average_pool_backward(
    graph: Emitter,
    out: Tensor,
    grad: Value,
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> str:
    """Add each output's gradient, divided by its window's size, to all elements of the window.

    If windows overlap, that is the transposed convolution with a kernel of ones.
    """
    count = len(kernel_size) if len(kernel_size) > 1 else x.rank - 2
    kernel, pads = per_axis(kernel_size, count), per_axis(padding, count)
    strides = per_axis(stride, count, kernel)
    sizes, windows = fixed_sizes(x, slice(-count, None)), fixed_sizes(grad, slice(-count, None))
    counts = _counts(sizes, windows, kernel, strides, pads, count_include_pad, divisor_override)
    share = graph.node("Mul", grad, graph.array((1 / counts).astype(np.float32)))
    within = all(
        places * size <= length for places, size, length in zip(windows, kernel, sizes, strict=True)
    )
    if kernel == strides and not any(pads) and within:
        return _over_windows(graph, share, x, kernel, windows)
    over = [
        length - ((places - 1) * step - 2 * pad + size)
        for length, places, step, pad, size in zip(
            sizes, windows, strides, pads, kernel, strict=True
        )
    ]
    spread = graph.node(
        "ConvTranspose",
        graph.node("Reshape", share, graph.integers([-1, 1, *windows])),
        graph.array(np.ones([1, 1, *kernel], np.float32)),
        kernel_shape=kernel,
        strides=strides,
        pads=pads * 2,
        output_padding=[max(rest, 0) for rest in over],
    )
    if min(over) < 0:
        spread = sliced(graph, spread, range(2, 2 + count), [0] * count, sizes, [1] * count)
    return graph.reshaped(spread, x.shape)


def _over_windows(
    graph: Emitter, share: Source, x: Value, kernel: Sequence[int], windows: Sequence[int]
) -> str:
    """Repeat each window's value over the window, for windows side by side. Elements behind the
    last window are 0."""
    sizes = fixed_sizes(x, slice(-len(kernel), None))
    rest = [
        size - places * length for size, places, length in zip(sizes, windows, kernel, strict=True)
    ]
    behind = {axis: (0, size) for axis, size in enumerate(rest, x.rank - len(kernel))}
    return graph.padded(enlarged(graph, share, x.rank, kernel), x.rank, behind)


def adaptive_average_pool(graph: Emitter, out: Tensor, x: Value, output_size: Sequence[int]) -> str:
    """Average over windows of equal sizes if they fit, else multiply with a matrix along each
    axis."""
    count = len(output_size)
    sizes, outs = fixed_sizes(x, slice(-count, None)), fixed_sizes(out, slice(-count, None))
    if all(size % windows == 0 for size, windows in zip(sizes, outs, strict=True)):
        kernel = [size // windows for size, windows in zip(sizes, outs, strict=True)]
        return average_pool(graph, out, x, kernel)
    means: Source = x
    for axis, (size, windows) in enumerate(zip(sizes, outs, strict=True), x.rank - count):
        means = _along(graph, means, _averaging_matrix(size, windows), axis, x.rank)
    assert isinstance(means, str)
    return means


def adaptive_average_pool2d_backward(graph: Emitter, out: Tensor, grad: Value, x: Value) -> str:
    return _adaptive_average_pool_backward(graph, grad, x, 2)


def adaptive_average_pool3d_backward(graph: Emitter, out: Tensor, grad: Value, x: Value) -> str:
    return _adaptive_average_pool_backward(graph, grad, x, 3)


def _adaptive_average_pool_backward(graph: Emitter, grad: Value, x: Value, count: int) -> str:
    sizes, outs = fixed_sizes(x, slice(-count, None)), fixed_sizes(grad, slice(-count, None))
    if all(size % windows == 0 for size, windows in zip(sizes, outs, strict=True)):
        kernel = [size // windows for size, windows in zip(sizes, outs, strict=True)]
        share = graph.node("Mul", grad, graph.number(1 / prod(kernel), grad.dtype))
        if max(outs) == 1:
            return graph.expanded(share, x.shape)
        return _over_windows(graph, share, x, kernel, outs)
    gradient: Source = grad
    for axis, (size, windows) in enumerate(zip(sizes, outs, strict=True), x.rank - count):
        gradient = _along(graph, gradient, _averaging_matrix(size, windows).T, axis, x.rank)
    assert isinstance(gradient, str)
    return gradient


def _averaging_matrix(size: int, windows: int) -> Array:
    """Return the matrix (windows, size) of adaptive average pooling along one axis.

    Window i goes from floor(i * size / windows) up to, but without, ceil((i + 1) * size / windows).
    """
    places, i = np.arange(size), np.arange(windows)[:, None]
    begin, end = i * size // windows, ((i + 1) * size + windows - 1) // windows
    matrix: Array = (((places >= begin) & (places < end)) / (end - begin)).astype(np.float32)
    return matrix


def _along(graph: Emitter, x: Source, matrix: Array, axis: int, rank: int) -> str:
    """Multiply with the matrix along an axis."""
    if axis == rank - 2:
        return graph.node("MatMul", graph.array(matrix), x)
    last = list(range(rank))
    last[axis], last[-1] = last[-1], last[axis]
    swap = axis != rank - 1
    product = graph.node(
        "MatMul", graph.node("Transpose", x, perm=last) if swap else x, graph.array(matrix.T)
    )
    return graph.node("Transpose", product, perm=last) if swap else product


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.avg_pool2d.default: average_pool,
    aten.avg_pool3d.default: average_pool,
    aten.avg_pool2d_backward.default: average_pool_backward,
    aten.avg_pool3d_backward.default: average_pool_backward,
    aten._adaptive_avg_pool2d.default: adaptive_average_pool,
    aten._adaptive_avg_pool3d.default: adaptive_average_pool,
    aten._adaptive_avg_pool2d_backward.default: adaptive_average_pool2d_backward,
    aten._adaptive_avg_pool3d_backward.default: adaptive_average_pool3d_backward,
}
