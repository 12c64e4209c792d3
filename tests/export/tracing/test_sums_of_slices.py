"""Tensors are added up before they are cut, where that gives the same sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from fleetlearn_export.tracing.sums_of_slices import sum_before_slicing
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(8)


def changed(function: Callable[..., Sequence[Tensor]], *arrays: Tensor) -> torch.fx.GraphModule:
    """Return the traced function, changed, after a look at its results: not one bit may be another."""
    module = make_fx(function)(*arrays)
    sum_before_slicing(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    for one, other in zip(module(*arrays), function(*arrays), strict=True):
        assert torch.equal(one, other)
    return module


def count(module: torch.fx.GraphModule, operator: torch._ops.OpOverload) -> int:
    return len(module.graph.find_nodes(op="call_function", target=operator))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


def cut(x: Tensor, start: int, end: int) -> Tensor:
    """Return a slice, as autograd makes it."""
    return x.narrow(1, start, end - start)


@pytest.mark.parametrize("layers", [2, 6])
def test_a_dense_network_has_two_slices_and_a_sum_for_each_layer(layers: int) -> None:
    weights = [numbers(2, 3 + 2 * k) for k in range(layers)]

    def gradients(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        rows = [value.detach().requires_grad_() for value in (x, *weights)]
        parts = [rows[0] * 1]
        for weight in rows[1:]:
            parts.append(torch.tanh(torch.cat(parts, 1) @ weight.t()))
        return torch.autograd.grad((torch.cat(parts, 1) ** 2).sum(), rows)

    module = changed(gradients, numbers(4, 3), *weights)
    assert count(module, aten.add.Tensor) == layers
    assert count(module, aten.slice.Tensor) <= 2 * layers + 1


def test_slices_at_other_places_of_a_larger_tensor() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return cut(x, 1, 3) + cut(y, 0, 2), cut(x, 3, 6) + cut(y, 2, 5)

    module = changed(function, numbers(2, 7), numbers(2, 5))
    assert count(module, aten.add.Tensor) == 1
    assert [node.args[1:] for node in module.graph.find_nodes(op="call_function", target=aten.slice.Tensor)] == [
        (1, 1, 6),
        (1, 0, 2),
        (1, 2, 5),
    ]


def not_all(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return cut(x, 0, 2) + cut(y, 0, 2), cut(x, 2, 4) + cut(y, 2, 4)


def with_a_gap(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return cut(x, 0, 2) + cut(y, 0, 2), cut(x, 3, 5) + cut(y, 3, 5)


def swapped(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return cut(x, 2, 5) + cut(y, 0, 3), cut(x, 0, 2) + cut(y, 3, 5)


def of_one_tensor(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return cut(y, 0, 2) + cut(y, 2, 4), cut(y, 2, 4) + cut(y, 0, 2)


def repeated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return cut(x, 0, 3) + cut(y, 0, 1), cut(x, 3, 5) + cut(y, 1, 2)


def of_other_numbers(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    whole = y.long()
    return cut(x, 0, 3) + cut(whole, 0, 3), cut(x, 3, 5) + cut(whole, 3, 5)


def scaled(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.add(cut(x, 0, 3), cut(y, 0, 3), alpha=2), torch.add(cut(x, 3, 5), cut(y, 3, 5), alpha=2)


@pytest.mark.parametrize("function", [not_all, with_a_gap, swapped, of_one_tensor, repeated, of_other_numbers, scaled])
def test_other_sums_of_slices_stay(function: Callable[..., tuple[Tensor, ...]]) -> None:
    x, y = numbers(2, 5), numbers(2, 5)
    before = count(make_fx(function)(x, y), aten.add.Tensor)
    assert count(changed(function, x, y), aten.add.Tensor) == before
