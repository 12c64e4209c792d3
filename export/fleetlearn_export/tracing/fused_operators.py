"""Replacements for operators that PyTorch decomposes into more passes over memory than ONNX Runtime
needs."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from fleetlearn_export.tracing import cross_entropy
from fleetlearn_export.tracing.cross_entropy import fuse_cross_entropy, undetached

aten = torch.ops.aten


def relu_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """Multiply with a mask: ONNX Runtime's Where takes several times longer (ten times in version
    1.19)."""
    if threshold != 0:
        found: Tensor = decomposition_table[aten.threshold_backward.default](grad, x, threshold)
        return found
    return grad * (x > 0).to(grad.dtype)


CHEAPER_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.threshold_backward.default: relu_backward,
    cross_entropy.BACKWARD: cross_entropy.backward_by_index,
}


def fuse_operators(graph: torch.fx.Graph) -> None:
    """Change a training step's graph in place, before its operators are decomposed."""
    mask_before_pooling(graph)
    fuse_cross_entropy(graph)


def mask_before_pooling(graph: torch.fx.Graph) -> None:
    """Apply a ReLU's mask before the backward pass of the max-pooling behind it, where the gradient
    is small.

    That pass moves the gradient to the places of the maxima, and there the ReLU's outputs are the
    maxima.
    """
    nodes: list[Any] = list(graph.nodes)
    for node in nodes:
        if node.target is not aten.threshold_backward.default:
            continue
        spread, passed, threshold = node.args
        if (
            spread.target is not aten.max_pool2d_with_indices_backward.default
            or len(spread.users) > 1
        ):
            continue
        indices = undetached(spread.args[-1])
        if (
            threshold != 0
            or undetached(passed) is not undetached(spread.args[1])
            or indices.target is not getitem
        ):
            continue
        maxima = [
            item for item in indices.args[0].users if item.target is getitem and item.args[1] == 0
        ]
        # PyTorch keeps the indices only, so the model may write into the maxima, as
        # ``x += positions`` does.
        if maxima and not _written_into(maxima[0]):
            with graph.inserting_before(spread):
                masked = graph.call_function(node.target, (spread.args[0], maxima[0], 0))
            masked.meta["val"] = spread.args[0].meta["val"]
            spread.replace_input_with(spread.args[0], masked)
            node.replace_all_uses_with(spread)
            graph.erase_node(node)


def _written_into(tensor: torch.fx.Node) -> bool:
    """Whether an operator writes into the tensor or into a view of the tensor."""
    for user in tensor.users:
        operator = user.target
        if operator is getitem and _written_into(user):
            return True
        if not isinstance(operator, torch._ops.OpOverload):
            continue
        arguments = (
            dict(
                zip(
                    (argument.name for argument in operator._schema.arguments),
                    user.args,
                    strict=False,
                )
            )
            | user.kwargs
        )
        if any(
            argument.is_write and arguments.get(argument.name) is tensor
            for argument in operator._schema.arguments
        ):
            return True
        if any(
            result.alias_info is not None for result in operator._schema.returns
        ) and _written_into(user):
            return True
    return False
