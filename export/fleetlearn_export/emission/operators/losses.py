"""Losses over classes and their backward passes. Other losses are decomposed: they are
arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fleetlearn_export.emission.emitter import Emitter, Handler, Size, Value
from fleetlearn_export.emission.operators.layout import sum_or_mean
from fleetlearn_export.tracing.cross_entropy import BACKWARD, MEAN, NONE

aten = torch.ops.aten


class _Targets(NamedTuple):
    """What a loss takes from its targets; each has the targets' shape, with an axis of size 1 for
    the classes."""

    axis: int
    """The axis of the classes."""
    shape: list[Size]
    valid: str
    """Whether the example counts."""
    places: str
    """The class, 0 where the example does not count."""
    weights: str | None
    """The class's weight; None where all weights are 1."""


def _targets(
    graph: Emitter, logp: Value, target: Value, weight: Value | None, ignore_index: int
) -> _Targets:
    axis = min(logp.rank - 1, 1)
    shape = [*logp.shape[:axis], 1, *logp.shape[axis + 1 :]]
    places = graph.reshaped(graph.cast(target, torch.int64), shape)
    valid = graph.node("Not", graph.node("Equal", places, graph.number(ignore_index, torch.int64)))
    places = graph.node("Where", valid, places, graph.number(0, torch.int64))
    weights = None if weight is None else graph.node("Gather", weight, places, axis=0)
    return _Targets(axis, shape, valid, places, weights)


def nll_loss(
    graph: Emitter,
    out: Sequence[Tensor],
    logp: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
) -> list[str]:
    """Write the loss and the sum of the weights."""
    targets, zero = _targets(graph, logp, target, weight, ignore_index), graph.number(0, logp.dtype)
    picked = graph.node(
        "Neg", graph.node("GatherElements", logp, targets.places, axis=targets.axis)
    )
    if targets.weights is not None:
        picked = graph.node("Mul", picked, targets.weights)
    # Not a product with a mask: the logarithm may be infinite.
    picked = graph.node("Where", targets.valid, picked, zero)
    if reduction == NONE and logp.rank > 1:
        return [graph.reshaped(picked, list(out[0].shape)), zero]
    counted = graph.cast_node(targets.valid, logp.dtype)
    if targets.weights is not None:
        counted = graph.node("Mul", counted, targets.weights)
    axes = range(logp.rank)
    total, loss = (
        sum_or_mean(graph, "ReduceSum", row, targets.shape, axes, False)
        for row in (counted, picked)
    )
    return [graph.node("Div", loss, total) if reduction == MEAN else loss, total]


def nll_loss_backward(
    graph: Emitter,
    out: Tensor,
    grad: Value,
    logp: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> str:
    """Place each example's scale, negated, at its class."""
    targets = _targets(graph, logp, target, weight, ignore_index)
    scale = graph.node("Neg", _scale(graph, grad, logp, targets, reduction, total_weight))
    scale = scale if reduction == NONE and grad.rank else graph.expanded(scale, targets.shape)
    zeros = graph.filled(0, logp.shape, logp.dtype)
    return graph.node("ScatterElements", zeros, targets.places, scale, axis=targets.axis)


def cross_entropy_backward(
    graph: Emitter,
    out: Tensor,
    grad: Value,
    logp: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> str:
    """Write (p - y) s, with p = exp(logp), y one-hot and s the example's scale: the gradient of
    log-softmax's input."""
    targets = _targets(graph, logp, target, weight, ignore_index)
    minus_ones = graph.filled(-1, targets.shape, logp.dtype)
    difference = graph.node(
        "ScatterElements",
        graph.node("Exp", logp),
        targets.places,
        minus_ones,
        axis=targets.axis,
        reduction="add",
    )
    return graph.node(
        "Mul", difference, _scale(graph, grad, logp, targets, reduction, total_weight)
    )


def _scale(
    graph: Emitter, grad: Value, logp: Value, targets: _Targets, reduction: int, total_weight: Value
) -> str:
    """Return the gradient by each example's loss, 0 where it does not count. If none counts, the
    total is 0."""
    scale = graph.node("Div", grad, total_weight) if reduction == MEAN else grad.name
    if grad.rank:
        scale = graph.reshaped(scale, targets.shape)
    if targets.weights is not None:
        scale = graph.node("Mul", scale, targets.weights)
    return graph.node("Where", targets.valid, scale, graph.number(0, logp.dtype))


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss2d_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    BACKWARD: cross_entropy_backward,
}
