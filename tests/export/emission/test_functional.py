"""Writes into tensors replaced in a traced graph: the graph gives what PyTorch gives, and writes
nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleetlearn_export.emission.emitter import EmissionError
from fleetlearn_export.emission.functional import without_writes
from fleetlearn_export.tracing.trace import trace
from torch import Tensor, nn

from tests.support.emission_cases import check_emission, gradient_of

X = torch.arange(72.0).reshape(3, 4, 6) - 30


def check(function: Callable[[Tensor], Any]) -> set[Any]:
    """Compare with PyTorch. Returns the graph's operators."""

    def named(given: dict[str, Tensor]) -> dict[str, Tensor]:
        results = function(given["x"].clone())
        return {
            str(place): value
            for place, value in enumerate(results if isinstance(results, tuple) else (results,))
        }

    traced = trace(named, {"x": X}, {"x": 0}, {})
    assert any(_writes(node.target) for node in traced.graph.nodes), (
        "the traced graph writes into no tensor"
    )
    graph = without_writes(traced)
    operators = {node.target for node in graph.graph.nodes}
    assert not any(map(_writes, operators))
    for given in (X, torch.cat([X, -X])):
        expected = function(given.clone())
        for got, wanted in zip(
            graph(given), expected if isinstance(expected, tuple) else (expected,), strict=True
        ):
            torch.testing.assert_close(got, wanted)
    return operators


def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def test_a_write_is_seen_by_all_later_readers() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        before = y + 1
        y += x
        y.relu_().mul_(0.5)
        return before, y - 1

    check(function)


def test_a_write_into_a_view_changes_the_tensor() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        y[:, :2] += 1
        y[:, -1, 1::2] *= 3
        y[:, 1] = x[:, 0]
        y[0] = 7
        return y, y.sum(0)

    operators = check(function)
    assert torch.ops.aten.select_scatter.default in operators


def test_a_write_into_a_tensor_changes_its_views() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 0
        row, flat, swapped = y[:, 1], y.view(-1), y.transpose(1, 2).detach()
        part = swapped[:, 2:]
        y.add_(5)
        first = (row * 1, flat * 1, part * 1)
        part.mul_(2)
        return (*first, row, flat, swapped, y)

    check(function)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.permute(1, -1, 0),
        lambda x: x.t() if x.dim() == 2 else x.mT,
        lambda x: x[:, :, 0].t(),
        lambda x: x.unsqueeze(1)[:, 0, 2:],
        lambda x: x[:, :1].squeeze(1),
        lambda x: x[:, :1, :1].squeeze(),
        lambda x: x.view(-1, 24)[:, 3],
        lambda x: x.narrow(2, 1, 3).detach(),
        lambda x: x.diagonal(1, 1, 2),
    ],
)
def test_views_whose_elements_are_placed_back(view: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        part = view(x)
        part.mul_(-2)
        return x * 1, part

    check(function)


def test_running_statistics_are_further_results() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = torch.zeros(4), torch.ones(4)
        for _ in range(2):
            x = nn.functional.batch_norm(x, mean, variance, training=True).relu_()
        return x, mean, variance

    check(function)


def test_tensors_that_begin_empty() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        copied = torch.empty_like(x).copy_(x)
        rows = torch.zeros(x.shape[0], 4)
        for place in range(4):
            rows[:, place] = x[:, place, 0] * place
        return copied, rows, torch.empty(2, x.shape[0]).fill_(3).zero_()

    check(function)


def test_gradients_pass_through_writes() -> None:
    def function(x: Tensor) -> Tensor:
        leaf = x.detach().clone().requires_grad_()
        y = leaf * 2
        y[:, 1] = leaf[:, 0] ** 2
        y[:, :, 2:].mul_(3)
        (found,) = torch.autograd.grad(nn.functional.relu(y, inplace=True).sum(), leaf)
        return found

    check(function)


def test_results_written_into_a_given_tensor() -> None:
    """As spectral_norm does with its vector."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        torch.div(x, 3, out=y)
        row = y[:, 1]
        nn.functional.normalize(x[:, 0], out=row)
        return y, row, torch.add(x, y, alpha=2, out=torch.empty_like(x))

    check(function)


def test_shapes_that_change() -> None:
    """As quantile does with its result."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 2).unsqueeze_(1)
        z = (x[:, :1] + 1).mul_(3).squeeze_(1)
        return y + 1, z * y[:, 0, 0]

    check(function)


def test_shapes_of_views_and_of_tensors_that_have_views() -> None:
    """Only the tensor itself gets the shape."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = x * 2
        column, row, later = whole[:, 0], whole[:1], whole.transpose(0, 1)
        whole.add_(1)
        column.mul_(3).unsqueeze_(1).unsqueeze_(0)
        whole.unsqueeze_(2)
        return column + 1, row, later, whole * 2, whole[:, 0], column[0]

    check(function)


def test_average_pooling_in_channels_last_order() -> None:
    def average(x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x.view(-1, 4, 2, 3).permute(0, 3, 1, 2), 1) * 2

    check(average)
    check(lambda x: gradient_of(average)(x, average(x)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.split(2, 1)[0].add_(1), "getitem"),
        (lambda x: x.unfold(2, 2, 2).add_(1), "unfold"),
        (lambda x: x.unsqueeze_(1).add_(1), "whose shape"),
    ],
)
def test_other_writes_are_refused(function: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(EmissionError, match=reason):
        check(function)


def test_powers_in_place() -> None:
    """pow.Scalar is a number to the power of a tensor; pow_.Scalar is not."""
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(7)) + 0.5
    check_emission(torch.ops.aten.pow.Tensor_Scalar, lambda x: (2 * x).pow_(3), x)
    check_emission(torch.ops.aten.pow.Tensor_Tensor, lambda x: (2 * x).pow_(x), x)
