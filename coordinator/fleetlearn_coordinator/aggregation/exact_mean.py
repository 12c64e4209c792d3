"""The weighted mean of a round's updates, added up on arrival, the same to the last bit in whatever order they come.

Floating-point addition depends on order because it rounds. Here no addition rounds: each product of weight and
element is cut to two fixed grids, and sums of multiples of a grid are exact in float64 as long as they stay small
(binned summation: James Demmel and Hong Diep Nguyen, "Parallel Reproducible Summation", IEEE Transactions on
Computers 64(7), 2015, sections 4 and 5, with two bins whose places are fixed beforehand). What is cut off depends on
the update alone. So the sum is a function of the set of updates, and a sum that was saved and restored goes on as if
nothing had happened.

Why it is exact, for one element x (float32, 24 significant bits) and its weight w (integer, 1 <= w < 2^29):

* t = w * x has at most 24 + 29 = 53 significant bits: exact in float64.
* hi = (t + HIGH) - HIGH is t rounded to a multiple of 2^-8, where HIGH = 1.5 * 2^44 and |t| <= 2^28 (MAX_WEIGHTED).
  low = t - hi is exact, and |low| <= 2^-9.
* lo = (low + LOW) - LOW is low rounded to a multiple of 2^-44, where LOW = 1.5 * 2^8; |lo| <= 2^-9, and
  |t - hi - lo| <= 2^-45.
* A sum of multiples of 2^-8 is exact up to 2^(53-8) = 2^45: MAX_UPDATES = 2^17 times |hi| <= 2^28 just reaches it.
  A sum of multiples of 2^-44 is exact up to 2^(53-44) = 2^9: 2^17 times 2^-9 is 2^8.

So 2^17 updates, none with |w * x| above 2^28, can be added in any order; others are refused, before they touch the sum.
The weights being at least 1, what was cut off moves the mean by at most 2^-45 (3e-14) in each element.

Most updates are far smaller. Where |t| < 2^7, (t + LOW) - LOW is t rounded to a multiple of 2^-44: hi + lo in one go,
as hi is an even multiple of it. Sums of these are exact up to 2^9, of which the lo of 2^17 updates may take 2^8; as
long as they stay below the other 2^8, the second sum takes them whole. So which of the two sums holds what may depend
on the order; what they are together, and so the mean, does not.

That costs a third more than a plain multiply-add in float64, in the same blocks; what needs both sums three times as
much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector, check_finite
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[Any]
MAX_UPDATES = 2**17
"""Updates that one sum can hold."""
MAX_WEIGHT = 2**29 - 1
"""Largest weight of an update."""
MAX_WEIGHTED = 2.0**28
"""Largest magnitude of weight times element."""

HIGH = 1.5 * 2.0 ** (52 - 8)
"""Adding and subtracting it rounds to a multiple of 2^-8."""
LOW = 1.5 * 2.0 ** (52 - 44)
"""Adding and subtracting it rounds to a multiple of 2^-44."""
SMALL, SUMMED = 2.0**7, 2.0**8
"""Updates of which no |t| reaches the first are rounded once; sums of them stay below the second."""
BLOCK = 32768
"""Elements at a time, so that the temporaries stay in the processor's cache."""


@dataclass(slots=True)
class Sum:
    """A round's updates, added up: 16 bytes for each parameter, however many devices report."""

    hi: NDArray[np.float64]
    """Shape (P,): the sum of the products' parts that are multiples of 2^-8, but for small updates."""
    lo: NDArray[np.float64]
    """Shape (P,): the sum of what is left of them, in multiples of 2^-44."""
    weight: int = 0
    """The sum of the weights."""
    count: int = 0
    """How many updates are in it."""
    small: float = 0.0
    """At most so large is the sum of the updates that are in ``lo`` whole."""


def init(size: int) -> Sum:
    """The sum of no updates, for a model of ``size`` elements."""
    return Sum(np.zeros(size), np.zeros(size))


