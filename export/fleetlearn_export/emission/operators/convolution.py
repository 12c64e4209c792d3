"""Convolutions and their backward passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Value, fixed_sizes
from fleetlearn_export.emission.operators.layout import per_axis, total
from fleetlearn_export.emission.operators.weight_gradient import Windows, weight_gradient

aten = torch.ops.aten


def convolution(
    graph: Emitter,
    out: Tensor,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    count = x.rank - 2
    return graph.node(
        "ConvTranspose" if transposed else "Conv",
        x,
        weight,
        bias,
        kernel_shape=fixed_sizes(weight, slice(2, None)),
        strides=per_axis(stride, count),
        pads=per_axis(padding, count) * 2,
        dilations=per_axis(dilation, count),
        group=groups,
        output_padding=per_axis(output_padding, count) if transposed else None,
    )


def convolution_backward(
    graph: Emitter,
    out: tuple[Tensor | None, ...],
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> list[str | None]:
    """Return the gradients of input, weight and bias, None where the mask is False."""
    count = x.rank - 2
    # A transposed convolution is the convolution from its output to its input, with the same weight.
    signal, result = (grad, x) if transposed else (x, grad)
    windows = Windows(
        fixed_sizes(weight, slice(2, None)),
        fixed_sizes(result, slice(2, None)),
        per_axis(stride, count),
        per_axis(padding, count),
        per_axis(dilation, count),
    )
    gradients: list[str | None] = [None, None, None]
    if output_mask[0]:
        gradients[0] = _input_gradient(graph, grad, x, weight, windows, transposed, groups)
    if output_mask[1]:
        gradients[1] = weight_gradient(graph, result, signal, weight, windows, groups)
    if output_mask[2]:
        gradients[2] = total(graph, grad, [0, *range(2, x.rank)])
    return gradients


def _input_gradient(
    graph: Emitter, grad: Value, x: Value, weight: Value, windows: Windows, transposed: bool, groups: int
) -> str:
    """Return the transposed convolution of the gradient; for a transposed convolution, the convolution."""
    rest = None
    if not transposed:
        reached = [
            (places - 1) * step - 2 * pad + gap * (size - 1) + 1
            for size, places, step, pad, gap in zip(*windows, strict=True)
        ]
        rest = [size - covered for size, covered in zip(fixed_sizes(x, slice(2, None)), reached, strict=True)]
    return graph.node(
        "Conv" if transposed else "ConvTranspose",
        grad,
        weight,
        kernel_shape=windows.kernel,
        strides=windows.stride,
        pads=windows.padding * 2,
        dilations=windows.dilation,
        group=groups,
        output_padding=rest,
    )


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
