"""How sensitive correlated noise is: Toeplitz strategies.

A strategy is a lower triangular Toeplitz matrix C with ones on its diagonal, given by its first
column c, shape (n,), for n releases. Release t is the sum of round t plus n_t, where the noise is
n = C^-1 z and z is independent Gaussian noise. So all releases are a function of C x + z, which is
one Gaussian mechanism. The model after t rounds has the sum of n_0 .. n_t in it. That sum is
smaller than with independent noise, because each n_t takes back a part of those before it.

Dvijotham, McMahan, Pillutla, Steinke and Thakurta, "Efficient and Near-Optimal Noise Generation for
Streaming Differential Privacy" (2024), arXiv 2404.16706; McMahan, Xu and Zhang, "A Hassle-free
Algorithm for Private Learning in Practice: Don't Use Tree Aggregation, Use BLTs" (2024), arXiv
2408.08868.
"""

from __future__ import annotations

from math import fsum, sqrt

import numpy as np
from numpy.typing import NDArray


def sensitivity(coefficients: NDArray[np.float64], separation: int, participations: int) -> float:
    """Return the most that a device's contributions, each of L2 norm at most 1, move C x (Frobenius
    norm), where the device takes part at most ``participations`` times, each at least
    ``separation`` releases after the last.

    ``coefficients``: c, shape (n,). With 0 <= c_k <= c_{k-1} the answer is the norm of the sum of
    the columns 0, b, 2b, ... of C (b is the separation), as many as there may be participations:
    2408.08868, theorem 2. Takes O(n). Raises ValueError if a coefficient is negative or larger than
    the one before, because other columns may be worse then, or if an argument is below 1.
    """
    releases = len(coefficients)
    if min(releases, separation, participations) < 1:
        raise ValueError(
            f"there are {releases} releases, separation {separation} and participations "
            f"{participations}; each must be at least 1"
        )
    if coefficients.min() < 0 or (np.diff(coefficients) > 0).any():
        raise ValueError(
            "the sensitivity of this Toeplitz matrix is not known: its coefficients must not be "
            f"negative or increase, and they begin with {coefficients[:4].tolist()}"
        )
    # A row of the table for each stretch of b releases: element t of the sum is c_t + c_{t-b} + ..
    width = min(separation, releases)
    table = np.zeros((-(-releases // width), width))
    table.reshape(-1)[:releases] = coefficients
    table = np.cumsum(table, axis=0)
    table[participations:] -= table[:-participations].copy()
    return sqrt(fsum(table.reshape(-1)[:releases] ** 2))
