"""The weighted mean of a round's updates, added up as they arrive, with the same bits in every order.

Floating-point addition depends on the order because it rounds. Here no addition rounds. Each product of weight and
element is split into multiples of two fixed grids, and a sum of multiples of a grid is exact in float64 as long as it
stays small. This is binned summation (James Demmel and Hong Diep Nguyen, "Parallel Reproducible Summation", IEEE
Transactions on Computers 64(7), 2015, sections 4 and 5) with two bins whose places are fixed beforehand. The part of a
product that is finer than both grids is dropped; how much that is depends on the update alone. So the sum is a function
of the set of updates, and a sum that was saved and restored goes on as if nothing had happened.

Why it is exact, for one element x (float32, 24 significant bits) and its weight w (integer, 1 <= w < 2^29):

* t = w * x has at most 24 + 29 = 53 significant bits: it is exact in float64.
* hi = (t + ROUND_HI) - ROUND_HI is t rounded to a multiple of 2^-8, where ROUND_HI = 1.5 * 2^44 and |t| <= 2^28
  (MAX_PRODUCT). rest = t - hi is exact, and |rest| <= 2^-9.
* lo = (rest + ROUND_LO) - ROUND_LO is the rest rounded to a multiple of 2^-44, where ROUND_LO = 1.5 * 2^8;
  |lo| <= 2^-9, and |t - hi - lo| <= 2^-45.
* A sum of multiples of 2^-8 is exact up to 2^(53-8) = 2^45: MAX_UPDATES = 2^17 times |hi| <= 2^28 just reaches it.
  A sum of multiples of 2^-44 is exact up to 2^(53-44) = 2^9: 2^17 times 2^-9 is 2^8.

A stale update counts with a factor s, 0 < s <= 1: the sum has s * w * x, while its weight in the divisor is still w. So
that all of the above holds, s * w is rounded to 29 significant bits (``multiplier``), to the nearest, and so has an
error below one in 500 million. A fresh update has s = 1 and so exactly its weight w.

So 2^17 updates, none with |w * x| above 2^28, can be added in any order. Other updates are refused before they touch
the sum. Since the weights are at least 1, the dropped parts move the mean by at most 2^-45 (3e-14) in each element.

Most updates are far smaller. Where |t| < 2^7, (t + ROUND_LO) - ROUND_LO is t rounded to a multiple of 2^-44, which is
hi + lo in one step, because hi is a multiple of 2^-44 too. The sum of multiples of 2^-44 is exact up to 2^9, and the
lo parts of 2^17 updates take at most 2^8 of this. As long as the small updates stay below the other 2^8, they are added
to the second sum whole. So the order may decide which of the two sums holds what. It does not change their total, nor
the mean.

A small update costs a third more than a plain multiply-add in float64 by the same blocks; an update that needs both
sums costs three times as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import frexp, isfinite, ldexp
from typing import Any, TypeAlias

import numpy as np
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[Any]
MAX_UPDATES = 2**17
"""Updates that one sum can hold."""
WEIGHT_BITS = 29
"""Significant bits of what an update's elements are multiplied by."""
MAX_WEIGHT = 2**WEIGHT_BITS - 1
"""Largest weight of an update."""
MAX_PRODUCT = 2.0**28
"""Largest magnitude of weight times element."""

ROUND_HI = 1.5 * 2.0 ** (52 - 8)
"""Adding and then subtracting this number rounds to a multiple of 2^-8."""
ROUND_LO = 1.5 * 2.0 ** (52 - 44)
"""Adding and then subtracting this number rounds to a multiple of 2^-44."""
SMALL_PRODUCT = 2.0**7
"""Updates whose products all stay below this are rounded once."""
MAX_LO_BOUND = 2.0**8
"""``Sum.lo_bound`` stays below this."""
BLOCK = 32768
"""Elements that are worked on at a time, so that the temporaries stay in the processor's cache."""


@dataclass(slots=True)
class Sum:
    """A round's updates, added up: 16 bytes for each parameter, however many devices report."""

    hi: NDArray[np.float64]
    """Shape (P,): the sum of the products' parts that are multiples of 2^-8. Small updates are not in it."""
    lo: NDArray[np.float64]
    """Shape (P,): the sum of the products' other parts, in multiples of 2^-44. Small updates are in it whole."""
    weight: int = 0
    """The sum of the weights."""
    count: int = 0
    """How many updates are in the sum."""
    lo_bound: float = 0.0
    """Upper bound of the sum of the small updates' magnitudes in ``lo``."""


def init(size: int) -> Sum:
    """Return the sum of no updates, for a model of ``size`` elements."""
    return Sum(np.zeros(size), np.zeros(size))