def check(largest: float, weight: int) -> None:
    """Raise ProtocolError (out-of-range) where an update with this weight cannot be added exactly.

    ``largest`` is the largest magnitude of its elements, as ``check_finite`` gives it for each chunk on arrival.
    """
    if not 1 <= weight <= MAX_WEIGHT:
        raise ProtocolError(Code.OUT_OF_RANGE, f"an update of weight {weight} was given; it takes 1 to {MAX_WEIGHT}")
    if not float(largest) * weight <= MAX_WEIGHTED:  # exact in float64, as above; false for NaN
        raise ProtocolError(
            Code.OUT_OF_RANGE,
            f"the update's largest element is {largest:g}; with a weight of {weight} the limit is "
            f"{MAX_WEIGHTED / weight:g}. Training has probably diverged: lower the learning rate.",
        )


def fits(largest: NDArray[np.float64], weights: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of several updates pass ``check``, by their largest elements and weights, (n,)."""
    return (weights >= 1) & (weights <= MAX_WEIGHT) & (largest * weights <= MAX_WEIGHTED)


def add(total: Sum, update: Vector, weight: int, largest: float | None = None) -> None:
    """Add ``weight`` times ``update`` to ``total``, in place.

    ``update`` is float32, shape (P,). ``largest`` is the largest magnitude of its elements where that is known from
    their arrival (at least that, or the sum is no longer exact); None: look, which is two passes more. Raises
    ProtocolError (wrong-length, not-finite, out-of-range), and then ``total`` is as it was.
    """
    if update.shape != total.hi.shape or update.dtype != np.float32:
        raise ProtocolError(
            Code.WRONG_LENGTH,
            f"an update of {update.dtype} and shape {update.shape} was given; expected float32 {total.hi.shape}",
        )
    add_parts(total, (update,), weight, check_finite(update) if largest is None else largest)


def add_parts(total: Sum, parts: Iterable[Vector], weight: int, largest: float) -> None:
    """Add an update that comes in parts: float32, flat, in order, together P elements.

    A part is done with before the next is asked for, so that all may share one buffer. Parts of BLOCK elements read
    from a file stay in the processor's cache: half the CPU of adding a memory map of it. Raises ProtocolError
    (out-of-range), and then ``total`` is as it was; ValueError where the parts have another length, and then it is not.
    """
    if total.count >= MAX_UPDATES:
        raise ProtocolError(Code.OUT_OF_RANGE, f"the round has {total.count} updates, and its sum can hold no more")
    check(largest, weight)
    size, most = len(total.hi), float(largest) * weight
    small = most < SMALL and total.small + most < SUMMED
    product, rounded = np.empty((2, min(size, BLOCK)))
    place = 0
    for part in parts:
        for start in range(0, len(part), BLOCK):
            block = part[start : start + BLOCK]
            t, cut = product[: len(block)], rounded[: len(block)]
            hi, lo = total.hi[place : place + len(block)], total.lo[place : place + len(block)]
            _product(block, weight, t)
            if small:
                np.add(lo, _cut(t, LOW, t), out=lo)
            else:
                for into in _cuts(t, cut, hi, lo):
                    np.add(into, cut, out=into)
            place += len(block)
    if place != size:
        raise ValueError(f"the update's parts have {place} elements; expected {size}")
    total.weight += weight
    total.count += 1
    total.small += most if small else 0.0


def add_many(
    total: Sum, parts: Sequence[NDArray[np.float32]], weights: NDArray[np.int64], largest: NDArray[np.float64]
) -> None:
    """Add several updates, in parts of float32 (n, P), with their weights, int64, and the largest magnitudes of their
    elements, at least, float64 (all n together,). The mean is the same as by ``add``, to the last bit.

    The caller has ``check``ed each of them. For small models it costs a fraction of as many calls of ``add``. Raises
    ProtocolError (out-of-range), and then ``total`` is as it was.
    """
    count, size = sum(map(len, parts)), len(total.hi)
    if total.count + count > MAX_UPDATES:
        raise ProtocolError(
            Code.OUT_OF_RANGE, f"the round has {total.count + count} updates; its sum can hold {MAX_UPDATES}"
        )
    rows = max(1, min(count, BLOCK // max(1, size)))
    products, rounded = np.empty((2, rows, min(size, BLOCK)))
    ones, done = np.ones(rows), 0
    for part in parts:
        for start in range(0, len(part), rows):
            given = part[start : start + rows]
            here = slice(done, done + len(given))
            done += len(given)
            weight: Any = weights[here, None].astype(np.float64)
            most = largest[here] * weights[here]
            small = most.max() < SMALL and most.sum() < SUMMED
            if weight.min() == weight.max():  # a third of the cost of a column
                weight = weight[0, 0]
            for place in range(0, size, BLOCK):
                block = given[:, place : place + BLOCK]
                t, cut = (array[: block.shape[0], : block.shape[1]] for array in (products, rounded))
                hi, lo = (array[place : place + BLOCK] for array in (total.hi, total.lo))
                _product(block, weight, t)
                if small:
                    both = ones[: len(t)] @ _cut(t, LOW, t)  # exact, in whatever order they are added
                    high = _cut(both, HIGH, np.empty_like(both))
                    hi += high
                    lo += both - high
                    continue
                for into in _cuts(t, cut, hi, lo):
                    # Multiples of one grid: exact in whatever order they are added, so by the quickest way.
                    np.add(into, ones[: len(cut)] @ cut, out=into)
    total.weight += int(weights.sum())
    total.count += count


def _product(block: Floats, weight: Any, t: Floats) -> None:
    np.copyto(t, block)  # then multiply, in float64; in one call it costs more
    np.multiply(t, weight, out=t)


def _cut(t: Floats, grid: float, cut: Floats) -> Floats:
    """``cut``, that is ``t`` rounded to the grid's multiples."""
    np.add(t, grid, out=cut)
    return np.subtract(cut, grid, out=cut)


def _cuts(t: Floats, cut: Floats, hi: Floats, lo: Floats) -> Iterator[Floats]:
    """Yields ``hi``, then ``lo``: ``cut`` then holds what of ``t`` belongs to it."""
    for grid, into in ((HIGH, hi), (LOW, lo)):
        _cut(t, grid, cut)
        yield into
        if into is hi:
            np.subtract(t, cut, out=t)


def mean(total: Sum) -> NDArray[np.float64]:
    """The weighted mean of the updates, float64, shape (P,): one rounding for the sum, one for the division.

    Raises ValueError when there are none.
    """
    if not total.count:
        raise ValueError("the mean of no updates was asked for; add one first")
    result = total.hi + total.lo
    result /= total.weight
    return result


def to_tensors(total: Sum) -> dict[str, NDArray[np.generic]]:
    """The sum as named arrays, for safetensors. They share ``total``'s memory: write them before the next ``add``."""
    return {
        "hi": total.hi,
        "lo": total.lo,
        "weight": np.array([total.weight], np.int64),
        "count": np.array([total.count], np.int64),
    }


def from_tensors(tensors: Mapping[str, NDArray[np.generic]]) -> Sum:
    """The sum that ``to_tensors`` gave, to the last bit, in memory of its own. Raises ValueError on anything else."""
    expected = {"hi": np.float64, "lo": np.float64, "weight": np.int64, "count": np.int64}
    found = {name: (array.dtype, array.ndim) for name, array in tensors.items()}
    if found != {name: (np.dtype(dtype), 1) for name, dtype in expected.items()}:
        raise ValueError(f"a saved sum has the flat arrays {sorted(expected)} in 64 bits; these are {found}")
    hi, lo = tensors["hi"].astype(np.float64), tensors["lo"].astype(np.float64)
    if hi.shape != lo.shape or tensors["weight"].shape != (1,) or tensors["count"].shape != (1,):
        raise ValueError("the arrays of the saved sum have lengths that do not fit together")
    weight, count = int(tensors["weight"][0]), int(tensors["count"][0])
    total = Sum(hi, lo, weight, count, small=float(np.abs(lo).max(initial=0.0)))
    if not 0 <= total.count <= MAX_UPDATES or not total.count <= total.weight <= total.count * MAX_WEIGHT:
        raise ValueError(f"the saved sum says {total.count} updates with a weight of {total.weight}: it is damaged")
    return total
