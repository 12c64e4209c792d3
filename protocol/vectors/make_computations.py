"""The vectors of computations: 64 bits as three elements of a state, sums as bytes, and what rows
of a table add up to, worked out one row at a time in plain Python."""

from __future__ import annotations

import struct
from math import floor, frexp, isnan, ldexp, sqrt, trunc
from typing import Any

import msgspec
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from fleetlearn_protocol.computations.statistics import first_state, state_layout

ASKED = Statistics(
    numbers=(
        NumberColumn("age", range=(0.0, 100.0), quantiles=(0.5,), bins=4),
        NumberColumn("height"),
    ),
    categories=(
        CategoryColumn("smoker", values=("yes", "no"), longest=8),
        CategoryColumn("city", longest=8),
    ),
)
AGES = (34.0, 0.1, None, -3.0, 100.0, 250.0, 61.7, 25.0)
HEIGHTS = (1.6, 1.9, 1.75, None, 0.0, -0.0, 1e300, 5e-324)
SMOKERS = ("yes", "no", "", "maybe", "yes", "yes", "no", "nö")
CITIES = ("Ulm", "Ulm", "Köln", "", "Rom", "Ulm", "Ulm", "Bergamot")
MEASURES: dict[str, Any] = {
    "rounds": 3,
    "measures": 1,
    "number1.range": (0.0, 2.0),
    "number0.between": [(4_629_700_416_936_869_888, 4_633_641_066_610_819_072)],
    "number1.between": [(0, 0), (4_609_434_218_613_702_656, 4_611_686_018_427_387_904)],
}
MASK = 2**64 - 1


def limbs(bits: int) -> list[int]:
    return [bits & (2**22 - 1), bits >> 22 & (2**21 - 1), bits >> 43]


