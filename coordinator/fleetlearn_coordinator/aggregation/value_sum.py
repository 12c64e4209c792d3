"""The exact sum of the values that devices report of a model's buffers, such as BatchNorm's
statistics.

A buffer is measured by the devices, not descended. So what counts is where its value is, not how
far it moved: a report counts with a share c of its weight w, 0 < c <= 1 (staleness, clipping), and
the other 1 - c of it stays with the value x of the present model. The next value is the mean

    sum(w_i * (c_i * v_i + (1 - c_i) * x)) / sum(w_i),

which is nowhere outside the range of x and the devices' values v_i, whatever the staleness. A
running variance stays a variance.

No addition rounds, and no finite float32 is too large, whatever the weight. A product of a value
(24 significant bits) and of w * c (29, ``exact_mean.multiplier``) has 53 bits, exact in float64. It
is cut at fixed places into multiples of 2^136, 2^100, and so on down to 2^-188, each at most 2^35
times its grid; 2^17 of these add up to at most 2^52 times the grid, exactly. What is finer than
2^-188 is dropped: it is nothing beside float32's smallest number, 2^-149. (Binned summation as in
exact_mean.py, with a bin for every exponent. Buffers are a small part of a model, so the cost, 80
bytes and two to four passes for an element, does not matter.)

The factors' sum, sum(w_i * c_i), is added up in the same way: as one more element, whose value is
always 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bins = NDArray[np.float64]
"""The sum of no or some reports: shape (len(GRIDS), B + 1), row k in multiples of 2^GRIDS[k]."""

GRIDS = range(136, -189, -36)
"""The exponents of the grids. The largest product is below 2^(128 + 29) = 2^157."""


def init(size: int) -> Bins:
    """Return the sum of no reports, for ``size`` elements of buffers."""
    return np.zeros((len(GRIDS), size + 1))


def add(bins: Bins, values: NDArray[np.float32], times: NDArray[np.float64]) -> None:
    """Add n reports in place: finite values, float32, shape (n, B), and their w * c,
    ``exact_mean.multipliers``, (n,).

    The sum holds ``exact_mean.MAX_UPDATES`` reports."""
    products = np.empty((len(values), bins.shape[1]))
    products[:, :-1], products[:, -1] = values, 1.0
    products *= times[:, None]
    largest = float(np.abs(products).max(initial=0.0))
    for exponent, total in zip(GRIDS, bins, strict=True):
        if largest < 2.0 ** (exponent - 1):  # all of it rounds to 0 here
            continue
        # adding and subtracting it rounds to a multiple of 2^exponent
        rounding = 1.5 * 2.0 ** (52 + exponent)
        cut = (products + rounding) - rounding
        total += cut.sum(axis=0)  # multiples of one grid: exact in whatever order
        products -= cut
        largest = 2.0 ** (exponent - 1)
        if not products.any():
            return


def merge(bins: Bins, other: Bins) -> None:
    """Add the reports of ``other``, of as many elements, to ``bins``, in place. Together they may
    be no more than ``exact_mean.MAX_UPDATES``."""
    bins += other  # multiples of the same grids: exact


def mean(bins: Bins, weight: int, present: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the next values, float64, shape (B,). ``weight``: the sum of the reports' weights w.
    ``present``: the values in the present model, (B,)."""
    total = bins[::-1].sum(axis=0)  # the finest first
    # With c = 1 everywhere sum(w c) is the weight, and nothing of the present values stays.
    mean: NDArray[Any] = (total[:-1] + present * (weight - total[-1])) / weight
    return mean
