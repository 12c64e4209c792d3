"""Parts of tensors, and tensors with a part replaced, as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
X = torch.arange(72.0).reshape(3, 4, 6) - 30

PARTS: list[tuple[Any, Callable[..., Any]]] = [
    (aten.slice.Tensor, lambda x: x[:, 1:3]),
    (aten.slice.Tensor, lambda x: x[:, :-1, ::2]),
    (aten.slice.Tensor, lambda x: x[:, -3:, 1:-1:3]),
    (aten.slice.Tensor, lambda x: x[:, 2:100]),
    (aten.slice.Tensor, lambda x: x[: x.shape[0] - 1]),
    (aten.slice.Tensor, lambda x: x.reshape(-1, 6)[1:]),
    (aten.slice.Tensor, lambda x: x.narrow(-1, 2, 3)),
    (aten.select.int, lambda x: x[:, -1]),
    (aten.select.int, lambda x: x[:, 2, 0]),
    (aten.select.int, lambda x: x[:, 1, 2][0]),
    (aten.select.int, lambda x: x.select(0, x.shape[0] - 1)),
    (aten.split.Tensor, lambda x: x.split(4, -1)),
    (aten.split.Tensor, lambda x: x.chunk(3, 1)),
    (aten.split.Tensor, lambda x: x.split(6, 2)),
    (aten.split_with_sizes.default, lambda x: x.split([1, 3], 1)),
    (
        aten.split_with_sizes.default,
        lambda x: torch.cat([x, x + 1]).split([x.shape[0], x.shape[0]]),
    ),
    (aten.unbind.int, lambda x: x.unbind(-2)),
    (aten.diagonal.default, lambda x: x.diagonal(0, 1, 2)),
    (aten.diagonal.default, lambda x: x.diagonal(2, -2, -1)),
    (aten.diagonal.default, lambda x: x.diagonal(-1, 2, 1)),
]


@pytest.mark.parametrize(("operator", "function"), PARTS)
def test_parts(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, function, X)


GRADIENTS: list[tuple[Any, Callable[..., Any]]] = [
    (aten.slice_backward.default, lambda x: x[:, 1:3]),
    (aten.slice_backward.default, lambda x: x[:, :, -5::2]),
    (aten.slice_backward.default, lambda x: x[:, :, 1:-1:3]),
    (aten.slice_backward.default, lambda x: torch.cat([x[1:], x[-1:]])),
    (aten.slice_backward.default, lambda x: torch.cat([x[: x.shape[0] - 1], x[:1]])),
    (aten.select_backward.default, lambda x: x[:, -1]),
    (aten.select_backward.default, lambda x: torch.cat([x[0].unsqueeze(0), x[1:]])),
    (aten.select_backward.default, lambda x: torch.cat([x[1:], x[-1].unsqueeze(0)])),
    (aten.diagonal_backward.default, lambda x: x.diagonal(0, 1, 2)),
    (aten.diagonal_backward.default, lambda x: x.diagonal(3, 1, 2)),
    (aten.diagonal_backward.default, lambda x: x.diagonal(-2, -1, 1)),
    (None, lambda x: x.split(4, -1)[1]),
    (None, lambda x: torch.stack(x.unbind(1)[:2], 2)),
]


@pytest.mark.parametrize(("operator", "function"), GRADIENTS)
def test_gradients(operator: Any, function: Callable[..., Any]) -> None:
    grad = torch.randn(function(X).shape, generator=torch.Generator().manual_seed(2))
    check_emission(operator, gradient_of(lambda x: function(x)), X, grad)


def test_the_diagonal_of_a_matrix_of_all_examples() -> None:
    rows = X[:, :, 0]
    check_emission(aten.diagonal.default, lambda x: torch.diagonal(x @ x.T - x[:, :1] / 0), rows)
    grad = torch.tensor([1.0, -2.0, 0.5])
    check_emission(
        aten.diagonal_backward.default, gradient_of(lambda x: torch.diag(x @ x.T)), rows, grad
    )
    check_emission(
        aten.diagonal_scatter.default, lambda x: torch.diagonal_scatter(x @ x.T, x[:, 1]), rows
    )


REPLACED: list[tuple[Any, Callable[..., Any]]] = [
    (aten.slice_scatter.default, lambda x: torch.slice_scatter(x, x[:, :2] * 3, 1, 1, 3)),
    (aten.slice_scatter.default, lambda x: torch.slice_scatter(x, x[:, :2] * 3, 1, -2)),
    (aten.slice_scatter.default, lambda x: torch.slice_scatter(x, x[:, :, :3] * 3, -1, 1, 6, 2)),
    (aten.slice_scatter.default, lambda x: torch.slice_scatter(x, x * 2)),
    (aten.slice_scatter.default, lambda x: torch.slice_scatter(x, x[1:] * 2, 0, 0, -1)),
    (aten.select_scatter.default, lambda x: torch.select_scatter(x, x[:, 1] * 2, 1, -1)),
    (aten.select_scatter.default, lambda x: torch.select_scatter(x, x[0] * 2, 0, -1)),
    (aten.diagonal_scatter.default, lambda x: torch.diagonal_scatter(x / 0, x[:, 0, :4], 0, 1, 2)),
    (
        aten.diagonal_scatter.default,
        lambda x: torch.diagonal_scatter(x, x[:, 1, :3] * 3, -1, -2, -1),
    ),
]


@pytest.mark.parametrize(("operator", "function"), REPLACED)
def test_replaced_parts(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, function, X)
