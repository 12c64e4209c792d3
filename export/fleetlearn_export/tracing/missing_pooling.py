"""Pooling and its backward pass that PyTorch does not decompose and ONNX does not have, in other
PyTorch operators."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fleetlearn_export.tracing.windows import per_axis

aten = torch.ops.aten


def _sizes(x: Tensor, count: int) -> list[int]:
    """Return the sizes of the last ``count`` axes, the image's. The example fixes them."""
    return [int(size) for size in x.shape[-count:]]


def _repeat_over_windows(grad: Tensor, kernel: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Repeat each window's value over the window, for windows side by side. Elements behind the
    last window are 0."""
    count = len(kernel)
    head, sizes = list(grad.shape[:-count]), _sizes(grad, count)
    wide = grad.reshape(
        [*head, *(size for pair in zip(sizes, [1] * count, strict=True) for size in pair)]
    )
    wide = wide.expand(
        [*head, *(size for pair in zip(sizes, kernel, strict=True) for size in pair)]
    )
    whole = wide.reshape([*head, *(size * k for size, k in zip(sizes, kernel, strict=True))])
    rest = [int(size) - n * k for size, n, k in zip(shape[-count:], sizes, kernel, strict=True)]
    return (
        torch.constant_pad_nd(whole, [n for size in reversed(rest) for n in (0, size)])
        if any(rest)
        else whole
    )


def avg_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Add each output's gradient, divided by its window's size, to all elements of the window.

    If windows overlap, that is the transposed convolution with a kernel of ones.
    """
    sizes = _sizes(x, len(kernel_size)) if len(kernel_size) > 1 else _sizes(x, x.dim() - 2)
    count = len(sizes)
    kernel, pads = per_axis(kernel_size, count), per_axis(padding, count)
    strides = per_axis(stride, count, kernel)
    windows = _sizes(grad, count)
    if divisor_override:
        grad = grad / divisor_override
    else:
        for axis in range(count):
            # With sizes rounded up a window may reach beyond the padding. Elements there do not
            # count.
            begin = torch.arange(windows[axis]) * strides[axis] - pads[axis]
            end = (begin + kernel[axis]).clamp(max=sizes[axis] + pads[axis])
            if not count_include_pad:
                begin, end = begin.clamp(min=0), end.clamp(max=sizes[axis])
            grad = grad / (end - begin).to(grad.dtype).reshape([-1] + [1] * (count - 1 - axis))
    if (
        kernel == strides
        and not any(pads)
        and all(w * k <= n for w, k, n in zip(windows, kernel, sizes, strict=True))
    ):
        return _repeat_over_windows(grad, kernel, sizes)
    over = [
        n - ((w - 1) * s - 2 * p + k)
        for n, w, s, p, k in zip(sizes, windows, strides, pads, kernel, strict=True)
    ]
    out = aten.convolution(
        grad.reshape([-1, 1, *windows]),
        grad.new_ones([1, 1, *kernel]),
        None,
        strides,
        pads,
        [1] * count,
        True,
        [max(rest, 0) for rest in over],
        1,
    )
    for axis in range(count):
        if over[axis] < 0:
            out = out.narrow(2 + axis, 0, sizes[axis])
    whole: Tensor = out.reshape(x.shape)
    return whole


def _averaging_matrix(size: int, out: int, like: Tensor) -> Tensor:
    """Return the matrix (out, size) of adaptive average pooling along one axis.

    Window i goes from floor(i * size / out) up to, but without, ceil((i + 1) * size / out).
    """
    places, windows = torch.arange(size), torch.arange(out)[:, None]
    begin, end = windows * size // out, ((windows + 1) * size + out - 1) // out
    return ((places >= begin) & (places < end)).to(like.dtype) / (end - begin)


def _multiply_along(matrix: Tensor, x: Tensor, axis: int) -> Tensor:
    return torch.matmul(x.transpose(axis, -1), matrix.transpose(0, 1)).transpose(axis, -1)


def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    count = len(output_size)
    sizes = _sizes(x, count)
    if all(size % out == 0 for size, out in zip(sizes, output_size, strict=True)):
        kernel = [size // out for size, out in zip(sizes, output_size, strict=True)]
        pool: Tensor = (aten.avg_pool2d if count == 2 else aten.avg_pool3d)(x, kernel, kernel)
        return pool
    return adaptive_averages(x, output_size)


def adaptive_averages(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Compute adaptive average pooling as a matrix product along each axis."""
    for axis, out in enumerate(output_size, -len(output_size)):
        x = _multiply_along(_averaging_matrix(int(x.shape[axis]), out, x), x, axis)
    return x


def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    return _adaptive_avg_pool_backward(grad, x, 2)


def adaptive_avg_pool3d_backward(grad: Tensor, x: Tensor) -> Tensor:
    return _adaptive_avg_pool_backward(grad, x, 3)


def _adaptive_avg_pool_backward(grad: Tensor, x: Tensor, count: int) -> Tensor:
    sizes, outs = _sizes(x, count), _sizes(grad, count)
    if all(size % out == 0 for size, out in zip(sizes, outs, strict=True)):
        kernel = [size // out for size, out in zip(sizes, outs, strict=True)]
        return _repeat_over_windows(grad / prod(kernel), kernel, sizes)
    for axis, (size, out) in enumerate(zip(sizes, outs, strict=True), -count):
        grad = _multiply_along(_averaging_matrix(size, out, grad).transpose(0, 1), grad, axis)
    return grad


def _window_maxima(x: Tensor, axes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest element of each window and its index in the flattened image; of equals the
    first.

    axes: for each axis of the image the indices of the windows' elements along it, (outputs,
        kernel). An index may occur twice.
    """
    sizes, count = _sizes(x, len(axes)), len(axes)
    table = torch.zeros([1] * 2 * count, dtype=torch.int64)
    for axis, places in enumerate(axes):
        shape = [1] * 2 * count
        shape[axis], shape[count + axis] = places.shape
        table = table * sizes[axis] + places.reshape(shape)
    outs = [places.shape[0] for places in axes]
    table = table.reshape(prod(outs), -1)
    windows = x.reshape([*x.shape[:-count], -1])[..., table]
    values, within = windows.max(-1)
    indices = table.reshape(-1)[torch.arange(prod(outs)) * table.shape[1] + within]
    shape = [*x.shape[:-count], *outs]
    return values.reshape(shape), indices.reshape(shape)


def adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    axes = []
    for size, out in zip(_sizes(x, len(output_size)), output_size, strict=True):
        windows = torch.arange(out)[:, None]
        begin, end = windows * size // out, ((windows + 1) * size + out - 1) // out
        longest = max(((i + 1) * size + out - 1) // out - i * size // out for i in range(out))
        axes.append(torch.minimum(begin + torch.arange(longest), end - 1))
    return _window_maxima(x, axes)


def max_pool3d_with_indices(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    kernel, pads, steps = per_axis(kernel_size, 3), per_axis(padding, 3), per_axis(dilation, 3)
    axes = []
    for size, k, s, p, d in zip(
        _sizes(x, 3), kernel, per_axis(stride, 3, kernel), pads, steps, strict=True
    ):
        out = (size + 2 * p - d * (k - 1) - 1 + (s - 1) * ceil_mode) // s + 1
        if ceil_mode and (out - 1) * s >= size + p:
            out -= 1  # the last window would begin beyond the image
        places = torch.arange(out)[:, None] * s - p + torch.arange(k) * d
        # The padding never holds the largest element: use the window's first or last index inside
        # the image instead.
        places = places + d * ((-places).clamp(min=0) + d - 1).div(d, rounding_mode="floor")
        axes.append(
            places - d * ((places - size + 1).clamp(min=0) + d - 1).div(d, rounding_mode="floor")
        )
    return _window_maxima(x, axes)


def adaptive_max_pool2d_backward(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return _add_at_maxima(grad, x, indices, 2)


def adaptive_max_pool3d_backward(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return _add_at_maxima(grad, x, indices, 3)


def max_pool3d_with_indices_backward(
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    return _add_at_maxima(grad, x, indices, 3)


def _add_at_maxima(grad: Tensor, x: Tensor, indices: Tensor, count: int) -> Tensor:
    """Add each output's gradient at the index of its maximum in the flattened image."""
    head = x.shape[:-count]
    flat = torch.zeros_like(x).reshape([*head, -1])
    return flat.scatter_add(-1, indices.reshape([*head, -1]), grad.reshape([*head, -1])).reshape(
        x.shape
    )
