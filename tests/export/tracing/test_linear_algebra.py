"""Inverses, determinants and systems of small matrices, and their gradients, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fleetlearn_export.tracing import linear_algebra
from torch import Tensor

from tests.support.emission_cases import check_emission, gradient_of

RANDOM = torch.Generator().manual_seed(5)
A = torch.randn(3, 3, 3, generator=RANDOM)
"""No row is the largest where it stands: rows are exchanged."""
DEFINITE = A @ A.mT + torch.eye(3)
B = torch.randn(3, 3, 2, generator=RANDOM)


def triangle(upper: bool) -> Tensor:
    cut = torch.triu if upper else torch.tril
    return cut(A, 1 if upper else -1) + 2 * torch.eye(3)


FUNCTIONS: list[tuple[Callable[..., Tensor], Tensor]] = [
    (torch.linalg.inv, A),
    (torch.linalg.det, A),
    (torch.logdet, DEFINITE),
    (lambda a: torch.linalg.slogdet(a)[1], A),
    (lambda a: torch.linalg.solve(a, B[:1]), A),
    (lambda a: torch.linalg.solve(a.mT, B[0, :, 0]), A),
    (lambda a: torch.linalg.solve(a, B[0].mT, left=False), A),
    (torch.linalg.cholesky, DEFINITE),
    (lambda a: torch.linalg.cholesky(a, upper=True), DEFINITE),
    (lambda a: torch.cholesky_solve(B[:1], a), triangle(False)),
    (lambda a: torch.cholesky_solve(B[:1], a, upper=True), triangle(True)),
    (lambda a: torch.linalg.solve_triangular(a, B[:1], upper=False), triangle(False)),
    (lambda a: torch.linalg.solve_triangular(a, B[:1].mT, upper=True, left=False), triangle(True)),
    (
        lambda a: torch.linalg.solve_triangular(a, B[:1], upper=True, unitriangular=True),
        triangle(True),
    ),
]


FAST = {0, 7, 11}
"""Places of one function of each kind. The others trace the same steps with other options."""


@pytest.mark.parametrize(
    "place",
    [
        place if place in FAST else pytest.param(place, marks=pytest.mark.slow)
        for place in range(len(FUNCTIONS))
    ],
)
def test_functions_and_their_gradients(place: int) -> None:
    function, a = FUNCTIONS[place]
    check_emission(None, function, a, tolerance=1e-5)
    grad = torch.randn(function(a).shape, generator=RANDOM)
    check_emission(None, gradient_of(function), a, grad, tolerance=1e-5)


def test_the_sign_of_a_determinant() -> None:
    signs = torch.linalg.slogdet(A)[0]
    assert set(signs.tolist()) == {-1.0, 1.0}
    check_emission(None, lambda a: torch.linalg.slogdet(a)[0], A)


@pytest.mark.slow
def test_solving_for_the_right_side() -> None:
    check_emission(
        None, gradient_of(torch.linalg.solve, 1), A, B, torch.randn(B.shape, generator=RANDOM)
    )


def test_larger_matrices_are_left_to_the_error_that_names_the_line() -> None:
    a = torch.eye(linear_algebra.LARGEST + 1)
    assert linear_algebra.inverse(a) is NotImplemented
    assert linear_algebra.cholesky(a) is NotImplemented
