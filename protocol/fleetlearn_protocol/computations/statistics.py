"""Federated statistics: what devices are asked in each round, and where state and sums have it.

Rounds refine what is not known yet, and the last one measures. A quantile lies between two
doubles; each round counts the rows in ``BINS`` parts of what is between them, so that a round
shrinks it by that factor. Doubles are divided by their order as keys, not by their distance, so
that no range need be known. The most frequent values of a column are found by a sketch: each value
falls into a bucket by its hash, and a bucket has the number of its rows and, for each bit of the
values, the number of rows that have the bit; where one value has more than half of a bucket's rows,
these numbers spell it (Cormode and Muthukrishnan, "What's Hot and What's Not: Tracking Most
Frequent Items Dynamically", 2003, combinatorial group testing). The last round counts what was
found exactly.
"""

from __future__ import annotations

from math import frexp, isfinite, ldexp, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.computations.layout import Layout, StateField, SumsLayout
from fleetlearn_protocol.computations.private_sums import SumsGroup
from fleetlearn_protocol.computations.settings import (
    BINS,
    CategoryColumn,
    NumberColumn,
    Statistics,
)
from fleetlearn_protocol.splitmix64 import GAMMA, mix

HASHES, BUCKETS = 2, 128
"""Of a sketch."""
SKETCHED = 2
"""Rounds that sketch before one counts."""
UNIT_BITS = 30
"""A column's range is divided into at least 2^29 and at most 2^30 units, to which its values are
rounded before they are added up."""
SQUARE_BITS = 28
"""The square of a distance in units is added up in two parts: its lower bits, and the others."""


