"""Images read at computed places, and the gradients, in ONNX, against PyTorch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

RANDOM = torch.Generator().manual_seed(2)


@pytest.mark.parametrize(
    ("axes", "mode", "outside", "align"),
    [
        *product([2], ["bilinear", "nearest"], ["zeros", "border", "reflection"], [True, False]),
        (2, "bicubic", "border", True),
        *(
            pytest.param(2, "bicubic", *rest, marks=pytest.mark.slow)
            for rest in product(["zeros", "border", "reflection"], [True, False])
            if rest != ("border", True)
        ),
        (3, "bilinear", "zeros", False),
        (3, "nearest", "reflection", True),
    ],
)
def test_grid_sample_and_its_gradients(axes: int, mode: str, outside: str, align: bool) -> None:
    x = torch.randn(3, 2, *(4, 5, 3)[:axes], generator=RANDOM)
    grid = 3 * torch.rand(3, *(3, 4, 2)[:axes], axes, generator=RANDOM) - 1.5
    grid[0, 0] = 1.0  # exactly at the border
    grad = torch.randn(3, 2, *grid.shape[1:-1], generator=RANDOM)

    def sample(x: Tensor, grid: Tensor) -> Tensor:
        return functional.grid_sample(x, grid, mode, outside, align)

    def each(x: Tensor, grid: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        gradients = [gradient_of(sample)(x, grid, grad)]
        if mode != "nearest":
            gradients.append(gradient_of(sample, 1)(x, grid, grad))
        return (sample(x, grid), *gradients)

    check_emission(None, each, x, grid, grad, tolerance=1e-5)


@pytest.mark.parametrize("size", [(4, 5), (2, 3, 4)])
def test_affine_grid_and_its_gradient(size: tuple[int, ...]) -> None:
    theta = torch.randn(3, len(size), len(size) + 1, generator=RANDOM)
    grad = torch.randn(3, *size, len(size), generator=RANDOM)

    def grid(theta: Tensor) -> Tensor:
        return functional.affine_grid(theta, [theta.shape[0], 2, *size], align_corners=False)

    check_emission(
        None, lambda theta, grad: (grid(theta), gradient_of(grid)(theta, grad)), theta, grad
    )
