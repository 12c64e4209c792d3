"""ONNX Runtime's arena of CPU memory: how many bytes it touches for a sequence of allocations.

The arena takes regions from the system, each larger than the one before, and cuts pieces from them.
It does not move anything, so there are gaps. A piece is cut if the rest is large enough. Nine steps
of torchvision's models at 224 x 224 touched what is computed here, within 2 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

ROUNDING = 256
"""Pieces are multiples of this many bytes."""
FIRST_REGION = 2**20
LARGEST_STEP = 2**30
"""Regions double up to this many bytes."""
UNUSED_IN_A_PIECE = 2**16
"""A piece that is this much larger than the result is cut, as is one of twice the result's bytes.
The device's runtime sets this number."""
BYTES_OF_A_HANDLE = 8
"""For each ROUNDING bytes of a region the arena holds a number: 1/32 of all regions, used or
not."""

Piece = tuple[int, int]
"""Where a piece begins: minus the number of its region, and the place in it. Linux puts each region
below the one before, and of equal pieces the arena takes the lowest."""


def rounded(size: int) -> int:
    """Return the bytes of a piece for a result of ``size`` bytes."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


def arena_bytes(allocations: Iterable[tuple[str, int]]) -> int:
    """Return the bytes that the arena touches: (name, size) allocates, (name, 0) frees. As BFCArena
    in ONNX Runtime."""
    free = _FreePieces()
    used: dict[str, tuple[Piece, int]] = {}
    regions, touched = list[int](), list[int]()
    next_region = FIRST_REGION
    for name, size in allocations:
        if not size:
            free.add(*used.pop(name))
            continue
        size = rounded(size)
        found = free.take(size)
        if found is None:
            grown = size > next_region
            while size > next_region:
                next_region *= 2
            found = (-len(regions), 0), next_region
            regions.append(next_region)
            touched.append(0)
            if not grown:
                next_region = min(2 * next_region, LARGEST_STEP)
        (region, begin), length = found
        touched[-region] = max(touched[-region], begin + size)
        if length >= 2 * size or length - size >= UNUSED_IN_A_PIECE:
            free.add((region, begin + size), length - size)
            length = size
        used[name] = (region, begin), length
    return sum(touched) + sum(regions) // ROUNDING * BYTES_OF_A_HANDLE


class _FreePieces:
    """The free pieces, by their sizes and by where they begin and end."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, Piece]] = []
        self._sizes: dict[Piece, int] = {}
        self._begins: dict[Piece, Piece] = {}
        """Where a piece ends -> where it begins."""

    def take(self, size: int) -> tuple[Piece, int] | None:
        """Remove the smallest piece of at least ``size`` bytes, and return it with its bytes."""
        smallest_fit = bisect_left(self._by_size, (size,))
        if smallest_fit == len(self._by_size):
            return None
        length, piece = self._by_size[smallest_fit]
        self._remove(piece)
        return piece, length

    def add(self, piece: Piece, size: int) -> None:
        """Make the piece free, as one with the free pieces beside it."""
        region, begin = piece
        if (region, begin + size) in self._sizes:
            size += self._remove((region, begin + size))
        if piece in self._begins:
            piece = self._begins[piece]
            size += self._remove(piece)
        self._sizes[piece] = size
        self._begins[region, piece[1] + size] = piece
        insort(self._by_size, (size, piece))

    def _remove(self, piece: Piece) -> int:
        size = self._sizes.pop(piece)
        del self._begins[piece[0], piece[1] + size]
        del self._by_size[bisect_left(self._by_size, (size, piece))]
        return size
