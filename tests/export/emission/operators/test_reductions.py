"""Reductions as ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

aten = torch.ops.aten
X = torch.tensor(
    [
        [[0.5, -2.0, 3.0], [3.0, 0.5, 3.0]],
        [[1.0, 4.0, -0.25], [4.0, 4.0, 0.0]],
        [[-2.0, -2.0, -7.0], [0.0, 0.0, 0.125]],
    ]
)
WHOLE = torch.tensor(
    [[[3, 1, 2], [2, 2, -5]], [[0, 0, 0], [1, 9, 9]], [[-4, 7, -4], [1, 0, 2**40]]]
)

CASES: list[tuple[Any, Callable[..., Any]]] = [
    (aten.sum.default, lambda x: x.sum()),
    (aten.sum.dim_IntList, lambda x: x.sum(1)),
    (aten.sum.dim_IntList, lambda x: x.sum([0, -1], keepdim=True)),
    (aten.sum.default, lambda x: (x > 0).sum()),
    (aten.sum.dim_IntList, lambda x: (x > 0).sum(0)),
    (aten.sum.dim_IntList, lambda x: x.to(torch.int32).sum(1)),
    (aten.sum.dim_IntList, lambda x: x.to(torch.uint8).sum(1)),
    (aten.sum.dim_IntList, lambda x: x.to(torch.int64).sum(1, dtype=torch.float32)),
    (aten.sum.default, lambda x: x.sum().sum()),
    (aten.mean.default, lambda x: x.mean()),
    (aten.mean.dim, lambda x: x.mean([1, 2])),
    (aten.mean.dim, lambda x: x.mean(0, keepdim=True)),
    (aten.mean.dim, lambda x: (x > 0).mean(0, dtype=torch.float32)),
    (aten.prod.default, lambda x: x.prod()),
    (aten.prod.dim_int, lambda x: x.prod(1)),
    (aten.amax.default, lambda x: x.amax(1)),
    (aten.amin.default, lambda x: x.amin([0, 2], keepdim=True)),
    (aten.amax.default, lambda x: (x > 3).amax(1)),
    (aten.max.default, lambda x: x.max()),
    (aten.min.default, lambda x: x.min()),
    (aten.max.dim, lambda x: tuple(x.max(1))),
    (aten.max.dim, lambda x: tuple(x.max(2, keepdim=True))),
    (aten.min.dim, lambda x: tuple(x.min(-1))),
    (aten.max.dim, lambda x: tuple(x.to(torch.int32).max(-1))),
    (aten.argmax.default, lambda x: x.argmax()),
    (aten.argmax.default, lambda x: x.argmax(1)),
    (aten.argmax.default, lambda x: x.argmax(-1, keepdim=True)),
    (aten.argmin.default, lambda x: x.argmin(2)),
    (aten.argmin.default, lambda x: x.argmin(keepdim=True)),
    (aten.any.default, lambda x: (x > 3).any()),
    (aten.any.dim, lambda x: x.any(1)),
    (aten.any.dims, lambda x: (x > 3).any((1, 2))),
    (aten.all.default, lambda x: (x > -8).all()),
    (aten.all.dim, lambda x: x.all(-1, keepdim=True)),
    (aten.all.dims, lambda x: (x > 3).all((1, 2))),
    (aten.var.correction, lambda x: x.var()),
    (aten.var.correction, lambda x: x.var([1, 2], correction=0)),
    (aten.var.correction, lambda x: x.var(1, keepdim=True)),
    (aten.var_mean.correction, lambda x: torch.var_mean(x, 2)),
    (aten.var_mean.correction, lambda x: torch.var_mean(x, [1, 2], keepdim=True, correction=2)),
    (aten.std_mean.correction, lambda x: torch.std_mean(x, 2)),
    (aten.std.correction, lambda x: x.std(1)),
    *(
        (aten.linalg_vector_norm.default, lambda x, p=p: x.norm(p, dim=1))
        for p in (0, 1, 2, 3, torch.inf, -torch.inf)
    ),
    (aten.linalg_vector_norm.default, lambda x: torch.linalg.vector_norm(x)),
    (None, lambda x: x.norm()),
    (aten.logsumexp.default, lambda x: torch.logsumexp(x * 30, 1)),
    (aten.logsumexp.default, lambda x: torch.logsumexp(x, [1, 2], keepdim=True)),
    (
        aten.logsumexp.default,
        lambda x: torch.logsumexp(torch.where(x > 0, torch.inf, -torch.inf), 1),
    ),
    (aten.cumsum.default, lambda x: x.cumsum(1)),
    (aten.cumsum.default, lambda x: (x > 0).cumsum(0)),
    (aten.cumprod.default, lambda x: x.cumprod(1)),
    (aten.cumprod.default, lambda x: x.cumprod(-1)),
    (aten.topk.default, lambda x: tuple(x.topk(2, 2))),
    (aten.topk.default, lambda x: tuple(x.topk(1, 1, largest=False))),
    (aten.sort.default, lambda x: x.sort(1)[0]),
    (aten.sort.stable, lambda x: tuple(x.sort(dim=2, stable=True))),
    (aten.sort.stable, lambda x: tuple(x.sort(dim=2, stable=True, descending=True))),
    (aten.sort.stable, lambda x: tuple(x.sort(dim=0, stable=True))),
    (None, lambda x: torch.count_nonzero(x)),
    (None, lambda x: torch.count_nonzero(x, 1)),
    (None, lambda x: x.argsort(dim=2, stable=True)),
    (None, lambda x: tuple(torch.aminmax(x, dim=1))),
    (None, lambda x: x.nansum(1)),
]


@pytest.mark.parametrize(("operator", "function"), CASES)
def test_reductions(operator: Any, function: Callable[..., Any]) -> None:
    check_emission(operator, function, X)


def test_whole_numbers() -> None:
    for function in (
        lambda x: x.sum(1),
        lambda x: x.amax(1),
        lambda x: tuple(x.max(2)),
        lambda x: tuple(x.min(1, keepdim=True)),
        lambda x: x.argmax(2),
        lambda x: x.argmin(),
        lambda x: x.cumsum(1),
        lambda x: tuple(x.sort(dim=2, stable=True)),
        lambda x: (x % 5).prod(1),
        lambda x: x.any(1),
    ):
        check_emission(None, function, WHOLE)


def test_numbers_without_axes() -> None:
    for function in (
        lambda x: x.sum().mean(),
        lambda x: tuple(x.sum().max(0)),
        lambda x: x.sum().argmax(),
        lambda x: x.sum().cumsum(0),
        lambda x: x.sum().norm(),
        lambda x: tuple(x.sum().sort()),
        lambda x: x.sum().amax(),
    ):
        check_emission(None, function, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(1),
        lambda x: x.var(1),
        lambda x: x.std([1, 2]),
        lambda x: x.norm(dim=2),
        lambda x: x.amax(1),
        lambda x: x.max(1)[0],
        lambda x: torch.logsumexp(x, 1),
        lambda x: x.cumsum(1).sum(2),
        lambda x: (x * x + 1).prod(1),
        lambda x: x.sort(1)[0].sum(2),
    ],
)
def test_gradients(function: Callable[..., Tensor]) -> None:
    check_emission(
        None,
        gradient_of(function),
        X,
        torch.linspace(-1, 2, function(X).numel()).reshape(function(X).shape),
    )


LONG: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.mean(),
    lambda x: x.sum(),
    lambda x: x.flatten().mean(),
    lambda x: x.mean([1, 2, 3]),
    lambda x: x.sum([3, 1, 2], keepdim=True),
    lambda x: x.flatten(1).sum(1, keepdim=True),
    lambda x: x.mean([0, 1, 2, 3], keepdim=True),
    lambda x: x.mean([0, 2, 3]),
    lambda x: functional.cross_entropy(x, x[:, 0].long() % 8),
    lambda x: functional.cross_entropy(
        x, x[:, 0].long() % 8, torch.arange(1.0, 9.0), ignore_index=0
    ),
]


@pytest.mark.parametrize("function", LONG)
def test_long_sums_are_as_exact_as_short_ones(function: Callable[[Tensor], Tensor]) -> None:
    """ONNX Runtime's own sums of 400,000 numbers are wrong by 1e-5 of their size."""
    check_emission(
        None,
        function,
        torch.randn(3, 8, 128, 128, generator=torch.Generator().manual_seed(0)).square(),
    )


def test_long_sums_of_odd_images() -> None:
    random = torch.Generator().manual_seed(0)
    check_emission(None, lambda x: x.mean(), torch.randn(3, 5, 131, 131, generator=random).square())
