"""Tables of replacements for ATen operators that ONNX has no operator for.

Each function replaces one ATen operator while a program is decomposed. ``symbolic`` puts a standard
ONNX operator into the program. Its result has the right shape but no values, so a decomposed
program can be exported, but not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

from fleetlearn_export.tracing import linear_algebra, missing_functions, missing_pooling
from fleetlearn_export.tracing import missing_operators as missing
from fleetlearn_export.tracing.convolution import convolution_backward
from fleetlearn_export.tracing.formulas import scan
from fleetlearn_export.tracing.max_pooling import (
    max_pool2d,
    max_pool2d_with_indices,
    max_pool2d_with_indices_backward,
)

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]]


FORWARD: Decompositions = {
    aten._adaptive_avg_pool2d.default: missing_pooling.adaptive_avg_pool,
    aten._adaptive_avg_pool3d.default: missing_pooling.adaptive_avg_pool,
    aten.adaptive_max_pool2d.default: missing_pooling.adaptive_max_pool,
    aten.adaptive_max_pool3d.default: missing_pooling.adaptive_max_pool,
    aten._embedding_bag.default: missing.embedding_bag,
    aten._embedding_bag_forward_only.default: missing.embedding_bag,
    aten._trilinear.default: missing.trilinear,
    aten.cummax.default: missing_functions.cummax,
    aten.cummin.default: missing_functions.cummin,
    aten.digamma.default: missing_functions.digamma,
    aten.histc.default: missing_functions.histc,
    aten.kthvalue.default: missing_functions.kthvalue,
    aten.lgamma.default: missing_functions.lgamma,
    aten.logcumsumexp.default: missing_functions.logcumsumexp,
    aten.median.default: missing_functions.median_of_all,
    aten.median.dim: missing_functions.median,
    **linear_algebra.DECOMPOSITIONS,
}
BACKWARD: Decompositions = {
    aten._adaptive_avg_pool2d_backward.default: missing_pooling.adaptive_avg_pool2d_backward,
    aten._adaptive_avg_pool3d_backward.default: missing_pooling.adaptive_avg_pool3d_backward,
    aten._embedding_bag_backward.default: missing.embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: missing.embedding_bag_weights_backward,
    aten.adaptive_max_pool2d_backward.default: missing_pooling.adaptive_max_pool2d_backward,
    aten.adaptive_max_pool3d_backward.default: missing_pooling.adaptive_max_pool3d_backward,
    aten.avg_pool2d_backward.default: missing_pooling.avg_pool_backward,
    aten.avg_pool3d_backward.default: missing_pooling.avg_pool_backward,
    aten.embedding_dense_backward.default: missing.embedding_dense_backward,
    aten.hardshrink_backward.default: missing.shrink_backward,
    aten.index_put.default: missing.index_put,
    aten._unsafe_index_put.default: missing.index_put,
    aten.max_pool3d_with_indices.default: missing_pooling.max_pool3d_with_indices,
    aten.max_pool3d_with_indices_backward.default: missing_pooling.max_pool3d_with_indices_backward,
    aten.replication_pad1d_backward.default: missing.replication_pad_backward,
    aten.replication_pad2d_backward.default: missing.replication_pad_backward,
    aten.replication_pad3d_backward.default: missing.replication_pad_backward,
    aten.softshrink_backward.default: missing.shrink_backward,
    aten._weight_norm_interface_backward.default: missing.weight_norm_backward,
}
COMPOSED = {
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten.adaptive_max_pool1d.default,
    aten.bilinear.default,
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    aten.cross_entropy_loss.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.nll_loss_nd.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
}
"""Operators that PyTorch decomposes itself: into those of FORWARD, and losses, some of whose
options the ONNX exporter silently ignores."""


def tracing_decompositions() -> Decompositions:
    """Return the replacements for tracing: operators that decomposing an exported program leaves as
    they are, because PyTorch has a kernel for them besides a formula."""
    table: Decompositions = get_decompositions([aten.mish_backward, aten.silu_backward])
    return {**table, **scan.DECOMPOSITIONS}


def pytorch_decompositions() -> Decompositions:
    """Return the replacements by other PyTorch operators: a program decomposed with these can still
    be run."""
    table: Decompositions = {
        # The ONNX exporter's own functions for losses and for batch norm in training mode compute
        # something else, without an error.
        **core_aten_decompositions(),
        **get_decompositions([aten._native_batch_norm_legit_functional]),
        **FORWARD,
        **BACKWARD,
    }
    for operator in (aten.im2col.default, aten.col2im.default):
        table[operator] = _contiguous(table[operator])
    return table


def training_decompositions(graph: torch.fx.Graph) -> Decompositions:
    """Return the replacements for a training step's graph."""
    table: Decompositions = {
        **pytorch_decompositions(),
        aten.convolution_backward.default: convolution_backward,
        aten.empty_permuted.default: empty_permuted,
        aten.mul.Scalar: partial(_with_number_as_tensor, torch.mul),
        aten.div.Scalar: partial(_with_number_as_tensor, torch.div),
    }
    if _indices_only_for_backward(graph):
        table[aten.max_pool2d_with_indices.default] = max_pool2d_with_indices
        table[aten.max_pool2d_with_indices_backward.default] = max_pool2d_with_indices_backward
    return table


