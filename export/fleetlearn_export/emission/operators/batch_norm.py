"""Batch normalisation and its backward pass. Instance normalisation arrives as one with as many channels as images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fleetlearn_export.emission.emitter import EmissionError, Emitter, Handler, Size, Source, Value, fixed_size
from fleetlearn_export.emission.operators.layout import column, mean, total

aten = torch.ops.aten


def _axes(x: Value) -> list[int]:
    return [0, *range(2, x.rank)]


def _vector(graph: Emitter, value: Value | None, number: float, x: Value) -> Source:
    """Return one number for each channel; ``number`` for all where there is no ``value``."""
    channels = fixed_size(x.shape[1])
    if value is not None:
        return value
    if isinstance(channels, int):
        return graph.constant([number] * channels, x.dtype)
    return graph.filled(number, [channels], x.dtype)


def _channels(x: Value) -> list[Size]:
    return [x.shape[1]]


def _normalised(
    graph: Emitter, x: Value, weight: Value | None, bias: Value | None, mean: Source, variance: Source, eps: float
) -> str:
    return graph.node(
        "BatchNormalization",
        x,
        _vector(graph, weight, 1, x),
        _vector(graph, bias, 0, x),
        mean,
        variance,
        epsilon=float(eps),
    )


def _centred(graph: Emitter, x: Value, mean: Source) -> str:
    return graph.node("Sub", x, column(graph, mean, x.shape[1], x.rank))


def _trained(graph: Emitter, x: Value, weight: Value | None, bias: Value | None, eps: float) -> tuple[list[str], str]:
    """Normalise with the batch's statistics. Returns (result, mean, 1 / standard deviation) and the sum of squares."""
    middle = graph.reshaped(mean(graph, x, _axes(x), keep=True), _channels(x))
    squares = graph.node("ReduceSumSquare", _centred(graph, x, middle), graph.integers(_axes(x)), keepdims=0)
    variance = graph.node("Div", squares, graph.count([x.shape[0], *x.shape[2:]], x.dtype))
    result = _normalised(graph, x, weight, bias, middle, variance, eps)
    return [result, middle, _inverse(graph, variance, eps, x)], squares


def _inverse(graph: Emitter, variance: Source, eps: float, x: Value) -> str:
    """Return 1 / standard deviation."""
    return graph.node("Reciprocal", graph.node("Sqrt", graph.node("Add", variance, graph.number(eps, x.dtype))))


def batch_norm_functional(
    graph: Emitter,
    out: Any,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> list[str]:
    """Return (result, mean, 1 / standard deviation, new running mean, new running variance)."""
    if not training:
        found = batch_norm_without_training(graph, out, x, weight, bias, running_mean, running_var, momentum, eps)
        return [*found, running_mean.name, running_var.name]
    results, squares = _trained(graph, x, weight, bias, eps)
    count = graph.count([x.shape[0], *x.shape[2:]], x.dtype)
    one, share = (graph.number(value, x.dtype) for value in (1, momentum))
    of_squares = graph.node("Mul", squares, graph.node("Div", share, graph.node("Sub", count, one)))
    kept = graph.number(1 - momentum, x.dtype)
    return [
        *results,
        graph.node("Add", graph.node("Mul", running_mean, kept), graph.node("Mul", results[1], share)),
        graph.node("Add", graph.node("Mul", running_var, kept), of_squares),
    ]


def batch_norm_without_statistics(
    graph: Emitter,
    out: Any,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[str]:
    return _trained(graph, x, weight, bias, eps)[0]


def batch_norm_without_training(
    graph: Emitter,
    out: Any,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> list[str]:
    """Normalise with the running statistics. The other two results are empty."""
    empty = graph.constant([], x.dtype)
    return [_normalised(graph, x, weight, bias, running_mean, running_var, eps), empty, empty]


def native_batch_norm(
    graph: Emitter,
    out: Any,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[str]:
    if running_mean is None or running_var is None:
        return batch_norm_without_statistics(graph, out, x, weight, bias, True, momentum, eps)
    if training:
        raise EmissionError("running statistics that it writes into")
    return batch_norm_without_training(graph, out, x, weight, bias, running_mean, running_var, momentum, eps)


def batch_norm_backward(
    graph: Emitter,
    out: Any,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    saved_mean: Value | None,
    saved_inverse: Value | None,
    training: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> list[str | None]:
    """Return the gradients of x, weight and bias."""
    if training:
        assert saved_mean is not None
        assert saved_inverse is not None
        middle: Source = saved_mean
        inverse: Source = saved_inverse
    else:
        assert running_mean is not None
        assert running_var is not None
        middle, inverse = running_mean, _inverse(graph, running_var, eps, x)
    scale = inverse if weight is None else graph.node("Mul", weight, inverse)

    def broadcast(vector: Source) -> str:
        return column(graph, vector, x.shape[1], x.rank)

    gradients: list[str | None] = [None, None, None]
    if output_mask[2] or (training and output_mask[0]):
        gradients[2] = total(graph, grad, _axes(x))
    if output_mask[1] or (training and output_mask[0]):
        product = graph.node("Mul", grad, _centred(graph, x, middle))
        gradients[1] = graph.node("Mul", total(graph, product, _axes(x)), inverse)
    if output_mask[0]:
        gradients[0] = graph.node("Mul", grad, broadcast(scale))
        if training:
            # The gradient's parts that change the mean and the standard deviation
            assert gradients[1] is not None
            assert gradients[2] is not None
            share = graph.node("Div", scale, graph.count([x.shape[0], *x.shape[2:]], x.dtype))
            slope = graph.node("Mul", graph.node("Mul", share, inverse), gradients[1])
            level = graph.node("Mul", share, gradients[2])
            along = graph.node("Mul", _centred(graph, x, middle), broadcast(slope))
            gradients[0] = graph.node("Sub", graph.node("Sub", gradients[0], along), broadcast(level))
    return [row if wanted else None for row, wanted in zip(gradients, output_mask, strict=True)]


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_statistics,
    aten._native_batch_norm_legit_no_training.default: batch_norm_without_training,
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
