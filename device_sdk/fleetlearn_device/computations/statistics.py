"""Federated statistics on a device: counts and whole-number sums over some rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.settings import BINS, CategoryColumn, NumberColumn, Statistics
from fleetlearn_protocol.computations.statistics import (
    BUCKETS,
    HASHES,
    SQUARE_BITS,
    bucket_of,
    edges_of,
    key_of,
    middle_of,
    part_width,
    quantiles_of,
    state_layout,
    sums_layout,
    unit_of,
)
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.computations.columns import Columns


def compute(state: Vector, columns: Columns, settings: Statistics) -> Sums:
    """Return what the rows add up to, int64, shape (S,). columns: a float64 array, shape (n,), of
    each column of numbers, NaN where a value is missing; uint8, (n, longest), of each column of
    categories."""
    known = state_layout(settings).unpack(state)
    measures = bool(known["measures"])
    found: dict[str, Any] = {}
    for i, number in enumerate(settings.numbers):
        values = columns[number.name]
        found["rows"] = len(values)
        sums = _numbers(values, number, known, f"number{i}", measures=measures)
        found |= {f"number{i}.{name}": value for name, value in sums.items()}
    for i, category in enumerate(settings.categories):
        values = columns[category.name]
        found["rows"] = len(values)
        seed = None if measures or category.values else int(known["rounds"])
        sums = _categories(values, category, known[f"category{i}.words"], seed)
        found |= {f"category{i}.{name}": value for name, value in sums.items()}
    return sums_layout(settings).pack(found)


def _numbers(
    values: NDArray[np.float64],
    column: NumberColumn,
    known: dict[str, NDArray[Any]],
    prefix: str,
    *,
    measures: bool,
) -> dict[str, Any]:
    """Return the sums of a column of numbers, (n,)."""
    there = values[~np.isnan(values)]
    low, high = known[f"{prefix}.range"].tolist()
    asked = len(quantiles_of(column))
    parts = np.zeros((asked, BINS + 2), np.int64)
    keys = key_of(there)
    for row, (first, last) in enumerate(known[f"{prefix}.between"].tolist()):
        parts[row] = _parts(keys, first, last)
    found: dict[str, Any] = {"parts": parts}
    below = above = 0
    if measures or column.range is not None:  # before, a range that is found is not known
        below, above = int((there < low).sum()), int((there > high).sum())
    found["counts"] = np.array([len(values) - len(there), below, above])
    if not measures:
        return found
    inside = np.clip(there, low, high)
    # The middle first, so that a unit is as small as the range allows.
    scaled = np.ldexp(inside - middle_of(low, high), -unit_of(low, high))
    distances = np.rint(scaled).astype(np.int64)
    squares = distances * distances
    lower = squares & np.int64(2**SQUARE_BITS - 1)
    found["moments"] = np.array([distances.sum(), (squares >> SQUARE_BITS).sum(), lower.sum()])
    if column.bins:
        edges = edges_of(column, low, high)
        found["histogram"] = np.histogram(there, edges)[0].astype(np.int64)
    return found


def _parts(keys: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
    """Return how many keys are below ``first``, in each part of first ... last, and above it."""
    inside = keys[(keys >= first) & (keys <= last)]
    # As unsigned numbers: the distance of two keys may be more than int64 holds.
    distances = inside.view(np.uint64) - np.array(first, np.int64).view(np.uint64)
    places = (distances // np.uint64(part_width(first, last))).astype(np.int64)
    counted = np.bincount(places, minlength=BINS)
    return np.array([(keys < first).sum(), *counted, (keys > last).sum()], np.int64)


def _categories(
    values: NDArray[np.uint8], column: CategoryColumn, words: NDArray[np.int64], seed: int | None
) -> dict[str, Any]:
    """Return the sums of a column of categories. values: (n, longest). words: the values that are
    counted, (slots, longest / 8). seed: of the sketch; None: there is none."""
    # As one number or one string to a row, which sorts quickly.
    rows = np.ascontiguousarray(values).view(f"S{column.longest}").reshape(-1)
    different, counts = np.unique(rows, return_counts=True)
    there = different != b""
    missing = int(counts[~there].sum())
    different, counts = different[there], counts[there]
    wanted = np.ascontiguousarray(words).view(f"S{column.longest}").reshape(-1)
    found: dict[str, Any] = {"missing": missing}
    own = dict(zip(different.tolist(), counts.tolist(), strict=True))
    found["counts"] = np.array([own.get(value, 0) for value in wanted.tolist()], np.int64)
    if seed is not None:
        found["sketch"] = _sketch(different, counts, column.longest, seed)
    return found


def _sketch(
    different: NDArray[Any], counts: NDArray[np.int64], longest: int, seed: int
) -> NDArray[np.int64]:
    """Return the sketch of these values, each with its number of rows: int64, (HASHES, BUCKETS, 1 +
    8 * longest)."""
    sketch = np.zeros((HASHES, BUCKETS, 1 + 8 * longest), np.int64)
    if not len(different):
        return sketch
    content = np.ascontiguousarray(different).view(np.uint8).reshape(-1, longest)
    bits = np.unpackbits(content, axis=1).astype(np.int64)
    rows = np.concatenate([np.ones((len(bits), 1), np.int64), bits], axis=1) * counts[:, None]
    for hashed in range(HASHES):
        np.add.at(sketch[hashed], bucket_of(content, seed * HASHES + hashed), rows)
    return sketch
