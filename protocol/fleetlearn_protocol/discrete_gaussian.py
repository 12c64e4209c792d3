"""Gaussian noise in whole numbers, a pure function of a secret: what differential privacy adds.

A number is n = rint(Y), Y normal with standard deviation sigma: the discrete normal distribution
P[n] = Phi((n + 1/2) / sigma) - Phi((n - 1/2) / sigma) (Roy, "The discrete normal distribution",
Communications in Statistics 32(10), 2003). For a whole number k, k + rint(Y) is rint(k + Y). So who
adds n to whole numbers releases what the Gaussian mechanism would, rounded afterwards: all that is
proved of that mechanism holds, to the last digit of epsilon. (The other distribution that is called
so, with P[n] proportional to exp(-n^2 / (2 sigma^2)), has no such proof for vectors: Canonne,
Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), arXiv 2004.00010, bound
its concentrated privacy loss. Their lesson is kept: no floating point decides about a sample.)

How one is drawn, by rejection. |Y| is cut into cells of equal width. A cell is proposed by a table
of 2^15 entries, where it has about as many as the normal density at its near end asks for. Then a
place in it is drawn, evenly, and accepted with the probability density / proposal, which is nearly
1. For each cell a bound below that probability is known: a random integer below this bound accepts
(97 %) without the exponential function. For the others it is computed in float64, whose error is
far below 2^-40 of its value. Where the comparison is closer than that, more random bits and decimal
arithmetic decide, with as many digits as it takes. So no sample depends on a rounding. The last
cell is wide and ends the distribution beyond 38 sigma: see ``TAIL``.

The random bits are SHAKE-256's. Who knows the secret knows the noise.
"""

from __future__ import annotations

import hashlib
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from math import ceil, floor, frexp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

LEAST, MOST = 2.0**-4, 2.0**45
"""Smallest and largest standard deviation."""
TAIL = 2.0**-1000
"""Upper bound of the total variation distance of one number from the ideal law: the probability of
|Y| > 38 sigma, at most 2 exp(-722), which is below 2^-1040. Nothing else is approximated. A vector
of P numbers is within P * TAIL of the ideal one. A mechanism that is (epsilon, delta)-private with
ideal noise is (epsilon, delta + (1 + exp(epsilon)) * P * TAIL)-private with this."""

INDEX_BITS = 15
"""Bits of a table's index."""
CELL_BITS = 6
"""A cell is 2^-7 to 2^-6 of sigma wide, or 1."""
INNER = 6
"""Standard deviations that cells of equal width cover; one wide cell covers the rest."""
WIDE_BITS = 12
"""The last cell is 2^12 times as wide as the others."""
CHUNK = 2**16
"""Numbers that follow from one stream of random bits, so that the temporaries stay in the
processor's cache."""
CLOSE = 2.0**-40
"""Comparisons of float64 that are closer than this, as a fraction, do not count. Their error is
below 2^-40: the exponent, up to 2^10, is known to 2^-51 of itself. With a larger one the chance is
so small that the absolute part of ``_accept``'s tolerance is what counts."""
DIGITS = 50
"""Decimal digits of the densities in a table."""
MARGIN = Decimal("1e-9")
"""Bounds on densities are this much wider than they were computed, as a fraction: far more than the
error of their computation, below 10^-40."""


class Cells(NamedTuple):
    """The proposal for one standard deviation. |Y| is counted in halves: |Y| = (h + f) / 2, with a
    whole number h and 0 <= f < 1, is rounded to (h + 1) // 2."""

    sigma: float
    width_bits: int
    """A cell is 2^width_bits halves wide."""
    table: NDArray[np.uint16]
    """Index -> cell, (2^15,)."""
    counts: NDArray[np.float64]
    """Cell -> in how many entries of the table it is, (J + 1,)."""
    accepted: NDArray[np.int64]
    """Cell -> the bound below which a random integer of ``fine_bits`` bits accepts, (J + 1,)."""
    scale: Decimal
    """Cell j's places are accepted with the probability scale * exp(-Y^2 / (2 sigma^2)) / count,
    the last cell's with 2^12 times that."""

    @property
    def fine_bits(self) -> int:
        """Bits of a word that are neither the sign, nor the index, nor the place in a cell."""
        return 63 - INDEX_BITS - self.width_bits


@lru_cache(maxsize=8)
def cells_of(sigma: float) -> Cells:
    """Return the proposal for this standard deviation: the same on every machine, as only decimal
    arithmetic decides."""
    whole_bits = max(0, frexp(sigma)[1] - 1 - CELL_BITS)
    width = 2**whole_bits
    last = ceil(INNER * sigma / width)
    entries, fine = 2**INDEX_BITS, 2 ** (62 - INDEX_BITS - whole_bits)
    with localcontext(Context(prec=DIGITS)):
        # exp(-j^2 c) for j = 0 .. last, by multiplications alone: the quotient of two neighbours
        # is exp(-(2 j + 1) c), and that of two quotients exp(-2 c).
        c = Decimal(width) ** 2 / (2 * Decimal(sigma) ** 2)
        density, quotient = [Decimal(1)], (-c).exp()
        step = quotient * quotient
        for _ in range(last):
            density.append(density[-1] * quotient)
            quotient *= step
        least = [*density[1:], Decimal(0)]
        density[-1] *= 2**WIDE_BITS
        # Rounding up adds less than one entry for each cell.
        scale = (entries - last - 1) / sum(density) * (1 - MARGIN)
        counts = [ceil(scale * each * (1 + MARGIN)) for each in density]
        counts[0] += entries - sum(counts)
        bounds = [
            floor(scale * each / count * fine * (1 - MARGIN))
            for each, count in zip(least, counts, strict=True)
        ]
    return Cells(
        sigma,
        whole_bits + 1,
        np.repeat(np.arange(last + 1, dtype=np.uint16), counts),
        np.array(counts, np.float64),
        np.array(bounds, np.int64),
        scale,
    )


