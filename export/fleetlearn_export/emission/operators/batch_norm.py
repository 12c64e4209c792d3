"""Batch normalisation and its backward pass. Instance normalisation arrives as one with as many
channels as images."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fleetlearn_export.emission.emitter import (
    EmissionError,
    Emitter,
    Handler,
    Source,
    Value,
    fixed_size,
)
from fleetlearn_export.emission.operators.layout import mean, total

aten = torch.ops.aten
LARGE_IMAGE = 28 * 28
"""Elements of a channel from which on sums of products are products of matrices."""


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


def _normalised(
    graph: Emitter,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Source,
    variance: Source,
    eps: float,
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


def _affine(
    graph: Emitter, x: Value, scale: Source, shift: Source, mean: Source | None = None
) -> str:
    """Return ``(x - mean) * scale + shift`` with vectors of one number for each channel.

    BatchNormalization does it in one pass, at full speed for small images too: 16 x 960 x 2 x 2 in
    0.03 CPU-ms, where a Mul with a vector takes 0.14.
    """
    mean = _vector(graph, None, 0, x) if mean is None else mean
    return graph.node(
        "BatchNormalization", x, scale, shift, mean, _vector(graph, None, 1, x), epsilon=0.0
    )


def _sum_of_products(graph: Emitter, grad: Value, other: Source) -> str:
    """Return the sum of ``grad * other`` for each channel.

    Where images are large, each channel's image is a row that is multiplied with a column: the
    products of the elements take no memory then. 16 x 96 x 112 x 112: 5.3 CPU-ms; 12.6 by Mul and
    ReduceSum. 16 x 192 x 28 x 28: 0.81 and 1.4; but 16 x 384 x 14 x 14: 0.97 and 0.50.
    """
    known = [size for size in map(fixed_size, grad.shape[1:]) if isinstance(size, int)]
    if len(known) < grad.rank - 1 or prod(known[1:]) < LARGE_IMAGE:
        return total(graph, graph.node("Mul", grad, other), _axes(grad))
    sizes = graph.integers([-1, known[0], 1, prod(known[1:])])
    row, other_row = (graph.node("Reshape", x, sizes) for x in (grad, other))
    return total(
        graph, graph.node("MatMul", row, graph.transposed(other_row, [0, 1, 3, 2])), [0, 2, 3]
    )


def _inverse(graph: Emitter, variance: Source, eps: float, x: Value) -> str:
    """Return 1 / standard deviation."""
    return graph.node(
        "Reciprocal", graph.node("Sqrt", graph.node("Add", variance, graph.number(eps, x.dtype)))
    )


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
        outputs = batch_norm_without_training(
            graph, out, x, weight, bias, running_mean, running_var, momentum, eps
        )
        return [*outputs, running_mean.name, running_var.name]
    # Without momentum the new running statistics are the batch's own. 16 x 96 x 32 x 32: 0.53
    # CPU-ms; 1.53 by sums. ONNX Runtime writes them over the memory of the old ones, even if that
    # is a constant or the graph's input. So it gets values that nothing else reads: a number of its
    # own keeps another call with the same statistics from having equal ones, which would be merged.
    own = graph.number(len(graph.nodes), x.dtype)
    spare_mean, spare_var = (
        graph.node("Add", running, own) for running in (running_mean, running_var)
    )
    result, middle, variance = graph.nodes_outputs(
        "BatchNormalization",
        3,
        x,
        _vector(graph, weight, 1, x),
        _vector(graph, bias, 0, x),
        spare_mean,
        spare_var,
        epsilon=float(eps),
        momentum=0.0,
        training_mode=1,
    )
    count = graph.count([x.shape[0], *x.shape[2:]], x.dtype)
    unbiased = graph.node("Div", count, graph.node("Sub", count, graph.number(1, x.dtype)))

    def moved(running: Value, batch: str) -> str:
        old_part = graph.node("Mul", running, graph.number(1 - momentum, x.dtype))
        return graph.node(
            "Add", old_part, graph.node("Mul", batch, graph.number(momentum, x.dtype))
        )

    return [
        result,
        middle,
        _inverse(graph, variance, eps, x),
        moved(running_mean, middle),
        moved(running_var, graph.node("Mul", variance, unbiased)),
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
    """Return (result, mean, 1 / standard deviation). The number of channels may depend on the
    number of examples."""
    middle = mean(graph, x, _axes(x), keep=True)
    centred = graph.node("Sub", x, middle)
    variance = mean(graph, graph.node("Mul", centred, centred), _axes(x))
    middle = graph.reshaped(middle, [x.shape[1]])
    return [
        _normalised(graph, x, weight, bias, middle, variance, eps),
        middle,
        _inverse(graph, variance, eps, x),
    ]


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
    return batch_norm_without_training(
        graph, out, x, weight, bias, running_mean, running_var, momentum, eps
    )


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
    """Return the gradients of x, weight and bias. 16 x 96 x 32 x 32: 2.4 CPU-ms; 2.7 by Sub and
    Mul; 16 x 960 x 2 x 2: 0.33 in place of 0.61."""
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

    zero = _vector(graph, None, 0, x)
    by_weight = by_bias = None
    if output_mask[2] or (training and output_mask[0]):
        by_bias = total(graph, grad, _axes(x))
    if output_mask[1] or (training and output_mask[0]):
        by_weight = _sum_of_products(graph, grad, _affine(graph, x, inverse, zero, middle))
    by_input = _affine(graph, grad, scale, zero) if output_mask[0] else None
    if by_input is not None and by_weight is not None and by_bias is not None and training:
        # What changes the standard deviation and the mean is taken away.
        share = graph.node(
            "Neg", graph.node("Div", scale, graph.count([x.shape[0], *x.shape[2:]], x.dtype))
        )
        slope = graph.node("Mul", graph.node("Mul", share, inverse), by_weight)
        by_input = graph.node(
            "Add", by_input, _affine(graph, x, slope, graph.node("Mul", share, by_bias), middle)
        )
    return [by_input, by_weight if output_mask[1] else None, by_bias if output_mask[2] else None]


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_statistics,
    aten._native_batch_norm_legit_no_training.default: batch_norm_without_training,
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