def inference_decompositions(graph: torch.fx.Graph) -> Decompositions:
    """Return the replacements for a forward graph: as few as it needs.

    The ONNX exporter translates most forward operators better as they are, such as a recurrent
    layer into one operator.
    """
    called = {node.target for node in graph.nodes}
    table: Decompositions = {}
    if called & COMPOSED:
        whole = core_aten_decompositions()
        table = {**FORWARD, **{operator: whole[operator] for operator in COMPOSED}}
    elif called & FORWARD.keys():
        table = dict(FORWARD)
    layers = [node for node in graph.nodes if node.target is aten.lstm.input]
    if any(
        node.args[1][0].meta["val"].shape[-1] != node.args[1][1].meta["val"].shape[-1]
        for node in layers
    ):
        # A projected state is smaller than the cell's; the ONNX exporter assumes one size for both.
        table[aten.lstm.input] = core_aten_decompositions()[aten.lstm.input]
    pools = (node for node in graph.nodes if node.target is aten.max_pool2d.default)
    if any(True in (*node.args[5:], node.kwargs.get("ceil_mode")) for node in pools):
        table[aten.max_pool2d.default] = max_pool2d
    return table


def _contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with a contiguous result, as the operator itself has."""
    return lambda *given, **options: function(*given, **options).contiguous()


def empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> Tensor:
    return torch.zeros(tuple(size), dtype=options.get("dtype") or torch.float32)


def _with_number_as_tensor(
    operation: Callable[[Tensor, Tensor], Tensor], values: Tensor, number: Any
) -> Any:
    """Turn a number that depends on the number of examples (2 / (n - 1) in a deviation's gradient)
    into a tensor: the ONNX exporter accepts it in no other form."""
    sizes: tuple[Any, ...] = (torch.SymFloat, torch.SymInt)
    return (
        operation(values, torch.scalar_tensor(number, dtype=values.dtype))
        if isinstance(number, sizes)
        else NotImplemented
    )


def _indices_only_for_backward(graph: torch.fx.Graph) -> bool:
    """Whether only pooling's backward pass reads max-pooling's indices, so that they may be
    numbered in ONNX's way.

    PyTorch numbers the elements of one image's channel, ONNX the whole array's. Converting
    would cost a second pooling.
    """
    for node in graph.nodes:
        if node.target is aten.max_pool2d_with_indices.default:
            for item in node.users:
                if item.args[1] == 1 and any(
                    user.target is not aten.max_pool2d_with_indices_backward.default
                    for user in item.users
                ):
                    return False
    return True
