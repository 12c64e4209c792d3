"""Edges of equally full bins, found by sums alone.

The coordinator sends boundaries for each column; devices count how many of their values lie
between them. It divides what is too full, joins what is not full enough, and asks again, until no
interval that can be divided has more than its share of the values. Boundaries are compared with
values of the table as they are, in float32, so that a value lies on the same side for everybody.

A float32's *key* is its place among all float32 in order, 0 for 0.0: dividing keys divides numbers
of any magnitude alike, without their range being known.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.vector import Vector

Keys = NDArray[np.int64]
MOST_KEY = 0x7F7FFFFF
"""The key of the largest finite float32. The smallest's is its negative."""
UNUSED = np.finfo(np.float32).max
"""What stands where there is no boundary. This largest float32 counts as infinity."""
MOST_COUNTED = 2**48
"""No count of values is larger: what is computed of counts fits into 64 bits."""
MAX_EXCHANGES = 8
"""After this many counts the edges are taken as they are."""


def keys_of(values: NDArray[np.float32]) -> Keys:
    """Return the keys of finite float32: int64, of the same shape. Both zeros have the key 0."""
    bits = np.ascontiguousarray(values, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def values_of(keys: Keys) -> Vector:
    """Return the float32 that have these keys, of the same shape."""
    bits = np.where(keys < 0, np.abs(keys) | 0x80000000, keys).astype(np.uint32)
    return bits.view(np.float32)


def boundaries_for(bins: int) -> int:
    """Return how many boundaries a count needs for the edges of this number of bins."""
    return 8 * bins


def first_boundaries(count: int) -> Vector:
    """Return boundaries that divide all float32 evenly by their keys: float32, (count,)."""
    places = np.linspace(-MOST_KEY, MOST_KEY, count + 2)[1:-1]
    return values_of(places.astype(np.int64))


def count_between(column: Vector, boundaries: Vector) -> NDArray[np.int64]:
    """Return how many values lie below the first boundary, from the first on and below the second,
    ..., from the last one on: int64, (boundaries + 1,). Missing values (NaN) are not counted."""
    there = column[~np.isnan(column)]
    places = np.searchsorted(boundaries, there, side="right")
    return np.bincount(places, minlength=len(boundaries) + 1)


def refine(boundaries: Vector, counts: NDArray[np.int64], bins: int) -> Vector | None:
    """Return the boundaries of the next count, float32, of the same shape; None where no interval
    has more than one bin's share of the values, or none that has can be divided.

    boundaries: float32 (C,) in ascending order. counts: int64 (C + 1,). bins: at least 2.
    """
    lows, highs, counts = _joined(*_intervals(boundaries, counts), int(counts.sum()) // bins)
    heavy = (counts * bins > counts.sum()) & (highs - lows > 1)
    if not heavy.any():
        return None
    spare = len(boundaries) - (len(counts) - 1)
    more = np.where(heavy, counts, 0) * spare // counts[heavy].sum()
    parts = np.minimum(more + 1, highs - lows)
    keys = [
        low + (high - low) * np.arange(1, count + 1) // count
        for low, high, count in zip(lows, highs, parts, strict=True)
    ]
    return _padded(np.concatenate(keys)[:-1], len(boundaries))


def equal_edges(boundaries: Vector, counts: NDArray[np.int64], bins: int) -> Vector:
    """Return the edges of at most ``bins`` bins that hold equally many values, as far as the
    boundaries allow: float32, (bins - 1,), in ascending order, UNUSED where there are fewer.

    A value below the first edge is in bin 0, one from the last edge on in the last bin. An edge
    beside an interval without values lies in the middle of that interval.
    """
    lows, highs, counts = _intervals(boundaries, counts)
    filled = np.flatnonzero(counts)
    edges: list[np.float32] = []
    left, inside = int(counts.sum()), 0
    for place, following in itertools.pairwise(filled):
        inside += int(counts[place])
        # Close the bin where it is nearer to its share now than with the next interval.
        share = left / (bins - len(edges))
        if inside + counts[following] / 2 >= share and len(edges) < bins - 1:
            below, above = values_of(np.array([highs[place], lows[following]]))
            middle = np.float32((float(below) + float(above)) / 2)
            edges.append(max(below, middle))
            left, inside = left - inside, 0
    return _padded_values(np.array(edges, np.float32), bins - 1)


def _intervals(
    boundaries: Vector, counts: NDArray[np.int64]
) -> tuple[Keys, Keys, NDArray[np.int64]]:
    """Return each interval's first key, the key where the next one begins, and its count. Raises
    ValueError where they can be no counts: what comes of negative ones has no bound."""
    if counts.min() < 0 or counts.max() > MOST_COUNTED:
        wrong = counts[(counts < 0) | (counts > MOST_COUNTED)][0]
        raise ValueError(
            f"{wrong} values of a column were counted between two boundaries; expected 0 to "
            f"{MOST_COUNTED}"
        )
    inner = keys_of(boundaries[boundaries < UNUSED])
    limits = np.concatenate([[-MOST_KEY], inner, [MOST_KEY]])
    counted = counts[: len(limits) - 1].copy()
    counted[-1] += counts[len(limits) - 1 :].sum()  # infinity, which lies above UNUSED too
    return limits[:-1], limits[1:], counted


def _joined(
    lows: Keys, highs: Keys, counts: NDArray[np.int64], most: int
) -> tuple[Keys, Keys, NDArray[np.int64]]:
    """Join neighbours that together have at most ``most`` values; what is empty between the joined
    ones is a separate interval."""
    filled: list[list[int]] = []
    for place in np.flatnonzero(counts).tolist():
        if filled and filled[-1][2] + counts[place] <= most:
            filled[-1][1] = int(highs[place])
            filled[-1][2] += int(counts[place])
        else:
            filled.append([int(lows[place]), int(highs[place]), int(counts[place])])
    joined: list[tuple[int, int, int]] = []
    end = int(lows[0])
    for low, high, count in filled:
        if low > end:
            joined.append((end, low, 0))
        joined.append((low, high, count))
        end = high
    if int(highs[-1]) > end:
        joined.append((end, int(highs[-1]), 0))
    table = np.array(joined, np.int64)
    return table[:, 0], table[:, 1], table[:, 2]


def _padded(keys: Keys, size: int) -> Vector:
    return _padded_values(values_of(keys), size)


def _padded_values(values: Vector, size: int) -> Vector:
    found: Vector = np.full(size, UNUSED, np.float32)
    found[: len(values)] = values
    return found


def refine_range(
    boundaries: Vector, counts: NDArray[np.int64]
) -> tuple[Vector | None, float, float]:
    """Return the boundaries of the next count for the least and the greatest value, None where both
    are known, and the least and the greatest value as far as they are known.

    boundaries: float32 (C,) in ascending order. counts: int64 (C + 1,). Without any value both are
    0.
    """
    lows, highs, counts = _intervals(boundaries, counts)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return None, 0.0, 0.0
    ends = sorted({int(filled[0]), int(filled[-1])})
    low, high = values_of(np.array([lows[ends[0]], highs[ends[-1]] - 1]))
    if all(highs[end] - lows[end] == 1 for end in ends):
        return None, float(low), float(high)
    parts = len(boundaries) // len(ends) - 1
    keys = [lows[end] + (highs[end] - lows[end]) * np.arange(parts + 1) // parts for end in ends]
    found = np.unique(np.clip(np.concatenate(keys), 1 - MOST_KEY, MOST_KEY - 1))
    return _padded(found, len(boundaries)), float(low), float(high)
