"""The weighted mean of a round's updates, added up on arrival, with the same bits in every order.

Floating-point addition depends on the order because it rounds. Here no addition rounds. Each
product of weight and element is split into multiples of fixed grids, powers of two that are 2^36
apart, and a sum of multiples of one grid is exact in float64 as long as it stays small. This is
binned summation (James Demmel and Hong Diep Nguyen, "Parallel Reproducible Summation", IEEE
Transactions on Computers 64(7), 2015, sections 4 and 5) with bins whose places are fixed
beforehand. What is finer than an update's finest grid is dropped; where that is depends on the
update alone. So the sum is a function of the set of updates, and a sum that was saved and restored
goes on as if nothing had happened.

Why it is exact, for one element x (float32, 24 significant bits, |x| <= 2^35) and its weight w
(integer, 1 <= w < 2^29):

* t = w * x has at most 24 + 29 = 53 significant bits: it is exact in float64, and |t| <= 2^64.
* (t + R) - R, with R = 1.5 * 2^(52 + g), is t rounded to a multiple of the grid 2^g, if
  |t| < 2^(g + 51). The rest is exact and at most 2^(g - 1), which is 2^35 times the next grid. So
  an update puts at most 2^35 multiples into a bin, or 2^36 into the coarsest one, whose grid is
  2^28.
* A sum of multiples of 2^g is exact up to 2^(53 + g). For MAX_UPDATES = 2^17 times 2^36 multiples
  this is just enough.

A stale update counts with a factor s, 0 < s <= 1: the sum has s * w * x, while its weight in the
divisor is still w. So that all of the above holds, s * w is rounded to 29 significant bits
(``multiplier``), to the nearest, and so has an error below one in 500 million. A fresh update
has s = 1 and so exactly its weight w.

Most updates end at the grid 2^-44. As the weights are at least 1, what is dropped there moves the
mean by at most 2^-45 (3e-14) in each element. An update whose largest product is below 2^-20, since
its elements or its factor are tiny, goes on to a finer grid: what is dropped is at most 2^-25 of
its largest product, half of that element's own last bit. That is so down to a largest product of
2^-272; the finest grid is 2^-296.

So 2^17 updates can be added in any order. Updates with larger elements are refused before they
touch the sum. They are finite, but the server optimizer's float32 state might not hold what they
make.

Most updates are small. Where |t| < 2^(g + 51) for an update's finest grid g, such as 2^7 for 2^-44,
one rounding makes t the sum of all of its parts, which are multiples of 2^g too. The bin of 2^g is
exact up to 2^(53 + g), of which the parts of 2^17 updates take at most half. As long as the updates
that are in it whole stay below the other half, they are added to that bin alone. So the order may
decide which bin holds what. It does not change their total, nor the mean (``add_up``).

A bin takes 8 bytes for each element, and exists from the first update on that needs it. A usual
round has the one of 2^-44, or that and the one of 2^-8. No round has more than ten. A small update
costs a third more than a plain multiply-add in float64 by the same blocks; an update that needs two
bins costs three times as much.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import frexp, isfinite, ldexp
from typing import Any, NamedTuple, TypeAlias

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
MAX_ELEMENT = 2.0**35
"""Largest magnitude of an element, whatever the weight."""

STEP = 36
"""Two neighbouring grids differ by a factor of 2^36."""
USUAL = -44
"""The exponent of the grid at which the products of a usual update end."""
GRIDS = range(28, -297, -STEP)
"""The exponents of all grids, the coarsest first."""
BITS_KEPT = 24
"""An update ends at a grid of at most 2^-24 of its largest product."""
BLOCK = 32768
"""Elements that are worked on at a time, so that the temporaries stay in the processor's cache."""

_ENDS = [exponent for exponent in GRIDS if exponent <= USUAL][::-1]
"""The exponents of the grids at which an update may end, the finest first."""
_LEAST = [ldexp(1.0, exponent + BITS_KEPT) for exponent in _ENDS[1:]]
"""For each but the first: the least largest product with which an update ends there."""


