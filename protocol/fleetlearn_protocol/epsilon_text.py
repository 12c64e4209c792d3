"""Epsilon in texts for people. What is spent is never shown as less than it is: it is rounded up. A
budget is shown as whoever wrote the plan gave it."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal
from math import isfinite

MOST_DIGITS = 17
"""Digits that tell any two float64 apart."""


def spent_text(epsilon: float, budget: float | None = None, digits: int = 3) -> str:
    """Return an epsilon that was spent, or would be, rounded up to this many significant digits. It
    has more digits where a value within ``budget`` would otherwise look as if it were past it."""
    if not isfinite(epsilon):
        return f"{epsilon:g}"
    for more in range(digits, MOST_DIGITS + 1):
        text = _rounded_up(epsilon, more)
        if budget is None or epsilon > budget or float(text) <= budget:
            return text
    return f"{epsilon!r}"


def budget_text(epsilon: float) -> str:
    """Return a budget with the digits that it was given with."""
    return repr(float(epsilon)).removesuffix(".0")


def share_text(share: float) -> str:
    """Return the spent share of a budget in percent, rounded up to three digits."""
    return f"{spent_text(round(100 * share, 9))} %"


def _rounded_up(value: float, digits: int) -> str:
    # The shortest decimal that is this float: its exact value would make 1.11 of 1.1.
    rounded = Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(value)))
    return f"{float(rounded):.{digits}g}"
