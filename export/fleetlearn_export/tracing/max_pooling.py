"""Max pooling and its backward pass in ONNX operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.onnx.ops import symbolic, symbolic_multi_out

from fleetlearn_export.tracing.windows import per_axis

Attributes = dict[
    str, int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]
]


def max_pool2d_with_indices(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return MaxPool and its indices over the whole array; zeros as indices if the backward pass
    needs none."""
    if _windows_cover(x, kernel_size, stride, padding, dilation):
        values = _maxima(x, per_axis(kernel_size, 2))
        return values, torch.zeros_like(values, dtype=torch.int64)
    attributes, shape = _max_pool(x, kernel_size, stride, padding, dilation, ceil_mode)
    values, indices = symbolic_multi_out(
        "MaxPool", (x,), attributes, dtypes=(x.dtype, torch.int64), shapes=(shape, shape)
    )
    return values, indices


def max_pool2d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Tensor:
    """Return MaxPool."""
    attributes, shape = _max_pool(x, kernel_size, stride, padding, dilation, ceil_mode)
    return symbolic("MaxPool", (x,), attributes, dtype=x.dtype, shape=shape)


def _max_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Attributes, list[Any]]:
    """Return MaxPool's attributes and its result's shape.

    Sizes are rounded up by padding at the end: with ceil_mode, ONNX Runtime 1.19 keeps a last
    window that begins beyond the image. PyTorch leaves that window out.
    """
    kernel, begin, dilations = per_axis(kernel_size, 2), per_axis(padding, 2), per_axis(dilation, 2)
    strides, end = per_axis(stride, 2, kernel), list(begin)
    shape = [*x.shape[:-2]]
    for axis in range(2):
        size, reach = int(x.shape[axis - 2]), dilations[axis] * (kernel[axis] - 1) + 1
        windows = (size + 2 * begin[axis] - reach + (strides[axis] - 1) * ceil_mode) // strides[
            axis
        ] + 1
        if ceil_mode and (windows - 1) * strides[axis] >= size + begin[axis]:
            windows -= 1
        end[axis] = max(begin[axis], (windows - 1) * strides[axis] + reach - size - begin[axis])
        shape.append(windows)
    attributes: Attributes = {
        "kernel_shape": kernel,
        "strides": strides,
        "pads": begin + end,
        "dilations": dilations,
    }
    return attributes, shape


def _windows_cover(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether each element of the image is in exactly one window."""
    kernel = per_axis(kernel_size, 2)
    return (
        per_axis(stride, 2, kernel) == kernel
        and per_axis(padding, 2) == [0, 0]
        and per_axis(dilation, 2) == [1, 1]
        and all(int(x.shape[axis - 2]) % kernel[axis] == 0 for axis in range(2))
    )


def _maxima(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return the maxima of windows that cover the image.

    ONNX Runtime gets the image as one channel: it would reorder several channels for this one
    operator.
    """
    *head, height, width = x.shape
    flat = x.reshape(head[0], 1, -1, width)
    return max_pool2d(flat, kernel).reshape(
        *head, int(height) // kernel[0], int(width) // kernel[1]
    )


def enlarged(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Repeat each element of the last axes to a block of the kernel's size."""
    image = x.dim() - len(kernel)
    shape = [
        *x.shape[:image],
        *(int(size) * times for size, times in zip(x.shape[image:], kernel, strict=True)),
    ]
    scales = torch.cat([torch.ones(image), *(torch.full((1,), float(times)) for times in kernel)])
    attributes: Attributes = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    return symbolic("Resize", (x, None, scales), attributes, dtype=x.dtype, shape=shape)


def max_pool2d_with_indices_backward(
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Add each output's gradient at the index of its maximum.

    ONNX Runtime takes many times longer for the indices of maxima than for the maxima. If the
    windows are side by side and cover the image, comparing finds the first element of each window
    that equals its maximum.
    """
    kernel = per_axis(kernel_size, 2)
    if _windows_cover(x, kernel, stride, padding, dilation):
        height, width = (int(size) for size in x.shape[-2:])
        down, right = (
            torch.arange(size) % times for size, times in zip((height, width), kernel, strict=True)
        )
        # Decreasing over the window, and never 0.
        order = (kernel[0] * kernel[1] - kernel[1] * down.reshape(-1, 1) - right).to(x.dtype)
        largest = x == enlarged(_maxima(x, kernel), kernel)
        first = _maxima(largest.to(x.dtype) * order, kernel)
        return enlarged(grad, kernel) * (enlarged(first, kernel) == order).to(grad.dtype)
    reach = [
        (size - 1) * step + 1 for size, step in zip(kernel, per_axis(dilation, 2), strict=True)
    ]
    if all(size <= step for size, step in zip(reach, per_axis(stride, 2, kernel), strict=True)):
        shape = symbolic("Shape", (x,), dtype=torch.int64, shape=[x.dim()])
        # MaxUnpool needs the indices only. With the pool's own kernel ONNX Runtime refuses shapes
        # that were rounded.
        attributes: Attributes = {"kernel_shape": [1, 1], "strides": [1, 1]}
        return symbolic(
            "MaxUnpool", (grad, indices, shape), attributes, dtype=grad.dtype, shape=x.shape
        )
    flat = torch.zeros_like(x).reshape(-1)
    scattered = symbolic(
        "ScatterElements",
        (flat, indices.reshape(-1), grad.reshape(-1)),
        {"axis": 0, "reduction": "add"},
        dtype=grad.dtype,
        shape=flat.shape,
    )
    return scattered.reshape(x.shape)