def key(value: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", value + 0.0))
    return bits if bits >= 0 else bits ^ (2**63 - 1)


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def numbers(
    values: Any, low: float, high: float, between: Any, *, bins: int, told: bool, measures: bool
) -> list[int]:
    """Return the sums of a column. ``told``: whether its settings have a range."""
    counts, moments, histogram = [0, 0, 0], [0, 0, 0], [0] * bins
    parts = [[0] * 258 for _ in between]
    exponent = frexp(high - low)[1] - 30
    for value in values:
        if value is None or isnan(value):
            counts[0] += 1
            continue
        if measures or told:
            counts[1] += value < low
            counts[2] += value > high
        for row, (first, last) in zip(parts, between, strict=True):
            width = -(-(last - first + 1) // 256)
            place = key(value)
            if place < first:
                row[0] += 1
            elif place > last:
                row[257] += 1
            else:
                row[1 + (place - first) // width] += 1
        if measures:
            inside = min(max(value, low), high)
            distance = round(ldexp(inside - (low + (high - low) / 2), -exponent))
            moments[0] += distance
            moments[1] += distance**2 // 2**28
            moments[2] += distance**2 % 2**28
            if bins and low <= value <= high:
                histogram[min(bins - 1, floor((value - low) / (high - low) * bins))] += 1
    return [*counts, *moments, *(each for row in parts for each in row), *histogram]


def categories(values: Any, words: list[str], longest: int, seed: int | None) -> list[int]:
    """Return the sums of a column. ``seed``: the rounds that are done; None: it has no sketch."""
    texts = [value.encode()[:longest].ljust(longest, b"\0") for value in values]
    wanted = [word.encode().ljust(longest, b"\0") for word in words]
    empty = bytes(longest)
    counts = [sum(text == word for text in texts if text != empty) for word in wanted]
    found = [texts.count(empty), *counts]
    if seed is None:
        return found
    for hashed in range(2):
        buckets = [[0] * (1 + 8 * longest) for _ in range(128)]
        for text in texts:
            if text == empty:
                continue
            state = seed * 2 + hashed + 1
            for (word,) in struct.iter_unpack("<Q", text):
                state = mix((state ^ word) + 0x9E3779B97F4A7C15 & MASK)
            row = buckets[state % 128]
            row[0] += 1
            for place in range(8 * longest):
                row[1 + place] += text[place // 8] >> 7 - place % 8 & 1
        found += [each for row in buckets for each in row]
    return found


def sums(state: dict[str, Any]) -> list[int]:
    measures = bool(state["measures"])
    seed = None if measures else int(state["rounds"])
    found = [len(AGES)]
    for place, (column, values) in enumerate(zip(ASKED.numbers, (AGES, HEIGHTS), strict=True)):
        low, high = state[f"number{place}.range"].tolist()
        between = state[f"number{place}.between"].tolist()
        told = column.range is not None
        found += numbers(values, low, high, between, bins=column.bins, told=told, measures=measures)
    found += categories(SMOKERS, ["yes", "no"], 8, None)
    city = categories(CITIES, [""] * 40, 8, 0 if seed is None else seed)
    found += [0 if measures and place >= 41 else each for place, each in enumerate(city)]
    return found


def masked() -> dict[str, Any]:
    """Return sums as words without a mask, and the words of three such devices added up."""
    parts = [0, 1, -1, 2**62 // 3, -(2**62 // 3), 123_456_789_012]
    words = [[part & 2**16 - 1, part >> 16 & 2**16 - 1, part >> 32 & 2**32 - 1] for part in parts]
    added = [3 * word % 2**32 for triple in words for word in triple]
    return {
        "reports": 3,
        "sums": parts,
        "words": struct.pack(f"<{3 * len(parts)}I", *(w for each in words for w in each)).hex(),
        "added": struct.pack(f"<{len(added)}I", *added).hex(),
        "total": [3 * part for part in parts],
    }


GROUPS: tuple[tuple[list[int], float, bool], ...] = (
    ([0], 1.0, False),
    ([1, 2, 3, 4], 1.0, True),
    ([6], 2.0**29, False),
)
"""Places, the bound, and whether they are in order. Place 5 is in none."""


def clipped(values: list[int], clip: float) -> dict[str, Any]:
    """Return what a device sends of these sums with differential privacy."""
    scaled = [0.0] * len(values)
    for places, bound, ordered in GROUPS:
        own = [values[place] / (bound * sqrt(len(GROUPS))) for place in places]
        if ordered:
            root = [1.0]
            for m in range(1, len(own)):
                root.append(root[-1] * (m - 0.5) / m)
            norm = sqrt(sum(each**2 for each in root))
            own = [sum(root[i - j] * own[j] for j in range(i + 1)) / norm for i in range(len(own))]
        for place, value in zip(places, own, strict=True):
            scaled[place] = value
    factor = min(1.0, clip / sqrt(sum(each**2 for each in scaled)))
    sent = [trunc(each * factor / clip * 2**30) for each in scaled]
    return {"clip": clip, "sums": values, "sent": sent}


def computations() -> dict[str, Any]:
    layout, first = state_layout(ASKED), first_state(ASKED)
    known = layout.unpack(first)
    measuring = layout.pack({**known, **MEASURES})
    cases = []
    for name, vector in (("the first round", first), ("a round that measures", measuring)):
        expected = sums(layout.unpack(vector))
        there = [[place, each] for place, each in enumerate(expected) if each]
        cases.append(
            {
                "name": name,
                "state": vector.tobytes().hex(),
                "count": len(expected),
                "sums": there,
            }
        )
    whole = [0, 1, -1, 2**62, -(2**62), 123_456_789_012]
    return {
        "elements": [
            {"bits": f"{bits:016x}", "elements": limbs(bits)}
            for bits in (0, 1, 2**22, 2**43, 2**64 - 1, 0x3FF0000000000000, 0x7FF0000000000000)
        ],
        "clipped": {
            "groups": [
                {"places": places, "bound": bound, "ordered": ordered}
                for places, bound, ordered in GROUPS
            ],
            "cases": [
                clipped([40, 5, 20, 0, 15, 9, -40 * 2**28], clip) for clip in (40.0, 100.0, 7.5)
            ],
        },
        "masked64": masked(),
        "int64": {"sums": whole, "hex": struct.pack(f"<{len(whole)}q", *whole).hex()},
        "statistics": {
            "settings": msgspec.to_builtins(ASKED),
            "rows": {"age": AGES, "height": HEIGHTS, "smoker": SMOKERS, "city": CITIES},
            "cases": cases,
        },
    }
