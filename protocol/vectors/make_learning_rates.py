"""The factors of learning rates, written out here from PROTOCOL.md with NumPy's float64."""

from __future__ import annotations

from typing import Any

import numpy as np

ONE, HALF, PI = np.float64(1), np.float64(0.5), np.float64(3.141592653589793)
PLAIN: dict[str, Any] = {
    "kind": "constant",
    "warm_up": 0,
    "start": 1.0,
    "every": 1,
    "factor": 1.0,
    "steps": None,
    "least": 1e-4,
    "first": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "constant": {},
    "a warm-up alone": {"warm_up": 7, "start": 1 / 3},
    "a warm-up that is longer than the task": {"warm_up": 100, "start": 0.1},
    "step": {"kind": "step", "every": 4, "factor": 0.3},
    "step, down to least": {"kind": "step", "every": 1, "factor": 0.1, "least": 0.02},
    "exponential after a warm-up": {
        "kind": "exponential",
        "factor": 0.97,
        "warm_up": 3,
        "start": 0.25,
    },
    "linear over the task": {"kind": "linear", "least": 0.05},
    "linear over 9 steps": {"kind": "linear", "steps": 9},
    "cosine over the task": {"kind": "cosine"},
    "cosine over 13 steps after a warm-up": {
        "kind": "cosine",
        "steps": 13,
        "warm_up": 5,
        "start": 0.5,
    },
    "one-cycle": {
        "kind": "one-cycle",
        "warm_up": 5,
        "start": 0.04,
        "steps": 14,
        "least": 0.000004,
    },
    "the tenth round of a run": {"kind": "cosine", "steps": 1000, "warm_up": 20, "first": 200},
    "after the last step": {"kind": "exponential", "factor": 0.5, "first": 2**53 - 1},
}
STEPS = 21


def learning_rates() -> dict[str, Any]:
    rows = []
    for name, fields in CASES.items():
        schedule = PLAIN | fields
        factors = [float(_factor(schedule, step)) for step in range(STEPS)]
        rows.append({"name": name, "schedule": schedule, "steps": STEPS, "factors": factors})
    return {"factors": rows}


def _factor(schedule: dict[str, Any], step: int) -> np.float64:
    kind, warm_up = schedule["kind"], schedule["warm_up"]
    start, least = np.float64(schedule["start"]), np.float64(schedule["least"])
    number = schedule["first"] + step
    if number < warm_up:
        share = np.float64(number) / np.float64(warm_up)
        if kind == "one-cycle":
            share = ONE - _wave(share)
        return start + (ONE - start) * share
    after = number - warm_up
    if kind == "constant":
        return ONE
    if kind in ("step", "exponential"):
        times = after // schedule["every"] if kind == "step" else after
        return max(least, _power(np.float64(schedule["factor"]), times))
    length = schedule["steps"] or max(1, STEPS - warm_up)
    if after >= length:
        return least
    share = np.float64(after) / np.float64(length)
    height = ONE - share if kind == "linear" else _wave(share)
    return max(least, least + (ONE - least) * height)


def _wave(share: np.float64) -> np.float64:
    angle = PI * (HALF - share)
    square, series = angle * angle, ONE
    for term in range(11, 0, -1):
        series = ONE - square * series / np.float64(2 * term * (2 * term + 1))
    return (ONE + angle * series) / np.float64(2)


def _power(base: np.float64, exponent: int) -> np.float64:
    result = ONE
    with np.errstate(under="ignore"):
        for bit in reversed(f"{exponent:b}"):
            if bit == "1":
                result = result * base
            base = base * base
    return result