@dataclass(slots=True)
class Sum:
    """A round's updates, added up: usually 8 or 16 bytes for each element of the model, however
    many devices report, and at most 80."""

    size: int
    """P, the number of the model's elements."""
    bins: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    """Exponent of a grid -> the sum, shape (P,), of the products' parts that are multiples of that
    grid. Grids of which no update has needed a part are not there."""
    whole: dict[int, float] = field(default_factory=dict)
    """Exponent of a grid -> upper bound of the sum of the magnitudes of the updates that are in its
    bin whole."""
    weight: int = 0
    """The sum of the weights."""
    count: int = 0
    """How many updates are in the sum."""

    def bin_of(self, exponent: int) -> NDArray[np.float64]:
        """Return the bin of this grid, which is made if it is not there."""
        if exponent not in self.bins:
            self.bins[exponent] = np.zeros(self.size)
        return self.bins[exponent]


def init(size: int) -> Sum:
    """Return the sum of no updates, for a model of ``size`` elements."""
    return Sum(size)


def multiplier(weight: int, factor: float) -> float:
    """Return what an update's elements are multiplied by: weight times factor, to WEIGHT_BITS
    significant bits."""
    mantissa, exponent = frexp(weight * factor)
    return ldexp(round(ldexp(mantissa, WEIGHT_BITS)), exponent - WEIGHT_BITS)


def multipliers(
    weights: NDArray[np.int64],
    factors: NDArray[np.float64] | None,
) -> NDArray[np.float64]:
    """Return ``multiplier`` for each of n updates, (n,). Without factors they are all 1."""
    if factors is None:
        return weights.astype(np.float64)
    mantissas, exponents = np.frexp(weights * factors)
    whole = np.rint(np.ldexp(mantissas, WEIGHT_BITS))
    rounded: NDArray[np.float64] = np.ldexp(whole, exponents - WEIGHT_BITS)
    return rounded


def check(largest: float, weight: int) -> None:
    """Raise ProtocolError (not-finite, out-of-range) if an update with this weight cannot be added.

    ``largest`` is the largest magnitude of its elements. NaN or infinity means that one of them is
    not finite.
    """
    if not 1 <= weight <= MAX_WEIGHT:
        text = f"an update of weight {weight} was given; it takes 1 to {MAX_WEIGHT}"
        raise ProtocolError(Code.OUT_OF_RANGE, text)
    if not isfinite(largest):
        text = f"the update's largest element is {largest}; it must be finite"
        raise ProtocolError(Code.NOT_FINITE, text)
    if largest > MAX_ELEMENT:
        raise ProtocolError(
            Code.OUT_OF_RANGE,
            f"the update's largest element is {largest:g}; the sum takes up to {MAX_ELEMENT:g}, "
            "whatever the weight. If the loss grows, training has diverged: lower the learning "
            "rate. If it does not, a trained parameter is in very large units: scale inputs and "
            "targets.",
        )


