"""Two exact sums made one, as if all their updates had been added to one sum from the beginning.

So several processes can each add up a part of a round's updates, and the mean has the same bits as
if one process had added all of them, in whatever order (exact_mean.py says why additions do not
round).

A bin of the grid 2^g is exact up to 2^(53 + g). The parts of all updates of a round take at most
half of it, and the updates that are in it whole the other half, as long as their bound,
``Sum.whole``, stays below 2^(52 + g). The bounds of two sums add up. Where they are too large
together, what a bin holds is first carried to the next coarser one, down to half of a multiple of
that one's grid. Updates are whole in bins of 2^-44 and finer alone. So what is carried, at most
2^17 multiples of the coarser grid, finds half of the bin of 2^-8 free; a finer bin counts it as an
update that is in it whole.
"""

from __future__ import annotations

from math import ldexp

import numpy as np
from fleetlearn_protocol.errors import Code, ProtocolError

from fleetlearn_coordinator.aggregation.exact_mean import (
    BLOCK,
    GRIDS,
    MAX_UPDATES,
    STEP,
    USUAL,
    Sum,
)


def merge(total: Sum, other: Sum) -> None:
    """Add the updates of ``other`` to ``total``, in place. ``other`` may not be used afterwards:
    its arrays may be ``total``'s then.

    ``add_up`` and ``mean`` of ``total`` have the same bits as if each update had been added to
    ``total`` itself. Raises ProtocolError (out-of-range) where there are more than MAX_UPDATES
    updates together, ValueError where the sums are of models of different sizes: both are then as
    they were.
    """
    if other.size != total.size:
        raise ValueError(f"sums of {total.size} and of {other.size} elements cannot be merged")
    count = total.count + other.count
    if count > MAX_UPDATES:
        text = f"the two sums have {count} updates together; one can hold {MAX_UPDATES}"
        raise ProtocolError(Code.OUT_OF_RANGE, text)
    for exponent in reversed(GRIDS):  # the finest first, as carries go to coarser ones
        for sums in (total, other):
            if exponent in sums.bins and _is_too_full(total, other, exponent):
                _carry(sums, exponent)
        if exponent not in other.bins:
            continue
        if exponent in total.bins:
            total.bins[exponent] += other.bins[exponent]
        else:
            total.bins[exponent] = other.bins[exponent]
        total.whole[exponent] = _whole(total, other, exponent)
    total.weight += other.weight
    total.count = count


def _whole(total: Sum, other: Sum, exponent: int) -> float:
    return total.whole.get(exponent, 0.0) + other.whole.get(exponent, 0.0)


def _is_too_full(total: Sum, other: Sum, exponent: int) -> bool:
    """Return whether the updates that are whole in this bin of either sum may be too many for one
    bin."""
    return exponent <= USUAL and _whole(total, other, exponent) >= ldexp(1.0, exponent + 52)


def _carry(sums: Sum, exponent: int) -> None:
    """Leave in the bin of this grid at most half of a multiple of the next coarser one. The rest
    goes there: the sum of all bins stays what it was."""
    coarser = exponent + STEP
    fine, coarse = sums.bins[exponent], sums.bin_of(coarser)
    for place in range(0, sums.size, BLOCK):
        here = slice(place, place + BLOCK)
        carried = np.ldexp(np.rint(np.ldexp(fine[here], -coarser)), coarser)
        fine[here] -= carried
        coarse[here] += carried
    sums.whole[exponent] = ldexp(1.0, coarser - 1)
    sums.whole[coarser] = sums.whole.get(coarser, 0.0) + ldexp(1.0, exponent + 53)
