"""Updates as whole numbers that are added modulo 2^32 or 2^24, and their sum as floats again.

An update x of L2 norm at most C is written as P numbers of q bits: u = round((x + C) / step) with
step = 2 C / (2^q - 1), rounded up or down at random so that the expectation is exact (stochastic
rounding). n such numbers add up to less than 2^32 as long as n (2^q - 1) < 2^32, so the sum modulo
2^32 is the sum. Whoever has the sum of n updates subtracts n C.

Numbers of 12 bits or fewer are added modulo 2^24, and travel in 3 bytes. 2^24 divides 2^32: masks
are words of 32 bits for both, and whoever has a sum modulo 2^32 keeps its lower 24 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.vector import Vector

MODULUS_BITS = 32
"""Of the sums of masks, and of numbers of more than 12 bits."""
SHORT_MODULUS_BITS = 24
SHORT_BITS = 12
"""The most bits of an element that is added modulo 2^24."""
BITS = (20, 18, 16)
"""How many bits an element has by default, the finest first: 20 for up to 4,096 updates."""
PART_BITS = 16
"""Of the lower words of a computation's sums (``secure/whole_words.py``): ``bits`` of their
tasks."""
Words = NDArray[np.uint32]
_SLAB = 2**15
"""Elements whose squares are added at a time: their sum is below 2^63, as each is below 2^48."""


def modulus_bits(bits: int) -> int:
    """Return m, where elements of this many bits are added modulo 2^m: 24 or 32."""
    return SHORT_MODULUS_BITS if bits <= SHORT_BITS else MODULUS_BITS


def most_updates(bits: int) -> int:
    """Return how many updates of elements of this many bits can be added."""
    return int((2 ** modulus_bits(bits) - 1) // (2**bits - 1))


def bits_for(updates: int) -> int:
    """Return the most bits with which this many updates can be added. Raises ValueError where
    there are too many."""
    for bits in BITS:
        if updates <= most_updates(bits):
            return bits
    raise ValueError(
        f"{updates} updates were given; at most {most_updates(BITS[-1])} can be added modulo "
        f"2^{MODULUS_BITS}"
    )


def to_words(update: Vector, bound: float, bits: int, fractions: NDArray[np.float64]) -> Words:
    """Return an update as whole numbers below 2^bits: uint32, shape (P,).

    update: float32, shape (P,), no element above ``bound`` in magnitude. bound: C, above 0.
    fractions: uniform in [0, 1), shape (P,), which decide the rounding. Raises ValueError where an
    element is not finite, or beyond the bound.
    """
    largest = float(np.abs(update).max(initial=0.0))
    if not largest <= bound:
        raise ValueError(f"an element of magnitude {largest:g} was given; the bound is {bound:g}")
    most = 2**bits - 1
    scaled = (update.astype(np.float64) + bound) * (most / (2 * bound))
    words = np.floor(scaled + fractions)
    found: Words = np.minimum(words, most).astype(np.uint32)
    return found


def excess_of(words: Words, bits: int) -> int:
    """Return how far an update's words are beyond the bound: the squared L2 norm of the vector that
    they stand for, less the bound's square, in units of (bound / (2^bits - 1))^2.

    Exact. 0 or less: the vector is within the bound. Rounding may take it beyond. ``words``: of the
    update's elements, without the weight.
    """
    most = 2**bits - 1
    total = 0
    for start in range(0, len(words), _SLAB):
        part = 2 * words[start : start + _SLAB].astype(np.int64) - most
        total += int(part @ part)
    squared: int = most**2
    return total - squared


def sum_of(words: Words, updates: int, bound: float, bits: int) -> NDArray[np.float64]:
    """Return the sum of updates from the sum of their words modulo 2^32: float64, shape (P,).
    ``updates``: how many. Raises ValueError where the words cannot be such a sum."""
    words = _remainders(words, bits)
    most = updates * (2**bits - 1)
    if updates > most_updates(bits) or (words.size and int(words.max()) > most):
        raise ValueError(
            f"an element of the sum of {updates} updates of {bits} bits is {int(words.max())}; at "
            f"most {most} was expected. A mask was not taken off"
        )
    # Whole numbers as long as possible: a sum is rounded once, where it is multiplied. The noise of
    # differential privacy allows for no more (release.py of the coordinator).
    total: NDArray[np.float64] = (2 * words.astype(np.int64) - most) * (bound / (2**bits - 1))
    return total


class WeightedSum(NamedTuple):
    """The sum of updates, and of their weights."""

    total: NDArray[np.float64]
    """Shape (P,): each update counts as it was written, times its share of the largest weight."""
    weight: float
    """The sum of those shares, above 0: the weighted mean is ``total / weight``."""


def weighted_words(
    update: Vector, share: float, bound: float, bits: int, fractions: NDArray[np.float64]
) -> Words:
    """Return an update and, last, its weight, as whole numbers below 2^bits: uint32, (P + 1,).

    update: float32, (P,), as it counts: clipped to ``bound`` (L2), then times ``share`` and what
    its staleness leaves of it. share: its weight as a share of the largest one, above 0 and at most
    1; that is written without a sign, so that a share of 1 is always 2^bits - 1. fractions: (P +
    1,), as for ``to_words``. Raises ValueError as that does, and for another share.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a weight's share of {share} was given; expected above 0 and at most 1")
    most = 2**bits - 1
    words = np.empty(len(update) + 1, np.uint32)
    words[:-1] = to_words(update, bound, bits, fractions[:-1])
    words[-1] = min(most, int(share * most + fractions[-1]))
    return words


def weighted_sum(
    words: Words, updates: int, bound: float, bits: int, *, equal: bool = False
) -> WeightedSum:
    """Return what ``updates`` updates add up to, from the sum of their ``weighted_words`` modulo
    2^32, (P + 1,). ``equal``: all have a share of 1.

    Raises ValueError where the words can be no such sum: most wrong masks end here. If all updates
    were as long as ``bound`` allows, they would add up to bound * weight; each may be rounded by a
    step, and its weight by half of one.
    """
    most, words = 2**bits - 1, _remainders(words, bits)
    if updates < 1:
        raise ValueError("the sum of no updates was asked for; add one first")
    total = sum_of(words[:-1], updates, bound, bits)
    weight = int(words[-1]) / most
    possible = int(words[-1]) == updates * most if equal else 0 < weight <= updates
    if not possible:
        wanted = f"{updates}" if equal else f"above 0 and at most {updates}"
        raise ValueError(
            f"the weights of {updates} updates add up to {weight:g} shares; expected {wanted}. A "
            "mask was not taken off"
        )
    largest = float(np.abs(total).max(initial=0.0))
    allowed = bound * weight + 1.5 * updates * 2 * bound / most
    if largest > allowed * (1 + 1e-9):
        raise ValueError(
            f"an element of the sum is {largest:g}; updates of these weights add up to at most "
            f"{allowed:g}. A mask was not taken off, or a device did not clip its update"
        )
    return WeightedSum(total, weight)


def _remainders(words: Words, bits: int) -> Words:
    """Return sums modulo 2^32 modulo what elements of this many bits are added."""
    width = modulus_bits(bits)
    return words if width == MODULUS_BITS else words & np.uint32(2**width - 1)
