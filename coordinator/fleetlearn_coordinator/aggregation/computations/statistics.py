"""Federated statistics on the coordinator: what a round's counts leave open, and what they say.

``fleetlearn_protocol.computations.statistics`` says what devices are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import isfinite, ldexp, sqrt
from typing import Any

import numpy as np
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.settings import (
    FARTHEST,
    CategoryColumn,
    NumberColumn,
    Statistics,
)
from fleetlearn_protocol.computations.statistics import (
    SKETCHED,
    SQUARE_BITS,
    bucket_of,
    edges_of,
    middle_of,
    part_width,
    quantiles_of,
    slots_of,
    state_layout,
    sums_layout,
    unit_of,
    value_of,
    words_of,
)
from fleetlearn_protocol.errors import many
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.computations.noisy_statistics import (
    noise_of_sketch,
    noisy_result,
)

SMALLEST = 1e-6
"""A quantile need be no more exact than its column's error times this share of the range."""

CLEAR = 8
"""A bucket of a sketch counts where its rows are this many standard deviations of the noise. Half
of them tell a bit from noise, which then spells one value in 500 wrongly."""
MOST_ROWS = 2**48
"""No round has more: what is computed of counts fits into 64 bits."""


def advance(state: Vector, total: Sums, devices: int, settings: Statistics) -> Vector:
    """Return the state after a round with these sums of ``devices`` devices. Raises ValueError
    where they cannot be sums of rows."""
    check_sums(total, settings)
    return _advanced(state, sums_layout(settings).unpack(total), devices, settings)


def check_sums(sums: Sums, settings: Statistics) -> None:
    """Raise ValueError where these sums, of one device or of all, cannot be those of rows."""
    found = sums_layout(settings).unpack(sums)
    rows = int(found["rows"])
    if not 0 <= rows <= MOST_ROWS:
        raise ValueError(f"sums of {rows} rows were given; expected 0 to {MOST_ROWS}")
    _check_counts(found, rows)


def advance_noisy(
    state: Vector, total: Sums, devices: int, settings: Statistics, noise: float
) -> Vector:
    """Return the state after a round whose sums have noise of the standard deviation ``noise``, in
    rows, on each scaled one. Counts may be negative; ``result`` says what can be."""
    return _advanced(state, sums_layout(settings).unpack(total), devices, settings, noise)


def _advanced(
    state: Vector, found: dict[str, Sums], devices: int, settings: Statistics, noise: float = 0.0
) -> Vector:
    known = state_layout(settings).unpack(state)
    rounds, measures = int(known["rounds"]) + 1, bool(known["measures"])
    after: dict[str, Any] = {
        **known,
        "rounds": rounds,
        "devices": devices,
        "rows": found["rows"],
        "noise": noise,
    }
    for i, number in enumerate(settings.numbers):
        prefix = f"number{i}"
        for name in ("counts", "moments", "histogram"):
            after[f"{prefix}.{name}"] = found[f"{prefix}.{name}"]
        after |= _quantiles(number, known, found, prefix, measures=measures)
    for i, category in enumerate(settings.categories):
        prefix = f"category{i}"
        after[f"{prefix}.missing"] = found[f"{prefix}.missing"]
        after[f"{prefix}.counts"] = found[f"{prefix}.counts"]
        if not (measures or category.values):
            # With noise, what was found is not counted before the last round.
            counts, least = (known if noise else found)[f"{prefix}.counts"], 0.0
            sketch = found[f"{prefix}.sketch"]
            if noise:
                least = CLEAR * noise_of_sketch(settings, state, noise, prefix)
            spelt = _spelt(sketch, category.longest, rounds - 1, least)
            after |= _candidates(category, known[f"{prefix}.words"], counts, spelt, prefix)
    after["done"] = int(measures)
    after["measures"] = int(_settled(after, settings) or rounds >= settings.rounds - 1)
    return state_layout(settings).pack(after)


def _check_counts(found: dict[str, Sums], rows: int) -> None:
    """Raise ValueError where a total cannot come from this number of rows."""
    for name, counted in found.items():
        kind = name.partition(".")[2]
        if kind == "moments":
            total, upper, lower = map(int, counted)
            if total**2 > rows * ((upper << SQUARE_BITS) + lower):
                raise ValueError(f"{name}: no {many(rows, 'row')} have such a sum and such squares")
        elif counted.size and not 0 <= counted.min() <= counted.max() <= rows:
            wrong = counted[(counted < 0) | (counted > rows)].flat[0]
            raise ValueError(f"{name}: a count of {wrong} came, of {many(rows, 'row')}")


