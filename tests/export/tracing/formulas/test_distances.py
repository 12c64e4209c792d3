"""Distances between all pairs of points, and their gradients, in ONNX, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.emission_cases import check_emission, gradient_of

RANDOM = torch.Generator().manual_seed(3)


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, float("inf"), 0.0])
def test_cdist_and_its_gradients(p: float) -> None:
    a, b = torch.randn(3, 4, 2, generator=RANDOM), torch.randn(3, 5, 2, generator=RANDOM)
    a[0, 1] = b[0, 2]  # a distance of 0
    grad = torch.randn(3, 4, 5, generator=RANDOM)

    def distances(a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b, p)

    def each(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        gradients = [gradient_of(distances, place)(a, b, grad) for place in (0, 1)] if p else []
        return (distances(a, b), *gradients)

    check_emission(None, each, a, b, grad, tolerance=1e-5)


def test_distances_to_learned_points() -> None:
    points = torch.randn(30, 4, generator=RANDOM)
    check_emission(None, lambda x: torch.cdist(x, points), torch.randn(3, 4, generator=RANDOM))
