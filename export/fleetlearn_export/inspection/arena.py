"""ONNX Runtime's arena of CPU memory: how many bytes it touches for a sequence of allocations.

The arena takes regions from the system, each larger than the one before, and cuts pieces from them. It does not move
anything, so there are gaps. A piece is cut if the rest is large enough.
"""

from __future__ import annotations

from collections.abc import Iterable

ROUNDING = 256
"""Pieces are multiples of this many bytes."""
FIRST_REGION = 2**20
LARGEST_STEP = 2**30
"""Regions double up to this many bytes."""
DEAD = 2**20
"""A piece that is this much larger than the result is cut, as is one of twice the result's bytes.

The device's arena cuts from 2**16 bytes on. A real one has more gaps than one that is simulated so: for a step of
MobileNetV2 with results computed again 749 MiB were measured, and estimated 629 with 2**16, 712 with 2**20. Without
any computed again 1,013 were measured, and estimated 987 and 1,008."""

Piece = tuple[int, int]
"""The number of a region, and where the piece begins in it."""


def rounded(size: int) -> int:
    """Return the bytes of a piece for a result of ``size`` bytes."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


def arena_bytes(allocations: Iterable[tuple[str, int]]) -> int:
    """Return the bytes that the arena touches: (name, size) allocates, (name, 0) frees. As BFCArena in ONNX Runtime."""
    free: dict[Piece, int] = {}
    used: dict[str, tuple[Piece, int]] = {}
    touched: list[int] = []
    next_region = FIRST_REGION
    for name, size in allocations:
        if not size:
            _give_back(free, *used.pop(name))
            continue
        size = rounded(size)
        fitting = [(found, piece) for piece, found in free.items() if found >= size]
        if not fitting:
            grown = size > next_region
            while size > next_region:
                next_region *= 2
            free[len(touched), 0] = next_region
            fitting = [(next_region, (len(touched), 0))]
            touched.append(0)
            if not grown:
                next_region = min(2 * next_region, LARGEST_STEP)
        found, piece = min(fitting)
        del free[piece]
        region, begin = piece
        touched[region] = max(touched[region], begin + size)
        if found >= 2 * size or found - size >= DEAD:
            free[region, begin + size] = found - size
            found = size
        used[name] = piece, found
    return sum(touched)


def _give_back(free: dict[Piece, int], piece: Piece, size: int) -> None:
    """Make the piece free, as one with the free pieces beside it."""
    region, begin = piece
    size += free.pop((region, begin + size), 0)
    before = next((row for row, length in free.items() if row == (region, begin - length)), None)
    if before:
        free[before] += size
    else:
        free[piece] = size
