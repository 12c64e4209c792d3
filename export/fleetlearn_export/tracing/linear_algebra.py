"""Inverses, determinants and triangular systems of small matrices, which ONNX does not have.

The elimination is written out, step by step. PyTorch's own gradients call the same operators. What
LAPACK would report as an error, such as a singular matrix, gives numbers that are none (NaN) or
infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
LARGEST = 32
"""Rows of a matrix. Of larger ones the graph would get thousands of operators; they are left to the
error that names the user's line."""


def _exchanged(rows: Tensor, place: int, other: Tensor) -> Tensor:
    """Exchange two rows of each matrix (..., n, m). ``other`` (...) is a row's number for each
    matrix."""
    places, other = torch.arange(rows.shape[-2]), other.unsqueeze(-1)
    order = torch.where(places == place, other, torch.where(places == other, place, places))
    return rows.gather(-2, order.unsqueeze(-1).expand(rows.shape))


def _factors(a: Tensor) -> tuple[Tensor, Tensor]:
    """Factor matrices (..., n, n) with partial pivoting, as LAPACK's getrf does: both factors in
    one matrix, and from 1 the row (..., n) with which each row was exchanged."""
    places, exchanges = torch.arange(a.shape[-1]), []
    for step in range(int(a.shape[-1])):
        exchanges.append(a[..., step:, step].abs().argmax(-1) + step)
        a = _exchanged(a, step, exchanges[-1])
        later = places > step
        factors = torch.where(later, a[..., step] / a[..., step, step].unsqueeze(-1), 0).unsqueeze(
            -1
        )
        rest = a - factors * torch.where(later, a[..., step, :], 0).unsqueeze(-2)
        a = torch.where(later.unsqueeze(-1) & (places == step), factors, rest)
    return a, (torch.stack(exchanges, -1) + 1).to(torch.int32)


def _with_batch_of(b: Tensor, a: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    return b.expand([*batch, *b.shape[-2:]])


def solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """Solve ``a x = b``, or ``x a = b`` unless ``left``, by substitution."""
    if a.shape[-1] > LARGEST:
        return NotImplemented
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    size = int(a.shape[-1])
    rest = _with_batch_of(b, a)
    solved: list[Tensor] = []
    for step in reversed(range(size)) if upper else range(size):
        row, rest = (
            (rest[..., -1:, :], rest[..., :-1, :])
            if upper
            else (rest[..., :1, :], rest[..., 1:, :])
        )
        column = a[..., :step, step : step + 1] if upper else a[..., step + 1 :, step : step + 1]
        solved.append(row if unitriangular else row / a[..., step : step + 1, step : step + 1])
        rest = rest - column * solved[-1]
    return torch.cat(solved[::-1] if upper else solved, -2)


def lu_solve(
    lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False
) -> Any:
    """Solve with the factors of ``_factors``; ``adjoint``: for the transposed matrix."""
    if lu.shape[-1] > LARGEST:
        return NotImplemented
    if not left:
        return lu_solve(lu, pivots, b.mT, adjoint=not adjoint).mT
    b = _with_batch_of(b, lu)
    rows = (pivots.to(torch.int64) - 1).expand([*b.shape[:-2], pivots.shape[-1]])
    steps = range(int(lu.shape[-1]))
    if adjoint:
        b = solve_triangular(lu.mT, b, upper=False)
        b = solve_triangular(lu.mT, b, upper=True, unitriangular=True)
        for step in reversed(steps):
            b = _exchanged(b, step, rows[..., step])
        return b
    for step in steps:
        b = _exchanged(b, step, rows[..., step])
    b = solve_triangular(lu, b, upper=False, unitriangular=True)
    return solve_triangular(lu, b, upper=True)


def _no_error(a: Tensor) -> Tensor:
    return torch.zeros(a.shape[:-2], dtype=torch.int32)


def lu_factor(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    if not pivot or a.shape[-2] != a.shape[-1] or a.shape[-1] > LARGEST:
        return NotImplemented
    return *_factors(a), _no_error(a)


def solve(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    if a.shape[-1] > LARGEST:
        return NotImplemented
    lu, pivots = _factors(a)
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    columns = b.unsqueeze(-1) if vector else b
    x = lu_solve(lu, pivots, columns, left=left or vector)
    return x.squeeze(-1) if vector else x, lu, pivots, _no_error(a)


def inverse(a: Tensor, *, check_errors: bool = False) -> Any:
    if a.shape[-1] > LARGEST:
        return NotImplemented
    lu, pivots = _factors(a)
    return lu_solve(lu, pivots, torch.eye(int(a.shape[-1]), dtype=a.dtype)), _no_error(a)


def _sign_of_exchanges(pivots: Tensor) -> Tensor:
    """Return -1 or 1 (...): each exchange of two different rows changes the determinant's sign."""
    moved = pivots != torch.arange(1, int(pivots.shape[-1]) + 1)
    return 1 - 2 * (moved.sum(-1) % 2)


def _factors_for_determinant(a: Tensor) -> tuple[Tensor, Tensor]:
    """Factor the transposed matrix if that is how LAPACK sees the memory: PyTorch's gradients rely
    on that."""
    return _factors(a.mT if a.is_contiguous() else a)


def determinant(a: Tensor) -> Any:
    if a.shape[-1] > LARGEST:
        return NotImplemented
    lu, pivots = _factors_for_determinant(a)
    return lu.diagonal(0, -2, -1).prod(-1) * _sign_of_exchanges(pivots), lu, pivots


def logarithm_of_determinant(a: Tensor) -> Any:
    """Return the determinant's sign, and its absolute value's logarithm."""
    if a.shape[-1] > LARGEST:
        return NotImplemented
    lu, pivots = _factors_for_determinant(a)
    diagonal = lu.diagonal(0, -2, -1)
    return (
        diagonal.sign().prod(-1) * _sign_of_exchanges(pivots),
        diagonal.abs().log().sum(-1),
        lu,
        pivots,
    )


def cholesky(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """Return the triangular factor. Reads one triangle, as LAPACK does."""
    size = int(a.shape[-1])
    if size > LARGEST:
        return NotImplemented
    rest, columns = a.mT if upper else a, []
    for step in range(size):
        column = rest[..., :1] / rest[..., :1, :1].sqrt()
        columns.append(torch.constant_pad_nd(column, [0, 0, step, 0]))
        below = column[..., 1:, :]
        rest = rest[..., 1:, 1:] - below * below.mT
    factor = torch.cat(columns, -1)
    return factor.mT if upper else factor, _no_error(a)


def cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Any:
    if factor.shape[-1] > LARGEST:
        return NotImplemented
    lower = factor.mT if upper else factor
    return solve_triangular(lower.mT, solve_triangular(lower, b, upper=False), upper=True)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._linalg_det.default: determinant,
    aten._linalg_slogdet.default: logarithm_of_determinant,
    aten._linalg_solve_ex.default: solve,
    aten.cholesky_solve.default: cholesky_solve,
    aten.linalg_cholesky_ex.default: cholesky,
    aten.linalg_inv_ex.default: inverse,
    aten.linalg_lu_factor_ex.default: lu_factor,
    aten.linalg_lu_solve.default: lu_solve,
    aten.linalg_solve_triangular.default: solve_triangular,
}
