"""Concatenations are made from those before them, with PyTorch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from fleetlearn_export.tracing.trace import trace
from torch import Tensor

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(8)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


def traced(function: Callable[..., Sequence[Tensor]], *arrays: Tensor) -> torch.fx.GraphModule:
    """Return the traced function, after a look at its results."""
    given = {str(place): value for place, value in enumerate(arrays)}

    def named(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {str(place): value for place, value in enumerate(function(*given.values()))}

    module = trace(named, given, {}, {})
    for one, other in zip(module(*arrays), function(*arrays), strict=True):
        torch.testing.assert_close(one, other)
    return module


def read(module: torch.fx.GraphModule) -> list[int]:
    """Return the number of pieces of each concatenation."""
    return [
        len(node.args[0])
        for node in module.graph.find_nodes(op="call_function", target=aten.cat.default)
    ]


@pytest.mark.parametrize("layers", [2, 6])
def test_a_dense_network_has_two_slices_and_a_sum_for_each_layer(layers: int) -> None:
    weights = [numbers(2, 3 + 2 * k) for k in range(layers)]

    def gradients(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        rows = [value.detach().requires_grad_() for value in (x, *weights)]
        parts = [rows[0] * 1]
        for weight in rows[1:]:
            parts.append(torch.tanh(torch.cat(parts, 1) @ weight.t()))
        return torch.autograd.grad((torch.cat(parts, 1) ** 2).sum(), rows)

    graph = traced(gradients, numbers(4, 3), *weights).graph
    count = {
        name: len(graph.find_nodes(op="call_function", target=name))
        for name in (aten.add.Tensor, aten.slice.Tensor)
    }
    assert count == {aten.add.Tensor: layers, aten.slice.Tensor: 2 * layers + 1}


def test_two_orders_of_derivatives() -> None:
    def penalty(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows = [value.detach().requires_grad_() for value in (x, y)]
        pair = torch.cat(rows)
        score = (torch.cat([*rows, torch.tanh(pair)]) ** 3).sum()
        first = torch.autograd.grad(score, rows, create_graph=True)
        return torch.autograd.grad(sum((row**2).sum() for row in first), rows)

    assert 2 in read(traced(penalty, numbers(2, 3), numbers(2, 3)))


def other_axis(x: Tensor, y: Tensor) -> list[Tensor]:
    return [torch.cat([x, y]), torch.cat([x, y, x], 1)]


def other_order(x: Tensor, y: Tensor) -> list[Tensor]:
    return [torch.cat([x, y]), torch.cat([y, x, x])]


def fewer(x: Tensor, y: Tensor) -> list[Tensor]:
    return [torch.cat([x, y, x]), torch.cat([x, y])]


def piece_written_into(x: Tensor, y: Tensor) -> list[Tensor]:
    x = x.clone()
    pair = torch.cat([x, y])
    x.add_(1)
    return [pair, torch.cat([x, y, x])]


def result_written_into(x: Tensor, y: Tensor) -> list[Tensor]:
    pair = torch.cat([x, y])
    pair.mul_(2)
    return [pair, torch.cat([x, y, x])]


def without_gradients_before(x: Tensor, y: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with torch.no_grad():
        pair = torch.cat([x, y])
    return [pair, *torch.autograd.grad((torch.cat([x, y, y]) ** 2).sum(), [x])]


def other_dtype(x: Tensor, y: Tensor) -> list[Tensor]:
    return [torch.cat([x.long(), y.long()]), torch.cat([x, y]), torch.cat([x, y, x.double()])]


def in_inference_mode(x: Tensor, y: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [torch.cat([x + 1, y]).clone()]


@pytest.mark.parametrize(
    ("function", "pieces"),
    [
        (other_axis, [2, 3]),
        (other_order, [2, 3]),
        (fewer, [3, 2]),
        (piece_written_into, [2, 3]),
        (result_written_into, [2, 3]),
        (without_gradients_before, [2, 3]),
        (other_dtype, [2, 2, 3]),
        (in_inference_mode, [2]),
    ],
)
def test_others_are_as_they_were(
    function: Callable[..., Sequence[Tensor]], pieces: list[int]
) -> None:
    assert read(traced(function, numbers(2, 2), numbers(2, 2))) == pieces