def passes_check(largest: NDArray[np.float64], weights: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of n updates pass ``check``, (n,), by their largest elements and weights."""
    passes: NDArray[np.bool_] = (weights >= 1) & (weights <= MAX_WEIGHT) & (largest <= MAX_ELEMENT)
    return passes


def add(
    total: Sum,
    parts: Iterable[Vector],
    weight: int,
    largest: float,
    factor: float = 1.0,
) -> None:
    """Add an update of this weight to ``total``, in place: ``factor`` times ``weight`` times its
    elements.

    ``parts`` are the update's elements in order: flat float32 arrays, together of shape (P,). Each
    part is used before the next is asked for, so that all may share one buffer. Parts of BLOCK
    elements read from a file stay in the processor's cache, which takes half the CPU of adding a
    memory map of the file. ``largest`` is the largest magnitude of the elements, the same number
    whoever adds the update, since the finest grid follows from it; with less than the largest the
    sum would not be exact. ``factor`` is above 0 and at most 1.

    Raises ProtocolError (see ``check``; out-of-range also for one update too many) and leaves
    ``total`` as it was. Raises ValueError if the parts have another length; ``total`` is then
    spoilt.
    """
    begun = _begin(total, weight, largest, factor)
    times, grids = begun.times, begun.grids
    bins = [total.bin_of(exponent) for exponent in grids]
    products, rounded = np.empty((2, min(total.size, BLOCK)))
    place = 0
    for part in parts:
        for start in range(0, len(part), BLOCK):
            block = part[start : start + BLOCK]
            t, cut = products[: len(block)], rounded[: len(block)]
            _multiply(block, times, t)
            for into, found in zip(bins, _split(t, cut, grids), strict=True):
                here = into[place : place + len(block)]
                np.add(here, found, out=here)
            place += len(block)
    if place != total.size:
        raise ValueError(f"the update's parts have {place} elements; expected {total.size}")
    _end(total, weight, begun)


def add_at(
    total: Sum,
    places: NDArray[np.int64],
    elements: Vector,
    weight: int,
    largest: float,
    factor: float = 1.0,
) -> None:
    """Add an update that has elements in these places of ``total`` alone, int64, shape (n,), none
    of them twice: the same as ``add`` with zeros elsewhere, in time by n. ``elements``: float32,
    shape (n,). Raises as ``add`` does."""
    begun = _begin(total, weight, largest, factor)
    bins = [total.bin_of(exponent) for exponent in begun.grids]
    products, rounded = np.empty((2, min(len(elements), BLOCK)))
    for start in range(0, len(elements), BLOCK):
        block, here = elements[start : start + BLOCK], places[start : start + BLOCK]
        t, cut = products[: len(block)], rounded[: len(block)]
        _multiply(block, begun.times, t)
        for into, found in zip(bins, _split(t, cut, begun.grids), strict=True):
            into[here] += found
    _end(total, weight, begun)


class _Begun(NamedTuple):
    """How an update is added."""

    times: float
    """What its elements are multiplied by."""
    bound: float
    """Its largest product."""
    grids: Sequence[int]
    """The grids that its products have parts in, the coarsest first."""
    is_whole: bool
    """Whether it is in one bin whole."""


def _begin(total: Sum, weight: int, largest: float, factor: float) -> _Begun:
    """Return how an update is added. Raises ProtocolError as ``add`` does."""
    if total.count >= MAX_UPDATES:
        text = f"the round has {total.count} updates, and its sum can hold no more"
        raise ProtocolError(Code.OUT_OF_RANGE, text)
    check(largest, weight)
    times = multiplier(weight, factor)
    bound = float(largest) * times
    finest = finest_grid(bound)
    room = ldexp(1.0, finest + 52) - total.whole.get(finest, 0.0)
    is_whole = bound < min(room, ldexp(1.0, finest + 51))
    return _Begun(times, bound, [finest] if is_whole else _grids(bound, finest), is_whole)


def _end(total: Sum, weight: int, begun: _Begun) -> None:
    """Count an update whose elements are added."""
    total.weight += weight
    total.count += 1
    if begun.is_whole:
        (finest,) = begun.grids
        total.whole[finest] = total.whole.get(finest, 0.0) + begun.bound


def add_many(
    total: Sum,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: NDArray[np.float64],
    factors: NDArray[np.float64] | None = None,
) -> None:
    """Add n updates that have passed ``check``. The mean is the same as by ``add``, to the last
    bit.

    ``parts`` are float32 arrays of shape (rows, P), n rows together. ``weights`` are int64, (n,).
    ``largest`` are the largest magnitudes of the updates' elements, float64, (n,), as for ``add``.
    ``factors`` are float64, (n,); None: all are 1. For small models this costs a fraction of n
    calls of ``add``. Raises ProtocolError (out-of-range: too many updates) and leaves ``total`` as
    it was."""
    count = sum(map(len, parts))
    if total.count + count > MAX_UPDATES:
        text = f"the round has {total.count + count} updates; its sum can hold {MAX_UPDATES}"
        raise ProtocolError(Code.OUT_OF_RANGE, text)
    rows = max(1, min(count, BLOCK // max(1, total.size)))
    times = multipliers(weights, factors)
    bounds = largest * times
    finest = finest_grids(bounds)
    ends = np.unique(finest).tolist()  # usually one
    workspace = np.empty((2, rows, min(total.size, BLOCK)))
    done = 0
    for part in parts:
        for start in range(0, len(part), rows):
            updates = part[start : start + rows]
            here = slice(done, done + len(updates))
            done += len(updates)
            if len(ends) == 1:
                _add_rows(total, updates, times[here], bounds[here], ends[0], workspace)
                continue
            for end in ends:
                rows_of = finest[here] == end
                if rows_of.any():
                    columns = times[here][rows_of], bounds[here][rows_of]
                    _add_rows(total, updates[rows_of], *columns, end, workspace)
    total.weight += int(weights.sum())
    total.count += count


def _add_rows(
    total: Sum,
    updates: NDArray[np.float32],
    times: NDArray[np.float64],
    bounds: NDArray[np.float64],
    finest: int,
    workspace: NDArray[np.float64],
) -> None:
    """Add the elements of updates that end at the same grid, which fit into the workspace by
    blocks."""
    # The sum of small updates is cut, instead of each of them: their parts add up to the same.
    small = bounds.max() < ldexp(1.0, finest + 51) and bounds.sum() < ldexp(1.0, finest + 52)
    grids = [finest + STEP, finest] if small else _grids(float(bounds.max()), finest)
    bins, ones = [total.bin_of(exponent) for exponent in grids], np.ones(len(updates))
    weight: Any = times[:, None]
    if times.min() == times.max():  # a number takes a third of the time of a column
        weight = times[0]
    for place in range(0, total.size, BLOCK):
        block = updates[:, place : place + BLOCK]
        t, cut = (array[: block.shape[0], : block.shape[1]] for array in workspace)
        here = [into[place : place + BLOCK] for into in bins]
        _multiply(block, weight, t)
        # Multiples of one grid are exact in whatever order they are added: a product with ones
        # is the quickest way.
        if small:
            together = ones @ _round(t, finest, t)
            found = _split(together, np.empty_like(together), grids)
        else:
            found = (ones @ part for part in _split(t, cut, grids))
        for into, part in zip(here, found, strict=True):
            np.add(into, part, out=into)


def finest_grid(bound: float) -> int:
    """Return the exponent of the grid at which an update with this largest product ends. A smaller
    update ends at the same grid or a finer one, unless it is all zeros."""
    return _ENDS[bisect_right(_LEAST, bound)] if bound else USUAL


def finest_grids(bounds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the exponents of the grids at which updates with these largest products end, (n,)."""
    ends = np.array(_ENDS)[np.searchsorted(_LEAST, bounds, side="right")]
    ends[bounds == 0] = USUAL
    return ends


def _grids(bound: float, finest: int) -> list[int]:
    """Return the exponents of the grids that products up to ``bound`` have parts in, the coarsest
    first."""
    return [at for at in GRIDS if at == finest or (at > finest and bound > ldexp(1.0, at - 1))]


def _multiply(block: Floats, weight: Any, t: Floats) -> None:
    """Write the products into ``t``."""
    np.copyto(t, block)  # then multiply, in float64; in one call it costs more
    np.multiply(t, weight, out=t)


def _round(t: Floats, exponent: int, into: Floats) -> Floats:
    """Return ``into``, with ``t`` rounded to multiples of the grid of this exponent."""
    rounding = ldexp(1.5, 52 + exponent)
    np.add(t, rounding, out=into)
    return np.subtract(into, rounding, out=into)


def _split(t: Floats, cut: Floats, grids: Sequence[int]) -> Iterator[Floats]:
    """Yield the parts of ``t`` that are multiples of these grids, the coarsest first: in the memory
    of ``cut``, the last one in that of ``t``."""
    for exponent in grids[:-1]:
        yield _round(t, exponent, cut)
        np.subtract(t, cut, out=t)
    yield _round(t, grids[-1], t)


def mean(total: Sum) -> NDArray[np.float64]:
    """Return the weighted mean of the updates, float64, shape (P,): ``add_up`` divided by the sum
    of weights.

    With factors s_i it is sum(s_i * w_i * x_i) / sum(w_i): a stale update moves the mean less, and
    does not move the others more.

    Raises ValueError if there are none.
    """
    if not total.count:
        raise ValueError("the mean of no updates was asked for; add one first")
    result = add_up(total)
    result /= total.weight
    return result


def add_up(total: Sum) -> NDArray[np.float64]:
    """Return the sum of the products, float64, shape (P,), in new memory: zeros for no updates.

    Usually there are two bins, the usual one and the next, and one rounding. With others the order
    of the updates could show in the roundings, as it may have decided which bin holds what. So all
    is carried to the coarsest bins first: then each bin but the first is within half of the next
    coarser grid, which it can be in one way only, and the error of the additions, the finest bin
    first, is within a last bit of the result."""
    if total.bins.keys() <= {USUAL + STEP, USUAL}:
        result = np.zeros(total.size)
        for held in total.bins.values():
            result += held
        return result
    result = np.empty(total.size)
    grids = range(GRIDS[0], min(total.bins) - 1, -STEP)
    for place in range(0, total.size, BLOCK):
        here = slice(place, min(place + BLOCK, total.size))
        digits = np.zeros((len(grids), here.stop - place))
        for digit, exponent in zip(digits, grids, strict=True):
            if exponent in total.bins:
                digit[:] = total.bins[exponent][here]
        for row in range(len(grids) - 1, 0, -1):
            coarser = grids[row - 1]
            carry = np.ldexp(np.floor(np.ldexp(digits[row], -coarser) + 0.5), coarser)
            digits[row] -= carry
            digits[row - 1] += carry
        result[here] = digits[-1]
        for digit in digits[-2::-1]:
            result[here] += digit
    return result


def to_tensors(total: Sum) -> dict[str, NDArray[np.generic]]:
    """Return the sum as named flat arrays. They share ``total``'s memory: write them before the
    next ``add``."""
    numbers = {"size": total.size, "weight": total.weight, "count": total.count}
    return {
        **{name: np.array([number], np.int64) for name, number in numbers.items()},
        **{f"{BIN}{exponent}": held for exponent, held in sorted(total.bins.items())},
    }


BIN = "bin 2^"
"""The names of the bins' tensors begin with this; the grid's exponent follows."""


FIRST_VERSION = {"hi": f"{BIN}-8", "lo": f"{BIN}-44", "weight": "weight", "count": "count"}
"""What the first version called the tensors of its sum, in their order -> their names now. It had
two of today's grids."""


def first_version_tensors(size: int) -> dict[str, NDArray[np.generic]]:
    """Return arrays with the names, shapes and dtypes that a sum of the first version was saved
    with, for a model of ``size`` elements. Their values mean nothing."""
    one = np.empty(1, np.int64)
    return {"hi": np.empty(size), "lo": np.empty(size), "weight": one, "count": one}


def from_tensors(tensors: Mapping[str, NDArray[np.generic]]) -> Sum:
    """Return the sum that ``to_tensors`` gave, to the last bit, in memory of its own. A sum that
    the first version saved (``first_version_tensors``) is taken too.

    Raises ValueError if the arrays are not those of a sum.
    """
    if tensors.keys() == FIRST_VERSION.keys():
        elements = np.array([tensors["hi"].size], np.int64)
        tensors = {FIRST_VERSION[name]: tensor for name, tensor in tensors.items()}
        tensors["size"] = elements
    expected: dict[str, Any] = {"size": np.int64, "weight": np.int64, "count": np.int64}
    bins = {f"{BIN}{exponent}": exponent for exponent in GRIDS}
    expected |= {name: np.float64 for name in tensors if name in bins}
    found = {name: (array.dtype, array.ndim) for name, array in tensors.items()}
    if found != {name: (np.dtype(dtype), 1) for name, dtype in expected.items()}:
        wanted = f"size, weight, count and {BIN}..., in 64 bits"
        raise ValueError(f"a saved sum has the flat arrays {wanted}; these are {found}")
    if any(tensors[name].shape != (1,) for name in ("size", "weight", "count")):
        raise ValueError("the arrays of the saved sum have lengths that do not fit together")
    size, weight, count = (int(tensors[name][0]) for name in ("size", "weight", "count"))
    total = Sum(size, weight=weight, count=count)
    for name in expected.keys() & bins.keys():
        held = tensors[name].astype(np.float64)
        if held.shape != (size,):
            raise ValueError("the arrays of the saved sum have lengths that do not fit together")
        total.bins[bins[name]] = held
        total.whole[bins[name]] = float(np.abs(held).max(initial=0.0))
    if not 0 <= count <= MAX_UPDATES or not count <= weight <= count * MAX_WEIGHT:
        text = f"the saved sum says {count} updates with a weight of {weight}: it is damaged"
        raise ValueError(text)
    return total