def is_done(state: Vector, settings: Statistics) -> bool:
    """Return whether the round that measures is over."""
    return bool(state_layout(settings).unpack(state)["done"])


def progress(state: Vector, settings: Statistics) -> str:
    """Return where it stands."""
    known = state_layout(settings).unpack(state)
    rounds = int(known["rounds"])
    if known["done"]:
        rows, devices = (
            many(max(0, int(known["rows"])), "row"),
            many(int(known["devices"]), "device"),
        )
        about = ", with noise" if known["noise"] else ""
        return f"measured on {rows} of {devices}{about}"
    if known["measures"]:
        return f"{many(rounds, 'round')} found ranges, quantiles and values; the next one measures"
    return f"{many(rounds, 'round')} so far, of at most {settings.rounds}"


def _quantiles(
    column: NumberColumn,
    known: dict[str, NDArray[Any]],
    found: dict[str, Sums],
    prefix: str,
    *,
    measures: bool,
) -> dict[str, Any]:
    """Return what a round says of a column's quantiles, and of its range where that is found."""
    shares = quantiles_of(column)
    between = known[f"{prefix}.between"].tolist()
    counted = found[f"{prefix}.parts"].tolist()
    ranks = [(row[0], sum(row[1:-1])) for row in counted]
    if not measures:
        columns = zip(between, counted, shares, strict=True)
        between = [_part_with(low, high, row, share) for (low, high), row, share in columns]
    empty = np.zeros((0, 2), np.int64)
    after: dict[str, Any] = {
        f"{prefix}.between": between or empty,
        f"{prefix}.ranks": ranks or empty,
    }
    if column.range is None and not measures:
        low, high = (between[shares.index(end)][place] for place, end in ((0, 0.0), (1, 1.0)))
        ends = value_of(np.array([low, high]))
        after[f"{prefix}.range"] = np.clip(ends, -FARTHEST, FARTHEST)
    return after


