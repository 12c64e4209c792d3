"""What statistics with differential privacy say, each number with the standard deviation of its
noise.

All of it follows from noisy sums and from what everybody knows, so nothing here costs privacy.
``fleetlearn_protocol.computations.private_sums`` says how the noise of the sums is made.
"""

from __future__ import annotations

from math import ldexp, sqrt
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.computations.private_sums import noise_of_first_sums, noise_of_sums
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from fleetlearn_protocol.computations.statistics import (
    SQUARE_BITS,
    counted_group,
    edges_of,
    middle_of,
    private_groups,
    state_layout,
    sums_layout,
    unit_of,
)
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

WIDE = 2
"""A quantile is between its least and its most by this many standard deviations of the noise."""
Fields = dict[str, NDArray[Any]]


class Noisy(NamedTuple):
    """A noisy number, and the standard deviation of its noise."""

    value: float
    noise: float


def noisy_result(state: Vector, settings: Statistics) -> dict[str, Any]:
    """Return what is known after the last round, with noise; as ``statistics.result`` has it, and
    with the entry ``noise`` for each thing that has some. Counts are not below 0."""
    known, groups = state_layout(settings).unpack(state), private_groups(settings, state)
    noises = _noises(settings, state, float(known["noise"]))
    rows = Noisy(float(known["rows"]), float(noises["rows"]))
    columns: dict[str, Any] = {}
    for i, number in enumerate(settings.numbers):
        prefix = f"number{i}"
        columns[number.name] = {"missing": _count(known[f"{prefix}.counts"][0])}
        if not known["done"]:
            continue
        columns[number.name] |= _moments(number, known, noises, prefix, rows)
        if number.bins:
            columns[number.name]["histogram"] = {
                "edges": edges_of(number, *number.range or (0, 1)).tolist(),
                "rows": [_count(count) for count in known[f"{prefix}.histogram"]],
                "noise": float(noises[f"{prefix}.histogram"].max()),
            }
        if number.quantiles:
            group = counted_group(settings, i)
            noise = noise_of_first_sums(float(known["noise"]), groups, group)
            columns[number.name]["quantiles"] = _quantiles(number, known, prefix, noise)
    for i, category in enumerate(settings.categories):
        columns[category.name] = _category(category, known, noises, f"category{i}", rows)
    return {
        "done": bool(known["done"]),
        "rounds": int(known["rounds"]),
        "devices": int(known["devices"]),
        "rows": _count(rows.value),
        "noise": {"rows": rows.noise},
        "columns": columns,
    }


def noise_of_sketch(settings: Statistics, state: Vector, noise: float, prefix: str) -> float:
    """Return the standard deviation of the noise on each number of a column's sketch, in rows, in
    the round that begins from ``state``. ``noise``: on each scaled sum."""
    return float(_noises(settings, state, noise)[f"{prefix}.sketch"].max())


def _noises(settings: Statistics, state: Vector, noise: float) -> Fields:
    layout = sums_layout(settings)
    return layout.unpack(noise_of_sums(noise, private_groups(settings, state), layout.size))


def _count(value: float) -> int:
    return max(0, int(value))


