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
from torch._decomp import core_aten_decompositions, get_decompositions

from fleetlearn_export.convolution import convolution_backward
from fleetlearn_export.pooling import max_pool2d, max_pool2d_with_indices, max_pool2d_with_indices_backward

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]]


def decompositions(graph: torch.fx.Graph) -> Decompositions:
    """The replacements for a joint forward-backward graph."""
    # Batch norm in training mode, which the ONNX exporter would write as the inference operator, without an error.
    table: Decompositions = {
        **core_aten_decompositions(),
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
