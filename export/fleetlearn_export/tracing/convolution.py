"""The backward pass of convolution in ONNX operators."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.onnx.ops import symbolic

from fleetlearn_export.tracing.max_pooling import Attributes
from fleetlearn_export.tracing.windows import FEW_CHANNELS, LONG_ROW, MANY_TAPS, Windows, per_axis


def _padded(x: Tensor, windows: Windows, first: int) -> Tensor:
    """Return ``x`` with zeros around the image, whose first axis is ``first``."""
    after = x.dim() - first - len(windows.kernel)
    both = [size for size in reversed(windows.padding) for _ in range(2)]
    return torch.constant_pad_nd(x, [0] * 2 * after + both) if any(windows.padding) else x


def _shifted(x: Tensor, windows: Windows, first: int, tap: Sequence[int]) -> Tensor:
    """Return the elements of the padded ``x`` that the tap multiplies, in the output's shape."""
    for i, (begin, places, step) in enumerate(
        zip(windows.begins(tap), windows.places, windows.stride, strict=True)
    ):
        x = x.narrow(first + i, begin, (places - 1) * step + 1)
        if step > 1 and places > 1:
            x = x[(slice(None),) * (first + i) + (slice(None, None, step),)]
    return x


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a convolution's input, weight and bias.

    The input's is the transposed convolution (for a transposed one, the convolution).
    """
    axes = list(range(2, x.dim()))
    stride, padding, dilation = (
        per_axis(values, len(axes)) for values in (stride, padding, dilation)
    )
    attributes: Attributes = {
        "strides": stride,
        "pads": padding * 2,
        "dilations": dilation,
        "group": groups,
        "kernel_shape": _sizes(weight),
    }
    # A transposed convolution is the convolution from its output to its input, with the same
    # weight.
    signal, kernel = (grad, x) if transposed else (x, grad)
    windows = Windows(_sizes(weight), _sizes(kernel), stride, padding, dilation)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0] and transposed:
        grad_x = symbolic("Conv", (grad, weight), attributes, dtype=grad.dtype, shape=x.shape)
    elif output_mask[0]:
        attributes["output_padding"] = windows.output_padding(_sizes(x))
        grad_x = symbolic(
            "ConvTranspose", (grad, weight), attributes, dtype=grad.dtype, shape=x.shape
        )
    if output_mask[1]:
        grad_weight = _weight_gradient(kernel, signal, weight, windows, groups)
    if output_mask[2]:
        grad_bias = grad.sum([0, *axes])
    return grad_x, grad_weight, grad_bias


def _sizes(x: Tensor) -> list[int]:
    """Return the sizes of the axes after the first two."""
    return [int(size) for size in x.shape[2:]]


def _weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, windows: Windows, groups: int
) -> Tensor:
    """Return the gradient of the weight from ``grad``, the gradient of the output, and ``x``, the
    input.

    For each element of the output an element of the kernel (a tap) multiplies one element of the
    input. The tap's gradient is the sum of the products of these two over all elements and
    examples: a matrix product. Which arrangement of these products costs least depends on the sizes
    alone (docs/internals/performance.md).
    """
    taps, channels = prod(windows.kernel), int(weight.shape[1])
    if windows.side_by_side and groups == 1:
        gradient = _products(grad, _columns_side_by_side(x, windows))
    elif taps > MANY_TAPS:
        gradient = _by_convolution(grad, x, windows, groups)
    elif channels == 1 and groups == weight.shape[0]:
        depthwise = _by_rows if _sizes(x)[-1] <= LONG_ROW * windows.kernel[-1] else _by_sums
        gradient = depthwise(grad, x, windows)
    elif channels < FEW_CHANNELS and groups == 1:
        gradient = _products(grad, _columns(x, windows))
    else:
        gradient = _tap_by_tap(grad, x, windows, groups)
    return gradient.reshape(weight.shape)


def _products(grad: Tensor, columns: Tensor) -> Tensor:
    """Multiply (n, outputs, ...) and (n, inputs, places), summed over examples and places ->
    (outputs, inputs)."""
    grad = grad.flatten(2)
    outputs, inputs, places = int(grad.shape[1]), int(columns.shape[1]), int(grad.shape[2])
    if places == 1:
        return grad.squeeze(2).t() @ columns.squeeze(2)
    if outputs * inputs < (outputs + inputs) * places:
        return (grad @ columns.transpose(1, 2)).sum(0)
    # A product for each example would be larger than its factors.
    return grad.transpose(0, 1).flatten(1) @ columns.transpose(1, 2).flatten(0, 1)


def _columns(x: Tensor, windows: Windows) -> Tensor:
    """Return the elements that each tap multiplies: (n, channels, ...) -> (n, channels * taps,
    places)."""
    padded = _padded(x, windows, 2)
    return (
        torch.stack([_shifted(padded, windows, 2, tap) for tap in windows.taps], 2)
        .flatten(1, 2)
        .flatten(2)
    )


def _columns_side_by_side(x: Tensor, windows: Windows) -> Tensor:
    """Return the same for windows side by side, where no element is in two windows."""
    shape, order = list(x.shape[:2]), [0, 1]
    for i, (size, count) in enumerate(zip(windows.kernel, windows.places, strict=True)):
        x = x.narrow(2 + i, 0, size * count)
        shape += [count, size]
        order.append(3 + 2 * i)
    return (
        x.reshape(shape)
        .permute(*order, *(axis - 1 for axis in order[2:]))
        .flatten(1, len(order) - 1)
        .flatten(2)
    )


def _tap_by_tap(grad: Tensor, x: Tensor, windows: Windows, groups: int) -> Tensor:
    """Multiply matrices for each tap, with the channels last: a tap then reads whole rows, which
    are cheap to copy.

    -> (outputs, inputs of a group, taps).
    """
    image, grouped = len(windows.kernel), int(groups > 1)
    if grouped:
        x, grad = (
            value.reshape(x.shape[0], groups, -1, *_sizes(value)).transpose(0, 1)
            for value in (x, grad)
        )
    first = 1 + grouped
    x = x.permute(*range(first), *range(first + 1, first + 1 + image), first)
    grad = grad.transpose(grouped, grouped + 1).flatten(first)
    padded = _padded(x, windows, first)
    products = [
        grad @ _shifted(padded, windows, first, tap).flatten(grouped, grouped + image)
        for tap in windows.taps
    ]
    return torch.stack(products, -1).flatten(0, grouped)


def _by_rows(grad: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """Depthwise: multiply all pairs of elements of an output row and the matching input row, then
    add up each tap's.

    -> (channels, taps).
    """
    rows = Windows(*(values[:-1] for values in windows))
    x = x.transpose(0, 1)
    grad = grad.transpose(0, 1).flatten(1, -2).transpose(1, 2)
    padded = _padded(x, rows, 2)
    pairs = torch.stack(
        [grad @ _shifted(padded, rows, 2, tap).flatten(1, -2) for tap in rows.taps], 1
    )
    return (pairs.flatten(2) @ _of_taps(windows, int(x.shape[-1])).to(x.dtype)).flatten(1)


def _of_taps(windows: Windows, size: int) -> Tensor:
    """Return 1 where a pair of indices in the last axes of output and input is a tap's -> (places *
    size, taps)."""
    a = torch.arange(windows.places[-1]).reshape(-1, 1, 1)
    b = torch.arange(size).reshape(1, -1, 1)
    tap = torch.arange(windows.kernel[-1])
    return (b == a * windows.stride[-1] - windows.padding[-1] + tap * windows.dilation[-1]).flatten(
        0, 1
    )


def _by_sums(grad: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """Depthwise: compute a sum for each tap, with the channels last. -> (channels, taps)."""
    image = range(2, x.dim())
    padded = _padded(x.permute(0, *image, 1), windows, 1)
    grad = grad.permute(0, *image, 1)
    sums = [
        (_shifted(padded, windows, 1, tap) * grad).sum(list(range(x.dim() - 1)))
        for tap in windows.taps
    ]
    return torch.stack(sums, 1)


def _by_convolution(grad: Tensor, x: Tensor, windows: Windows, groups: int) -> Tensor:
    """Convolve the input with the output's gradient as the kernel -> (outputs, inputs of a group,
    ...).

    Examples and channels are exchanged, and so are stride and dilation. The result is cropped to
    the kernel's size.
    """
    examples, image = x.shape[0], list(range(2, x.dim()))
    outputs, inputs, sizes = int(grad.shape[1]), int(x.shape[1]) // groups, _sizes(x)
    # (n, groups * inputs, ...) -> (inputs, groups * n, ...): the convolution's groups are then the
    # channels' blocks.
    if groups == 1:
        signal = x.transpose(0, 1)
    else:
        signal = x.reshape(examples, groups, inputs, *sizes).permute(
            2, 1, 0, *(axis + 1 for axis in image)
        )
        signal = signal.reshape(inputs, groups * examples, *sizes)
    places = [
        (size + 2 * pad - step * (count - 1) - 1) // gap + 1
        for size, count, step, pad, gap in zip(sizes, *windows[1:], strict=True)
    ]
    out = symbolic(
        "Conv",
        (signal, grad.transpose(0, 1)),
        {
            "strides": windows.dilation,
            "dilations": windows.stride,
            "pads": windows.padding * 2,
            "group": groups,
            "kernel_shape": windows.places,
        },
        dtype=x.dtype,
        shape=[inputs, outputs, *places],
    )
    for axis, size in zip(image, windows.kernel, strict=True):
        if places[axis - 2] != size:
            out = out.narrow(axis, 0, size)
    return out.transpose(0, 1)