def multiplier(weight: int, factor: float) -> float:
    """Return what an update's elements are multiplied by: weight times factor, to WEIGHT_BITS significant bits."""
    mantissa, exponent = frexp(weight * factor)
    return ldexp(round(ldexp(mantissa, WEIGHT_BITS)), exponent - WEIGHT_BITS)


def multipliers(weights: NDArray[np.int64], factors: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Return ``multiplier`` for each of n updates, (n,). Without factors they are all 1."""
    if factors is None:
        return weights.astype(np.float64)
    mantissas, exponents = np.frexp(weights * factors)
    rounded: NDArray[np.float64] = np.ldexp(np.rint(np.ldexp(mantissas, WEIGHT_BITS)), exponents - WEIGHT_BITS)
    return rounded


def check(largest: float, weight: int) -> None:
    """Raise ProtocolError (not-finite, out-of-range) if an update with this weight cannot be added exactly.

    A factor makes it smaller: an update that passes can be added with any factor.

    ``largest`` is the largest magnitude of its elements. NaN or infinity means that one of them is not finite.
    """
    if not 1 <= weight <= MAX_WEIGHT:
        raise ProtocolError(Code.OUT_OF_RANGE, f"an update of weight {weight} was given; it takes 1 to {MAX_WEIGHT}")
    if not isfinite(largest):
        raise ProtocolError(Code.NOT_FINITE, f"the update's largest element is {largest}; it must be finite")
    if float(largest) * weight > MAX_PRODUCT:  # the product is exact in float64, as above
        raise ProtocolError(
            Code.OUT_OF_RANGE,
            f"the update's largest element is {largest:g}; with a weight of {weight} the sum takes up to "
            f"{MAX_PRODUCT / weight:g}. If the loss grows, training has diverged: lower the learning rate. If it does "
            "not, a trained parameter is in large units: scale inputs and targets, or let updates weigh less "
            '(round.max_weight, or round.weighting = "uniform").',
        )


def passes_check(largest: NDArray[np.float64], weights: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of n updates pass ``check``, (n,), by their largest elements and weights."""
    passes: NDArray[np.bool_] = (weights >= 1) & (weights <= MAX_WEIGHT) & (largest * weights <= MAX_PRODUCT)
    return passes


def add(total: Sum, parts: Iterable[Vector], weight: int, largest: float, factor: float = 1.0) -> None:
    """Add an update of this weight to ``total``, in place: ``factor`` times ``weight`` times its elements.

    ``parts`` are the update's elements in order: flat float32 arrays, together of shape (P,). Each part is used before
    the next is asked for, so that all may share one buffer. Parts of BLOCK elements read from a file stay in the
    processor's cache, which takes half the CPU of adding a memory map of the file. ``largest`` is the largest magnitude
    of the elements, or more; with less the sum would not be exact. ``factor`` is above 0 and at most 1.

    Raises ProtocolError (see ``check``; out-of-range also for one update too many) and leaves ``total`` as it was.
    Raises ValueError if the parts have another length; ``total`` is then spoilt.
    """
    if total.count >= MAX_UPDATES:
        raise ProtocolError(Code.OUT_OF_RANGE, f"the round has {total.count} updates, and its sum can hold no more")
    check(largest, weight)
    times = multiplier(weight, factor)
    size, bound = len(total.hi), float(largest) * times
    small = bound < SMALL_PRODUCT and total.lo_bound + bound < MAX_LO_BOUND
    products, rounded = np.empty((2, min(size, BLOCK)))
    place = 0
    for part in parts:
        for start in range(0, len(part), BLOCK):
            block = part[start : start + BLOCK]
            t, cut = products[: len(block)], rounded[: len(block)]
            hi, lo = total.hi[place : place + len(block)], total.lo[place : place + len(block)]
            _multiply(block, times, t)
            if small:
                np.add(lo, _round(t, ROUND_LO, t), out=lo)
            else:
                for into in _split(t, cut, hi, lo):
                    np.add(into, cut, out=into)
            place += len(block)
    if place != size:
        raise ValueError(f"the update's parts have {place} elements; expected {size}")
    total.weight += weight
    total.count += 1
    total.lo_bound += bound if small else 0.0


def add_many(
    total: Sum,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: NDArray[np.float64],
    factors: NDArray[np.float64] | None = None,
) -> None:
    """Add n updates that have passed ``check``. The mean is the same as by ``add``, to the last bit.

    ``parts`` are float32 arrays of shape (rows, P), n rows together. ``weights`` are int64, (n,). ``largest`` are the
    largest magnitudes of the updates' elements, or more, float64, (n,). ``factors`` are float64, (n,); None: all are 1.
    For small models this costs a fraction of n calls of ``add``. Raises ProtocolError (out-of-range: too many updates)
    and leaves ``total`` as it was."""
    count, size = sum(map(len, parts)), len(total.hi)
    if total.count + count > MAX_UPDATES:
        raise ProtocolError(
            Code.OUT_OF_RANGE, f"the round has {total.count + count} updates; its sum can hold {MAX_UPDATES}"
        )
    rows = max(1, min(count, BLOCK // max(1, size)))
    products, rounded = np.empty((2, rows, min(size, BLOCK)))
    ones, done, times = np.ones(rows), 0, multipliers(weights, factors)
    for part in parts:
        for start in range(0, len(part), rows):
            updates = part[start : start + rows]
            here = slice(done, done + len(updates))
            done += len(updates)
            weight: Any = times[here, None]
            bounds = largest[here] * times[here]
            small = bounds.max() < SMALL_PRODUCT and bounds.sum() < MAX_LO_BOUND
            if weight.min() == weight.max():  # a number takes a third of the time of a column
                weight = weight[0, 0]
            for place in range(0, size, BLOCK):
                block = updates[:, place : place + BLOCK]
                t, cut = (array[: block.shape[0], : block.shape[1]] for array in (products, rounded))
                hi, lo = (array[place : place + BLOCK] for array in (total.hi, total.lo))
                _multiply(block, weight, t)
                # Multiples of one grid are exact in whatever order they are added: a product with ones is the quickest.
                if small:
                    together = ones[: len(t)] @ _round(t, ROUND_LO, t)
                    high = _round(together, ROUND_HI, np.empty_like(together))
                    hi += high
                    lo += together - high
                    continue
                for into in _split(t, cut, hi, lo):
                    np.add(into, ones[: len(cut)] @ cut, out=into)
    total.weight += int(weights.sum())
    total.count += count


def _multiply(block: Floats, weight: Any, t: Floats) -> None:
    """Write the products into ``t``."""
    np.copyto(t, block)  # then multiply, in float64; in one call it costs more
    np.multiply(t, weight, out=t)


def _round(t: Floats, grid: float, into: Floats) -> Floats:
    """Return ``into``, with ``t`` rounded to multiples of the grid (ROUND_HI or ROUND_LO)."""
    np.add(t, grid, out=into)
    return np.subtract(into, grid, out=into)


def _split(t: Floats, cut: Floats, hi: Floats, lo: Floats) -> Iterator[Floats]:
    """Yield ``hi``, then ``lo``. ``cut`` then holds the part of ``t`` that is to be added to it."""
    for grid, into in ((ROUND_HI, hi), (ROUND_LO, lo)):
        _round(t, grid, cut)
        yield into
        if into is hi:
            np.subtract(t, cut, out=t)


def mean(total: Sum) -> NDArray[np.float64]:
    """Return the weighted mean of the updates, float64, shape (P,): one rounding for the sum, one for the division.

    With factors s_i it is sum(s_i * w_i * x_i) / sum(w_i): a stale update moves the mean less, and does not move the
    others more.

    Raises ValueError if there are none.
    """
    if not total.count:
        raise ValueError("the mean of no updates was asked for; add one first")
    result = total.hi + total.lo
    result /= total.weight
    return result


def to_tensors(total: Sum) -> dict[str, NDArray[np.generic]]:
    """Return the sum as named flat arrays. They share ``total``'s memory: write them before the next ``add``."""
    return {
        "hi": total.hi,
        "lo": total.lo,
        "weight": np.array([total.weight], np.int64),
        "count": np.array([total.count], np.int64),
    }


def from_tensors(tensors: Mapping[str, NDArray[np.generic]]) -> Sum:
    """Return the sum that ``to_tensors`` gave, to the last bit, in memory of its own.

    Raises ValueError if the arrays are not those of a sum.
    """
    expected = {"hi": np.float64, "lo": np.float64, "weight": np.int64, "count": np.int64}
    found = {name: (array.dtype, array.ndim) for name, array in tensors.items()}
    if found != {name: (np.dtype(dtype), 1) for name, dtype in expected.items()}:
        raise ValueError(f"a saved sum has the flat arrays {sorted(expected)} in 64 bits; these are {found}")
    hi, lo = tensors["hi"].astype(np.float64), tensors["lo"].astype(np.float64)
    if hi.shape != lo.shape or tensors["weight"].shape != (1,) or tensors["count"].shape != (1,):
        raise ValueError("the arrays of the saved sum have lengths that do not fit together")
    weight, count = int(tensors["weight"][0]), int(tensors["count"][0])
    total = Sum(hi, lo, weight, count, lo_bound=float(np.abs(lo).max(initial=0.0)))
    if not 0 <= total.count <= MAX_UPDATES or not total.count <= total.weight <= total.count * MAX_WEIGHT:
        raise ValueError(f"the saved sum says {total.count} updates with a weight of {total.weight}: it is damaged")
    return total
