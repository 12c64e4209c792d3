"""Numbers as whole multiples of a power of two.

Each row's number is rounded before it is added. So the sum over all rows is one whole number, the
same however the rows are divided over devices and in whatever order they are added.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.computations.layout import Sums

MOST = 2**62
"""No sum of a device or of a round is further from 0."""


def to_fixed(values: NDArray[Any], bits: int) -> Sums:
    """Return the whole number nearest to each value times 2^bits (of two, the even one): int64, of
    the same shape. Raises ValueError where a value is not finite, or the number is beyond 2^62."""
    with np.errstate(over="ignore"):
        scaled = np.rint(np.ldexp(np.asarray(values, np.float64), bits))
    fit = np.abs(scaled) <= MOST  # NaN is not
    if not fit.all():
        worst = np.asarray(values, np.float64)[~fit].flat[0]
        raise ValueError(
            f"the value {worst} cannot be added up: expected a finite number of at most "
            f"{np.ldexp(float(MOST), -bits):g}"
        )
    return scaled.astype(np.int64)


def from_fixed(total: NDArray[np.int64], bits: int) -> NDArray[np.float64]:
    """Return what sums of ``to_fixed`` are: float64, of the same shape, the double nearest to
    each."""
    return np.ldexp(np.asarray(total, np.int64).astype(np.float64), -bits)


def added(total: Sums, more: Sums) -> Sums:
    """Return total + more, int64, shape (S,). Raises ValueError where a sum is beyond 2^62."""
    _check_size(more)
    # Both are at most 2^62, so that int64 holds what they add up to.
    found: Sums = total + more
    _check_size(found)
    return found


def _check_size(sums: Sums) -> None:
    if sums.size and (sums.max() > MOST or sums.min() < -MOST):
        raise ValueError("a sum over the rows is beyond 2^62: the values or the rows are too many")