def _part_with(low: int, high: int, counts: list[int], share: float) -> tuple[int, int]:
    """Return the first and the last key of the part in which the quantile is. counts: of rows below
    low, in each part, above high. Where devices of this round have it outside of low ... high, the
    part at that end."""
    rows = sum(counts)
    if not rows:
        return low, high
    rank = int(Fraction(share) * (rows - 1))  # from 0; the lower one of two
    width, part = part_width(low, high), 0
    seen = counts[0]
    last = -(-(high - low + 1) // width) - 1
    while part < last and seen + counts[1 + part] <= rank:
        seen += counts[1 + part]
        part += 1
    return low + part * width, min(low + (part + 1) * width - 1, high)


def _candidates(
    column: CategoryColumn,
    words: NDArray[np.int64],
    counts: Sums,
    spelt: Iterator[tuple[bytes, int]],
    prefix: str,
) -> dict[str, Any]:
    """Return the values that the next round counts: the most frequent ones of those that this one
    counted and of those that its sketch spells."""
    slots = slots_of(column)
    found = dict(spelt)
    known = np.ascontiguousarray(words).view(f"S{column.longest}").reshape(-1).tolist()
    found |= {value: count for value, count in zip(known, counts.tolist(), strict=True) if value}
    best = sorted(found, key=lambda value: (-found[value], value))[:slots]
    texts = np.array(best + [b""] * (slots - len(best)), f"S{column.longest}")
    return {
        f"{prefix}.words": words_of(texts, column.longest),
        f"{prefix}.counts": [found[value] for value in best] + [0] * (slots - len(best)),
    }


def _spelt(
    sketch: Sums, longest: int, seed: int, least: float = 0.0
) -> Iterator[tuple[bytes, int]]:
    """Yield the values that the buckets of a sketch spell, each with the most rows that it can
    have. ``least``: of a bucket's rows; with fewer it is noise."""
    hashes, buckets, _ = sketch.shape
    for hashed in range(hashes):
        rows, bits = sketch[hashed, :, :1], sketch[hashed, :, 1:]
        values = np.packbits(bits > rows // 2, axis=1)
        most = np.minimum.reduce(np.maximum(bits, rows - bits), axis=1)
        fits = bucket_of(values, seed * hashes + hashed) == np.arange(buckets)
        for bucket in np.flatnonzero(fits & (rows[:, 0] > least) & (most > 0)):
            value = values[bucket].tobytes().rstrip(b"\0")
            if value:
                yield value, int(most[bucket])


def _settled(after: dict[str, Any], settings: Statistics) -> bool:
    """Return whether the next round may measure: no quantile is to be refined, and each column was
    sketched."""
    if after["rounds"] < SKETCHED and any(not each.values for each in settings.categories):
        return False
    for i, number in enumerate(settings.numbers):
        low, high = np.asarray(after[f"number{i}.range"]).tolist()
        between = np.asarray(after[f"number{i}.between"], np.int64).reshape(-1, 2)
        for first, last in value_of(between).tolist():
            span = max(abs(first), abs(last), SMALLEST * (high - low))
            if first != last and not last - first <= number.error * span:
                return False
    return True


# The result


def result(state: Vector, settings: Statistics) -> dict[str, Any]:
    """Return what is known after the last round: rows, devices, and for each column what was asked
    for."""
    known = state_layout(settings).unpack(state)
    if known["noise"]:
        return noisy_result(state, settings)
    rows = int(known["rows"])
    columns: dict[str, Any] = {}
    for i, number in enumerate(settings.numbers):
        columns[number.name] = _number_result(number, known, f"number{i}", rows)
    for i, category in enumerate(settings.categories):
        columns[category.name] = _category_result(category, known, f"category{i}", rows)
    return {
        "done": bool(known["done"]),
        "rounds": int(known["rounds"]),
        "devices": int(known["devices"]),
        "rows": rows,
        "columns": columns,
    }


def _number_result(
    column: NumberColumn, known: dict[str, NDArray[Any]], prefix: str, rows: int
) -> dict[str, Any]:
    missing, below, above = known[f"{prefix}.counts"].tolist()
    count = rows - missing
    found: dict[str, Any] = {"missing": missing}
    between = value_of(known[f"{prefix}.between"]).tolist()
    ranks = known[f"{prefix}.ranks"].tolist()
    quantiles = {}
    for share, (low, high), (under, inside) in zip(
        quantiles_of(column), between, ranks, strict=True
    ):
        quantiles[share] = {
            "value": _finite(low if low == high else low / 2 + high / 2),
            "least": _finite(low),
            "most": _finite(high),
            "rows_below": under,
            "rows_between": inside,
        }
    for name, share in (("minimum", 0.0), ("maximum", 1.0)):
        if share in quantiles:
            found[name] = quantiles[share]
    if column.quantiles:
        found["quantiles"] = [{"share": share, **quantiles[share]} for share in column.quantiles]
    if not known["done"] or not count:
        return found
    low, high = known[f"{prefix}.range"].tolist()
    found |= {"range": [low, high], "below": below, "above": above}
    total, upper, lower = known[f"{prefix}.moments"].tolist()
    unit = Fraction(2) ** unit_of(low, high)
    mean = Fraction(total, count)
    variance = Fraction((upper << SQUARE_BITS) + lower, count) - mean**2
    found |= {
        "mean": float(mean * unit + Fraction(middle_of(low, high))),
        "variance": float(variance * unit**2),
        "deviation": sqrt(float(variance * unit**2)),
        "mean_error": ldexp(1.0, unit_of(low, high) - 1),
    }
    if column.bins:
        found["histogram"] = {
            "edges": edges_of(column, low, high).tolist(),
            "rows": known[f"{prefix}.histogram"].tolist(),
        }
    return found


def _finite(value: float) -> float | None:
    """Return the number as JSON has it; None for an end that is not known."""
    return value if isfinite(value) else None


def _category_result(
    column: CategoryColumn, known: dict[str, NDArray[Any]], prefix: str, rows: int
) -> dict[str, Any]:
    missing = int(known[f"{prefix}.missing"])
    texts = np.ascontiguousarray(known[f"{prefix}.words"]).view(f"S{column.longest}").reshape(-1)
    counts = known[f"{prefix}.counts"].tolist()
    values = [
        {"value": value.decode(errors="replace"), "rows": count}
        for value, count in zip(texts.tolist(), counts, strict=True)
        if value and (count or column.values)
    ]
    if not column.values:
        values = sorted(values, key=lambda each: (-each["rows"], each["value"]))[: column.top]
    return {
        "missing": missing,
        "values": values,
        "others": rows - missing - sum(each["rows"] for each in values),
    }
