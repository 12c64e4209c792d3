"""Layer and group normalisation, and their backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fleetlearn_export.emission.emitter import Emitter, Handler, Size, Source, Value, fixed_sizes
from fleetlearn_export.emission.operators.layout import mean, total

aten = torch.ops.aten


def layer_norm(
    graph: Emitter,
    out: Any,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> list[str]:
    """Return (result, mean, 1 / standard deviation)."""
    sizes = fixed_sizes(x, slice(-len(normalized_shape), None))
    scale = graph.array(torch.ones(sizes, dtype=x.dtype).numpy()) if weight is None else weight
    return graph.nodes_outputs(
        "LayerNormalization", 3, x, scale, bias, axis=x.rank - len(sizes), epsilon=float(eps)
    )


def layer_norm_backward(
    graph: Emitter,
    out: Any,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[int],
    middle: Value,
    inverse: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> list[str | None]:
    """Return the gradients of x, weight and bias."""
    first = x.rank - len(normalized_shape)
    normal = graph.node("Mul", graph.node("Sub", x, middle), inverse)
    gradients: list[str | None] = [None, None, None]
    if output_mask[0]:
        arriving = grad.name if weight is None else graph.node("Mul", grad, weight)
        gradients[0] = _normal_gradient(
            graph, arriving, normal, inverse, list(range(first, x.rank))
        )
    return [
        gradients[0],
        *_affine_gradients(graph, grad, normal, weight, list(range(first)), output_mask[1:]),
    ]


def _normal_gradient(
    graph: Emitter, grad: Source, normal: str, inverse: Source, axes: list[int]
) -> str:
    """Return the gradient of x from the gradient of (x - mean) / deviation, for statistics over
    these axes."""
    level = mean(graph, grad, axes, keep=True)
    slope = mean(graph, graph.node("Mul", grad, normal), axes, keep=True)
    rest = graph.node("Sub", graph.node("Sub", grad, level), graph.node("Mul", normal, slope))
    return graph.node("Mul", rest, inverse)


def _affine_gradients(
    graph: Emitter,
    grad: Source,
    normal: str,
    weight: Value | None,
    axes: list[int],
    wanted: Sequence[bool],
) -> list[str | None]:
    """Return the gradients of weight and bias: sums over these axes."""
    products = graph.node("Mul", grad, normal) if wanted[0] and weight is not None else None
    return [
        _total(graph, products, axes) if products is not None else None,
        _total(graph, grad, axes) if wanted[1] else None,
    ]


def _total(graph: Emitter, x: Source, axes: list[int]) -> str:
    return total(graph, x, axes) if axes else graph.node("Identity", x)


def group_norm(
    graph: Emitter,
    out: Any,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    examples: Size,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> list[str]:
    """Return (result, mean, 1 / standard deviation), the last two (n, groups)."""
    grouped = graph.reshaped(x, [examples, groups, channels // groups, places])
    middle = mean(graph, grouped, [2, 3], keep=True)
    centred = graph.node("Sub", grouped, middle)
    variance = mean(graph, graph.node("Mul", centred, centred), [2, 3], keep=True)
    inverse = graph.node(
        "Reciprocal", graph.node("Sqrt", graph.node("Add", variance, graph.number(eps, x.dtype)))
    )
    normal = graph.node("Mul", centred, inverse)
    if weight is not None:
        normal = graph.node(
            "Mul", normal, graph.reshaped(weight, [1, groups, channels // groups, 1])
        )
    if bias is not None:
        normal = graph.node("Add", normal, graph.reshaped(bias, [1, groups, channels // groups, 1]))
    flat = [examples, groups]
    return [
        graph.reshaped(normal, x.shape),
        graph.reshaped(middle, flat),
        graph.reshaped(inverse, flat),
    ]


def group_norm_backward(
    graph: Emitter,
    out: Any,
    grad: Value,
    x: Value,
    middle: Value,
    inverse: Value,
    weight: Value | None,
    examples: Size,
    channels: int,
    places: int,
    groups: int,
    output_mask: Sequence[bool],
) -> list[str | None]:
    """Return the gradients of x, weight and bias."""
    shape = [examples, groups, channels // groups, places]
    single = [examples, groups, 1, 1]
    deviation = graph.reshaped(inverse, single)
    centred = graph.node("Sub", graph.reshaped(x, shape), graph.reshaped(middle, single))
    normal = graph.node("Mul", centred, deviation)
    arriving = graph.reshaped(grad, shape)
    by_input = None
    if output_mask[0]:
        scaled: Source = arriving
        if weight is not None:
            scaled = graph.node(
                "Mul", arriving, graph.reshaped(weight, [1, groups, channels // groups, 1])
            )
        by_input = graph.reshaped(
            _normal_gradient(graph, scaled, normal, deviation, [2, 3]), x.shape
        )
    sums = _affine_gradients(graph, arriving, normal, weight, [0, 3], output_mask[1:])
    return [by_input, *(None if row is None else graph.reshaped(row, [channels]) for row in sums)]


OPERATORS: dict[torch._ops.OpOverload, Handler] = {
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
}