def key_of(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return whole numbers in the order of these doubles, int64, of the same shape: neighbouring
    doubles have neighbouring keys. -0 becomes 0; its own key, -1, is of nobody. NaN may be
    anything."""
    bits = (np.asarray(values, np.float64) + 0.0).view(np.int64)
    keys: NDArray[np.int64] = np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)
    return keys


def value_of(keys: NDArray[np.int64]) -> NDArray[np.float64]:
    """Undo ``key_of``."""
    bits = np.where(keys < 0, keys ^ np.int64(2**63 - 1), keys)
    return np.ascontiguousarray(bits, np.int64).view(np.float64)


LOWEST = int(key_of(np.array([-np.inf]))[0])
HIGHEST = int(key_of(np.array([np.inf]))[0])


def part_width(low: int, high: int) -> int:
    """Return how many keys each of the ``BINS`` parts of low ... high has."""
    return -(-(high - low + 1) // BINS)


def quantiles_of(column: NumberColumn) -> tuple[float, ...]:
    """Return the quantiles that are refined: those that are asked for, and the minimum and the
    maximum where the range is to be found."""
    ends = () if column.range is not None else (0.0, 1.0)
    return (*column.quantiles, *(share for share in ends if share not in column.quantiles))


def middle_of(low: float, high: float) -> float:
    """Return the number that a column's values are measured from, before they are added up."""
    return low + (high - low) / 2


def unit_of(low: float, high: float) -> int:
    """Return e: a column with this range is added up in units of 2^e."""
    span = high - low
    return frexp(span)[1] - UNIT_BITS if span > 0 and isfinite(span) else -UNIT_BITS


def edges_of(column: NumberColumn, low: float, high: float) -> NDArray[np.float64]:
    """Return the edges of the column's histogram, float64, shape (bins + 1,)."""
    return np.linspace(low, high if high > low else low + 1.0, column.bins + 1)


def slots_of(column: CategoryColumn) -> int:
    """Return how many values of the column are counted at most."""
    return len(column.values) or 2 * column.top


def bucket_of(values: NDArray[np.uint8], seed: int) -> NDArray[np.int64]:
    """Return the bucket of each value, int64, shape (n,). values: uint8, (n, longest)."""
    words = np.ascontiguousarray(values).view("<u8").astype(np.uint64)
    state = np.full(len(values), seed + 1, np.uint64)  # arrays, which wrap around silently
    for column in range(words.shape[1]):
        state = mix((state ^ words[:, column]) + GAMMA)
    return (state % np.uint64(BUCKETS)).astype(np.int64)


def state_layout(settings: Statistics) -> Layout:
    """Return where the state has what. Its size does not change from round to round."""
    fields = [
        StateField("rounds", (), "int64"),  # that are done
        StateField("measures", (), "int64"),  # whether the next round is the one that measures
        StateField("devices", (), "int64"),  # of the last round
        StateField("rows", (), "int64"),  # of the last round
        StateField("done", (), "int64"),
        # With differential privacy the standard deviation of the noise of each scaled sum in the
        # last round, in rows; else 0.
        StateField("noise"),
    ]
    for i, number in enumerate(settings.numbers):
        asked = len(quantiles_of(number))
        fields += [
            # Of the last round: rows with a value missing, below the range, above it.
            StateField(f"number{i}.counts", (3,), "int64"),
            StateField(f"number{i}.range", (2,)),  # of mean, variance and histogram
            # The sum of distances from the range's middle, the upper and the lower part of their
            # squares' sum; in units.
            StateField(f"number{i}.moments", (3,), "int64"),
            StateField(
                f"number{i}.between", (asked, 2), "int64"
            ),  # keys of the least and the greatest
            StateField(f"number{i}.ranks", (asked, 2), "int64"),  # rows below it, and between
            StateField(f"number{i}.histogram", (number.bins,), "int64"),
        ]
    for i, category in enumerate(settings.categories):
        slots = slots_of(category)
        fields += [
            StateField(f"category{i}.missing", (), "int64"),
            StateField(f"category{i}.words", (slots, category.longest // 8), "int64"),  # the values
            StateField(f"category{i}.counts", (slots,), "int64"),
        ]
    return Layout(*fields)


def sums_layout(settings: Statistics) -> SumsLayout:
    """Return where a device's sums have what."""
    shapes: dict[str, tuple[int, ...]] = {"rows": ()}
    for i, number in enumerate(settings.numbers):
        shapes |= {
            f"number{i}.counts": (3,),
            f"number{i}.moments": (3,),
            # Below, the parts, and above.
            f"number{i}.parts": (len(quantiles_of(number)), BINS + 2),
            f"number{i}.histogram": (number.bins,),
        }
    for i, category in enumerate(settings.categories):
        shapes |= {f"category{i}.missing": (), f"category{i}.counts": (slots_of(category),)}
        if not category.values:
            shapes[f"category{i}.sketch"] = (HASHES, BUCKETS, 1 + 8 * category.longest)
    return SumsLayout(shapes)


def first_state(settings: Statistics) -> NDArray[np.float32]:
    """Return the state before the first round, float32, shape (P,)."""
    known = all(not quantiles_of(number) for number in settings.numbers) and all(
        category.values for category in settings.categories
    )
    values: dict[str, Any] = {"measures": int(known or settings.rounds == 1)}
    for i, number in enumerate(settings.numbers):
        values[f"number{i}.range"] = number.range or (0.0, 1.0)
        values[f"number{i}.between"] = [(LOWEST, HIGHEST)] * len(quantiles_of(number)) or (
            np.zeros((0, 2), np.int64)
        )
    for i, category in enumerate(settings.categories):
        if category.values:
            values[f"category{i}.words"] = words_of(
                np.array([value.encode() for value in category.values]), category.longest
            )
    return state_layout(settings).pack(values)


def words_of(texts: NDArray[Any], longest: int) -> NDArray[np.int64]:
    """Return byte strings (dtype S, shape (n,)) as int64, shape (n, longest / 8)."""
    padded = texts.astype(f"S{longest}")
    return np.ascontiguousarray(padded).view("<i8").reshape(len(texts), -1).astype(np.int64)


# With differential privacy


def no_sense_with_noise(settings: Statistics) -> str | None:
    """Return what of the settings would find nothing but noise, and what to do; None: nothing."""
    for number in settings.numbers:
        if number.range is None:
            return (
                f"column {number.name} has no range. Its least and greatest values would be those "
                "of single devices, which noise hides. Give it a range that everybody may know"
            )
        if {0.0, 1.0} & {*number.quantiles}:
            return (
                f"column {number.name} asks for the quantile 0 or 1, a single row's value, which "
                "noise hides. Ask for such as 0.05 and 0.95"
            )
        if number.quantiles and number.bins < 2:
            return (
                f"column {number.name} has quantiles and {number.bins} bins. Here quantiles are "
                "read off the histogram, in one round, to within a bin. Give it bins, such as 256"
            )
    found = any(not category.values for category in settings.categories)
    rounds = SKETCHED + 1 if found else 1
    if settings.rounds != rounds:
        why = "two that find values, and one that counts" if found else "all is counted at once"
        return (
            f"rounds = {settings.rounds}, and each round spends privacy. Set rounds = {rounds}: "
            f"{why}"
        )
    return None


def private_groups(settings: Statistics, state: NDArray[np.float32]) -> tuple[SumsGroup, ...]:
    """Return the sums that the next round releases; of the last one, where it is over."""
    known, layout = state_layout(settings).unpack(state), sums_layout(settings)
    places = layout.unpack(np.arange(layout.size))
    if not known["measures"]:
        return tuple(
            SumsGroup(
                places[f"category{i}.sketch"].reshape(-1),
                # A row is in one bucket of each hash, and may have all bits.
                sqrt(HASHES * (1 + 8 * category.longest)),
            )
            for i, category in enumerate(settings.categories)
            if not category.values
        )
    groups = [SumsGroup(places["rows"].reshape(-1), 1.0)]
    for i in range(len(settings.numbers)):
        groups.append(counted_group(settings, i))
        low, high = known[f"number{i}.range"].tolist()
        farthest = ldexp(high - low, -unit_of(low, high)) / 2 + 1  # rounded, in units
        total, upper, _ = places[f"number{i}.moments"]
        groups.append(SumsGroup(np.array([total]), farthest))
        # The lower part of the squares is less than one of these, for each row.
        groups.append(SumsGroup(np.array([upper]), ldexp(farthest**2, -SQUARE_BITS)))
    for i in range(len(settings.categories)):
        counted = [places[f"category{i}.missing"].reshape(-1), places[f"category{i}.counts"]]
        groups.append(SumsGroup(np.concatenate(counted), 1.0))
    return tuple(groups)


def counted_group(settings: Statistics, column: int) -> SumsGroup:
    """Return the group of the counts of a column of numbers: rows with a missing value, below the
    range, in each bin, above the range. Each row is in one of them."""
    layout = sums_layout(settings)
    places = layout.unpack(np.arange(layout.size))
    missing, below, above = places[f"number{column}.counts"]
    bins = places[f"number{column}.histogram"]
    asked = bool(settings.numbers[column].quantiles)
    return SumsGroup(np.array([missing, below, *bins, above]), 1.0, ordered=asked)
