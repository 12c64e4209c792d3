"""Complex numbers as pairs of real ones, and Fourier transforms, in ONNX, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

RANDOM = torch.Generator().manual_seed(2)
X, Y = (torch.randn(3, 4, 6, generator=RANDOM) for _ in range(2))
PARTS = torch.view_as_real
WEIGHT = torch.randn(4, 4, 2, generator=RANDOM)


def of_pairs(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of x + i y, as real numbers."""

    def real(x: Tensor, y: Tensor) -> Tensor:
        found = function(torch.complex(x, y))
        return PARTS(found) if found.is_complex() else found

    return real


def check(function: Callable[..., Tensor], *arrays: Tensor) -> None:
    """Compare the function's result and its gradients with PyTorch's."""
    grad = torch.randn(function(*arrays).shape, generator=RANDOM)

    def each(*given: Tensor) -> tuple[Tensor, ...]:
        gradients = [gradient_of(function, place)(*given) for place in range(len(arrays))]
        return (function(*given[:-1]), *gradients)

    check_emission(None, each, *arrays, grad, tolerance=1e-5)


@pytest.mark.parametrize("norm", ["forward", "ortho"])
@pytest.mark.parametrize("length", [5, 6])
def test_transforms_of_real_numbers_and_back(length: int, norm: str) -> None:
    def there_and_back(x: Tensor) -> Tensor:
        found = torch.fft.rfft2(x[..., :length], norm=norm)
        return torch.fft.irfft2(found * found.conj(), s=(4, length), norm=norm)

    check(there_and_back, X)
    check(lambda x: PARTS(torch.fft.fft(x[..., :length], norm=norm)), X)


@pytest.mark.parametrize(
    "function",
    [
        torch.fft.fft2,
        lambda z: torch.fft.ifft(z, dim=1),
        lambda z: torch.fft.irfft(z, n=9),
        lambda z: torch.fft.irfft(z, n=4),
        lambda z: torch.fft.ifft(functional.pad(z, (1, 2))),
    ],
)
def test_transforms_of_complex_numbers(function: Any) -> None:
    check(of_pairs(function), X, Y)


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z.abs(),
        lambda z: z * z + z.conj() / 2,
        lambda z: (z / (z + z.real)).imag,
        lambda z: torch.cat([z[:, 1:3], z.flip(1)], 1).transpose(1, 2).sum(1),
        lambda z: torch.einsum("nab,ac->ncb", z, torch.view_as_complex(WEIGHT)),
        lambda z: torch.polar(z.real, z.imag) - z.real,
    ],
)
def test_arithmetic(function: Any) -> None:
    check(of_pairs(function), X, Y)


def test_angles() -> None:
    check_emission(None, of_pairs(torch.angle), X, Y)


def test_the_size_of_0_has_the_gradient_0() -> None:
    check(of_pairs(torch.abs), X * (X > 0), Y * (X > 0))
