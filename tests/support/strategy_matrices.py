"""Correlated noise as dense matrices: other ways to the numbers of ``privacy/toeplitz.py`` and
``privacy/blt.py``, and the strategies that BLT is compared with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def toeplitz(column: Matrix) -> Matrix:
    """Return the lower triangular Toeplitz matrix with this first column, (n, n)."""
    size = len(column)
    places = np.subtract.outer(np.arange(size), np.arange(size))
    found: Matrix = np.where(places >= 0, column[np.maximum(places, 0)], 0.0)
    return found


def inverse(column: Matrix) -> Matrix:
    """Return the first column of the inverse of a Toeplitz matrix with ones on its diagonal."""
    found = np.zeros_like(column)
    found[0] = 1.0
    for row in range(1, len(found)):
        found[row] = -(column[1 : row + 1] * found[row - 1 :: -1]).sum()
    return found


def square_root(releases: int, bands: int | None = None) -> Matrix:
    """Return the first column of the Toeplitz matrix whose square is the matrix of ones,
    c_k = c_{k-1} (2k - 1) / 2k (Fichtenberger, Henzinger and Upadhyay, arXiv 2202.11205), with only
    its first ``bands`` elements (Choquette-Choo et al., arXiv 2306.08153)."""
    order = np.arange(1, releases)
    column = np.concatenate([[1.0], np.cumprod((2 * order - 1) / (2 * order))])
    column[releases if bands is None else bands :] = 0.0
    return column


def tree(releases: int) -> Matrix:
    """Return the binary tree of 2^h leaves, (2^(h+1) - 1, 2^h): a row for each node, with ones at
    the leaves below it (Kairouz et al., arXiv 2103.00039)."""
    rows, width = [], 1
    while width <= releases:
        rows.append(np.kron(np.eye(releases // width), np.ones(width)))
        width *= 2
    return np.concatenate(rows)


def patterns(releases: int, separation: int, participations: int) -> Iterator[list[int]]:
    """Yield every set of releases in which a device may take part."""

    def longer(chosen: list[int]) -> Iterator[list[int]]:
        yield chosen
        if len(chosen) < participations:
            first = chosen[-1] + separation if chosen else 0
            for release in range(first, releases):
                yield from longer([*chosen, release])

    return longer([])


def sensitivity(strategy: Matrix, separation: int, participations: int) -> float:
    """Return the greatest norm of a sum of columns in which a device may take part: the sensitivity
    of a matrix without negative elements."""
    return max(
        float(np.linalg.norm(strategy[:, pattern].sum(axis=1)))
        for pattern in patterns(strategy.shape[1], separation, participations)
    )


def prefix_errors(strategy: Matrix) -> Matrix:
    """Return the standard deviation of the noise in the sum of the first 1, .. n releases, (n,),
    with the best decoder, for noise of standard deviation 1 on C x."""
    sums = np.tril(np.ones((strategy.shape[1],) * 2))
    decoder = sums @ np.linalg.pinv(strategy)
    found: Matrix = np.sqrt((decoder**2).sum(axis=1))
    return found
