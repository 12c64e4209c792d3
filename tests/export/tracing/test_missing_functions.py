"""Functions that ONNX does not have, and their gradients, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleetlearn_export.tracing import missing_functions
from torch import Tensor

from tests.support.emission_cases import check_emission, gradient_of

RANDOM = torch.Generator().manual_seed(4)
X = torch.randint(-9, 9, (3, 7, 4), generator=RANDOM).float() / 2
"""Some elements are equal."""


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("function", [torch.cummax, torch.cummin])
def test_running_extrema(function: Callable[..., Any], axis: int) -> None:
    check_emission(None, lambda x: tuple(function(x, axis)), X)
    check_emission(None, lambda x: tuple(function(x.to(torch.int64), axis)), X)
    grad = torch.randn(X.shape, generator=RANDOM)
    check_emission(None, gradient_of(lambda x: function(x, axis)[0]), X, grad)


def test_running_sum_of_exponentials() -> None:
    x = 40 * torch.randn(3, 9, generator=RANDOM)
    x[0, :3] = -torch.inf
    check_emission(None, lambda x: torch.logcumsumexp(x, 1), x)
    x, grad = torch.randn(3, 9, 2, generator=RANDOM), torch.randn(3, 9, 2, generator=RANDOM)
    check_emission(None, gradient_of(lambda x: torch.logcumsumexp(x, 1)), x, grad, tolerance=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.median(1)[0],
        lambda x: x.median(-1, keepdim=True)[0],
        lambda x: x.kthvalue(2, 1)[0],
        lambda x: x.kthvalue(3, 1, keepdim=True)[0],
        lambda x: x.quantile(0.3, 1),
        lambda x: x.quantile(torch.tensor([0.1, 0.5]), -1, keepdim=True),
    ],
)
def test_order_statistics(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 7, 4, generator=RANDOM)
    check_emission(None, function, x)
    if function(x).shape[0] == len(x):
        check_emission(
            None, gradient_of(function), x, torch.randn(function(x).shape, generator=RANDOM)
        )


def test_median_of_all_elements() -> None:
    check_emission(None, lambda x: x.median(), torch.randn(3, 7, generator=RANDOM))


def test_gamma_functions() -> None:
    x = torch.linspace(-5.3, 40, 300).reshape(3, 100)
    check_emission(None, torch.lgamma, x)
    check_emission(None, gradient_of(torch.lgamma), x, torch.ones_like(x), tolerance=1e-5)
    torch.testing.assert_close(
        *(function(x[:, 20:].double()) for function in (missing_functions.lgamma, torch.lgamma)),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize(("bins", "low", "high"), [(4, 0, 3), (5, -1.5, 2)])
def test_histograms(bins: int, low: float, high: float) -> None:
    """Of halves from -4.5 to 4, with some on the limits of the bins and some outside."""
    check_emission(None, lambda x: torch.histc(x.flatten(), bins, low, high), X)
