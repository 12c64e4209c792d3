"""What PyTorch's backward pass uses and ONNX has no operator for, said in ONNX operators.

Each function replaces one ATen operator while a program is decomposed. ``symbolic`` places an ONNX operator of the
standard domain into the program; its result has the right shape and no values, so a decomposed program can only be
exported, not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.onnx.ops import symbolic, symbolic_multi_out

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]]
Attributes = dict[str, int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]]


def decompositions(graph: torch.fx.Graph) -> Decompositions:
    """The replacements for a joint forward-backward graph."""
    # Batch norm in training mode, which the ONNX exporter would write as the inference operator, without an error.
    table: Decompositions = {
        **get_decompositions([aten._native_batch_norm_legit_functional]),
        aten.convolution_backward.default: convolution_backward,
        aten.empty_permuted.default: empty_permuted,
    }
    if _indices_only_for_backward(graph):
        table[aten.max_pool2d_with_indices.default] = max_pool2d_with_indices
        table[aten.max_pool2d_with_indices_backward.default] = max_pool2d_with_indices_backward
    return table


def inference_decompositions(graph: torch.fx.Graph) -> Decompositions:
    """The replacements for a forward graph: max-pooling that rounds up."""
    pools = (node for node in graph.nodes if node.target is aten.max_pool2d.default)
    return (
        {aten.max_pool2d.default: max_pool2d}
        if any(True in (*node.args[5:], node.kwargs.get("ceil_mode")) for node in pools)
        else {}
    )


def empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> Tensor:
    return torch.zeros(tuple(size), dtype=options.get("dtype") or torch.float32)


def _indices_only_for_backward(graph: torch.fx.Graph) -> bool:
    """Whether max-pooling's indices stay inside the pooling operators, so that they may be counted in ONNX's way.

    PyTorch counts inside one image's channel, ONNX over the whole array; converting costs a second pooling.
    """
    for node in graph.nodes:
        if node.target is aten.max_pool2d_with_indices.default:
            for item in node.users:
                if item.args[1] == 1 and any(
                    user.target is not aten.max_pool2d_with_indices_backward.default for user in item.users
                ):
                    return False
    return True


def _pair(value: Sequence[int] | int, default: Sequence[int] = ()) -> list[int]:
    values = [value] if isinstance(value, int) else list(value) or list(default)
    return values * 2 if len(values) == 1 else values


def max_pool2d_with_indices(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """MaxPool with its indices counted over the whole array."""
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
    """MaxPool."""
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
    """MaxPool's attributes and its result's shape.

    Rounding up is said by padding at the end: under ceil_mode, ONNX Runtime 1.19 keeps a last window that begins behind
    the image, which PyTorch leaves out.
    """
    kernel, begin, dilations = _pair(kernel_size), _pair(padding), _pair(dilation)
    strides, end = _pair(stride, kernel), list(begin)
    shape = [*x.shape[:-2]]
    for axis in range(2):
        size, reach = int(x.shape[axis - 2]), dilations[axis] * (kernel[axis] - 1) + 1
        windows = (size + 2 * begin[axis] - reach + (strides[axis] - 1) * ceil_mode) // strides[axis] + 1
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
    """Send each output's gradient to where its maximum was; windows that overlap add up."""
    kernel = _pair(kernel_size)
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, _pair(dilation), strict=True)]
    if all(size <= step for size, step in zip(reach, _pair(stride, kernel), strict=True)):
        shape = symbolic("Shape", (x,), dtype=torch.int64, shape=[x.dim()])
        # The indices alone say where; with the pool's own kernel, ONNX Runtime refuses shapes that were rounded.
        attributes: Attributes = {"kernel_shape": [1, 1], "strides": [1, 1]}
        return symbolic("MaxUnpool", (grad, indices, shape), attributes, dtype=grad.dtype, shape=x.shape)
    flat = torch.zeros_like(x).reshape(-1)
    scattered = symbolic(
        "ScatterElements",
        (flat, indices.reshape(-1), grad.reshape(-1)),
        {"axis": 0, "reduction": "add"},
        dtype=grad.dtype,
        shape=flat.shape,
    )
    return scattered.reshape(x.shape)


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