def _moments(
    column: NumberColumn, known: Fields, noises: Fields, prefix: str, rows: Noisy
) -> dict[str, Any]:
    """Return mean and variance. Their noise is that of a quotient of sums whose noise is small."""
    low, high = known[f"{prefix}.range"].tolist()
    missing, below, above = known[f"{prefix}.counts"].tolist()
    found: dict[str, Any] = {
        "range": [low, high],
        "below": _count(below),
        "above": _count(above),
        "noise": {"counts": float(noises[f"{prefix}.counts"].max())},
    }
    count = rows.value - missing
    if count < 1:
        return found
    count_noise = sqrt(rows.noise**2 + noises[f"{prefix}.counts"][0] ** 2)
    unit, half = ldexp(1.0, unit_of(low, high)), (high - low) / 2
    total, upper, _ = known[f"{prefix}.moments"].tolist()
    total_noise, upper_noise, _ = (noises[f"{prefix}.moments"] * unit).tolist()
    squares_noise = ldexp(upper_noise * unit, SQUARE_BITS)
    # In the column's own unit, measured from the middle of the range.
    mean, square = total * unit / count, ldexp(upper * unit**2, SQUARE_BITS) / count
    variance = square - mean**2
    mean_noise = sqrt(total_noise**2 + (mean * count_noise) ** 2) / count
    # d variance = d squares / n - 2 mean d total / n + (2 mean^2 - square) d n / n
    parts = squares_noise, 2 * mean * total_noise, (2 * mean**2 - square) * count_noise
    variance_noise = sqrt(sum(part**2 for part in parts)) / count
    mean, variance = min(max(mean, -half), half), min(max(variance, 0.0), half**2)
    deviation = sqrt(variance)
    found |= {
        "mean": middle_of(low, high) + mean,
        "variance": variance,
        "deviation": deviation,
        "mean_error": unit / 2,
    }
    found["noise"] |= {"mean": mean_noise, "variance": variance_noise}
    if deviation:
        found["noise"]["deviation"] = variance_noise / (2 * deviation)
    return found


def _quantiles(
    column: NumberColumn, known: Fields, prefix: str, noise: NDArray[np.float64]
) -> list[dict[str, Any]]:
    """Return the quantiles, read off the histogram. ``noise``: of the sums of the first counts of
    ``counted_group``."""
    _, below, above = known[f"{prefix}.counts"].tolist()
    counts = [below, *known[f"{prefix}.histogram"].tolist(), above]
    # Before the first range there is none; the noise of the missing ones is the least of all.
    ranks = np.concatenate([[0], np.cumsum(counts)])
    noise = np.sqrt(noise**2 + noise[0] ** 2)
    rising = _rising(ranks)
    low, high = known[f"{prefix}.range"].tolist()
    edges = edges_of(column, low, high)
    found: list[dict[str, Any]] = []
    if rising[-1] < 1:
        return found
    for share in column.quantiles:
        wanted = share * rising[-1]
        first, place, last = (_place(rising, wanted + sign * WIDE * noise) for sign in (-1, 0, 1))
        least, most = edges[max(first - 1, 0)], edges[min(last, column.bins)]
        start, end = edges[max(place - 1, 0)], edges[min(place, column.bins)]
        found.append(
            {
                "share": share,
                "value": float(start / 2 + end / 2),
                "least": float(least) if first else None,  # None: it may be outside of the range
                "most": float(most) if last <= column.bins else None,
                "rows_below": _count(rising[place]),
                "rows_between": _count(rising[place + 1] - rising[place]),
                "noise": {"rows": float(noise[place])},
            }
        )
    return found


def _rising(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return ranks that never fall, half-way between the greatest so far and the least to come."""
    greatest = np.maximum.accumulate(ranks)
    least = np.minimum.accumulate(ranks[::-1])[::-1]
    return greatest / 2 + least / 2


def _place(rising: NDArray[np.float64], wanted: NDArray[np.float64]) -> int:
    """Return the first count after which there are more than the wanted rows; the last one where
    there is none. ``wanted``: for each of ``rising``."""
    after = np.flatnonzero((rising > wanted)[1:])
    return int(after[0]) if len(after) else len(rising) - 2


def _category(
    column: CategoryColumn, known: Fields, noises: Fields, prefix: str, rows: Noisy
) -> dict[str, Any]:
    texts = np.ascontiguousarray(known[f"{prefix}.words"]).view(f"S{column.longest}").reshape(-1)
    counts = known[f"{prefix}.counts"].tolist()
    missing = int(known[f"{prefix}.missing"])
    there = [(text, count) for text, count in zip(texts.tolist(), counts, strict=True) if text]
    values = [
        {"value": text.decode(errors="replace"), "rows": _count(count)} for text, count in there
    ]
    if not column.values:
        values = sorted(values, key=lambda each: (-int(each["rows"]), each["value"]))
        values = values[: column.top]
    counted = sum(int(each["rows"]) for each in values)
    return {
        "missing": _count(missing),
        "values": values,
        "others": _count(rows.value - missing - counted),
        "noise": {"rows": float(noises[f"{prefix}.counts"].max(initial=0.0))},
    }