def sample(sigma: float, size: int, secret: bytes) -> NDArray[np.int64]:
    """Return ``size`` independent numbers rint(Y), Y normal with mean 0 and standard deviation
    ``sigma``, from 1/16 to 2^45: int64, (size,).

    They follow from ``secret`` alone: the first of them are the same whatever the size is. Two
    secrets give independent numbers. Raises ValueError where sigma is out of its range.
    """
    if not LEAST <= sigma <= MOST:
        text = f"a standard deviation of {sigma} grid steps was given; it takes {LEAST} to {MOST:g}"
        raise ValueError(text)
    cells = cells_of(float(sigma))
    found = np.empty(size, np.int64)
    for start in range(0, size, CHUNK):
        _fill(found[start : start + CHUNK], cells, secret, start // CHUNK)
    return found


def _fill(found: NDArray[np.int64], cells: Cells, secret: bytes, chunk: int) -> None:
    """Write a chunk of numbers. What is rejected is drawn once more, from another stream."""
    found[:], good = _propose(cells, _Stream(secret, chunk, 0), found.size)
    left, attempt = np.flatnonzero(~good), 0
    while left.size:
        attempt += 1
        found[left], good = _propose(cells, _Stream(secret, chunk, attempt), left.size)
        left = left[~good]


class _Stream:
    """The random bits of one attempt at a chunk."""

    def __init__(self, secret: bytes, chunk: int, attempt: int) -> None:
        self.secret, self.place = secret, (chunk, attempt)

    def bits(self, kind: int, row: int, count: int) -> bytes:
        """Return ``count`` bytes: of one kind and row, fewer are the beginning of more."""
        numbers = (*self.place, kind, row)
        place = b"".join(number.to_bytes(8, "little") for number in numbers)
        return hashlib.shake_256(b"fleetlearn noise" + place + self.secret).digest(count)

    def words(self, kind: int, *shape: int) -> Words:
        count = 8 * int(np.prod(shape))
        return np.frombuffer(self.bits(kind, 0, count), "<u8").reshape(shape)


def _propose(
    cells: Cells, stream: _Stream, size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return numbers, and which of them are accepted."""
    words = stream.words(0, size).view(np.int64)
    fine_bits = cells.fine_bits
    cell = cells.table[(words >> (63 - INDEX_BITS)) & (2**INDEX_BITS - 1)]
    halves = (words >> fine_bits) & (2**cells.width_bits - 1)
    halves += cell.astype(np.int64) << cells.width_bits
    fine = words & (2**fine_bits - 1)
    good = fine < cells.accepted[cell]
    slow = np.flatnonzero(~good)
    if slow.size:
        more = stream.words(1, slow.size, 3)
        wide = cell[slow] == cells.accepted.size - 1
        places = more[:, 2] >> np.uint64(64 - WIDE_BITS - cells.width_bits)
        first = np.int64(cells.accepted.size - 1) << cells.width_bits
        halves[slow] = np.where(wide, first + places.view(np.int64), halves[slow])
        good[slow] = _accept(cells, stream, cell[slow], halves[slow], fine[slow], more)
    halves += 1
    halves >>= 1
    sign = words >> 63  # 0 or -1
    halves ^= sign
    halves -= sign
    return halves, good


def _accept(
    cells: Cells,
    stream: _Stream,
    cell: NDArray[np.uint16],
    halves: NDArray[np.int64],
    fine: NDArray[np.int64],
    more: Words,
) -> NDArray[np.bool_]:
    """Return which places are accepted. ``more``: 64 more bits of ``fine``, and the first bits of
    what is behind ``halves``."""
    least = 2.0**-cells.fine_bits
    drawn = (fine + more[:, 0] * 2.0**-64) * least
    place = (halves + more[:, 1] * 2.0**-64) * (0.5 / cells.sigma)
    chance = np.exp(-0.5 * place * place) * (float(cells.scale) / cells.counts[cell])
    chance[cell == cells.accepted.size - 1] *= 2.0**WIDE_BITS
    good: NDArray[np.bool_] = drawn < chance
    for row in np.flatnonzero(np.abs(drawn - chance) <= chance * CLOSE + least * 2.0**-60).tolist():
        known = int(cell[row]), int(halves[row]), int(fine[row]), *map(int, more[row, :2])
        good[row] = _accept_exactly(cells, stream, row, *known)
    return good


def _accept_exactly(
    cells: Cells, stream: _Stream, row: int, cell: int, half: int, fine: int, u: int, v: int
) -> bool:
    """Return whether a place is accepted, by as many random bits and digits as that takes. ``u``,
    ``v``: the first 64 bits behind ``fine`` and behind ``half``."""
    wide = 2**WIDE_BITS if cell == cells.accepted.size - 1 else 1
    bits = 128
    while True:
        more = stream.bits(2, row, 16 * bits // 64)
        u_bits, v_bits = (
            (first << bits) + int.from_bytes(rest, "big")
            for first, rest in ((u, more[0::2]), (v, more[1::2]))
        )
        with localcontext(Context(prec=bits)):  # digits, more than enough
            unit = Decimal(2) ** (-64 - bits)
            drawn = (fine + u_bits * unit) / 2**cells.fine_bits
            place = (half + v_bits * unit) / 2
            density = (-place * place / (2 * Decimal(cells.sigma) ** 2)).exp()
            chance = cells.scale * wide * density / int(cells.counts[cell])
            # What is not drawn yet, and what is rounded, changes either by less than 2^-bits.
            if abs(drawn - chance) > Decimal(2) ** -bits:
                return bool(drawn < chance)
        bits *= 2
