"""The backward pass of convolution in ONNX operators, for operators.py's table."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.onnx.ops import symbolic

from fleetlearn_export.pooling import Attributes


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
    """The gradients of a convolution's input, weight and bias.

    Input: the transposed convolution (of a transposed one: the convolution). Weight: the convolution of the input
    with the output's gradient, examples and channels exchanged, stride and dilation exchanged, cropped to the kernel.
    """
    axes = list(range(2, x.dim()))
    stride, padding, dilation = (list(values) * (len(axes) // len(values)) for values in (stride, padding, dilation))
    attributes: Attributes = {
        "strides": stride,
        "pads": padding * 2,
        "dilations": dilation,
        "group": groups,
        "kernel_shape": [int(weight.shape[axis]) for axis in axes],
    }
    grad_x = grad_weight = grad_bias = None
    if output_mask[0] and transposed:
        grad_x = symbolic("Conv", (grad, weight), attributes, dtype=grad.dtype, shape=x.shape)
    elif output_mask[0]:
        attributes["output_padding"] = [
            int(x.shape[axis])
            - (
                (int(grad.shape[axis]) - 1) * stride[i]
                - 2 * padding[i]
                + dilation[i] * (int(weight.shape[axis]) - 1)
                + 1
            )
            for i, axis in enumerate(axes)
        ]
        grad_x = symbolic("ConvTranspose", (grad, weight), attributes, dtype=grad.dtype, shape=x.shape)
    if output_mask[1]:
        # A transposed convolution is the convolution from its output to its input, with the same weight.
        signal, kernel = (grad, x) if transposed else (x, grad)
        grad_weight = _weight_gradient(kernel, signal, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = grad.sum([0, *axes])
    return grad_x, grad_weight, grad_bias


def _weight_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    examples, spatial = x.shape[0], list(range(2, x.dim()))
    outputs, inputs = weight.shape[:2]
    places = [int(x.shape[axis]) for axis in spatial]
    grad_places = [int(grad.shape[axis]) for axis in spatial]
    # (n, groups * inputs, ...) -> (inputs, groups * n, ...): the convolution's groups are then the channels' blocks.
    if groups == 1:
        signal = x.transpose(0, 1)
    else:
        signal = x.reshape(examples, groups, inputs, *places).permute(2, 1, 0, *(axis + 1 for axis in spatial))
        signal = signal.reshape(inputs, groups * examples, *places)
    kernel = grad.transpose(0, 1)
    sizes = [
        (places[i] + 2 * padding[i] - stride[i] * (grad_places[i] - 1) - 1) // dilation[i] + 1
        for i in range(len(spatial))
    ]
    out = symbolic(
        "Conv",
        (signal, kernel),
        {
            "strides": list(dilation),
            "dilations": list(stride),
            "pads": list(padding) * 2,
            "group": groups,
            "kernel_shape": grad_places,
        },
        dtype=x.dtype,
        shape=[inputs, outputs, *sizes],
    )
    for axis in spatial:
        if sizes[axis - 2] != weight.shape[axis]:
            out = out.narrow(axis, 0, int(weight.shape[axis]))
    return out.transpose(0, 1)
