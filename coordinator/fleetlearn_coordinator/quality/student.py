"""Student's t distribution: how rare a value is. Logarithms, since a device can be further from the
others than a float can say."""

from __future__ import annotations

from math import exp, lgamma, log, log1p

MOST_TERMS = 10_000
LEAST = 1e-300
LOG_10 = log(10.0)


def log10_two_sided(t: float, freedom: float) -> float:
    """Return log10 of the probability that a t-distributed number with ``freedom`` degrees of
    freedom is as far from 0 as ``t`` or further.

    It is I_x(freedom / 2, 1 / 2), the regularised incomplete beta function at
    x = freedom / (freedom + t^2) (Abramowitz and Stegun, 26.7.1), by its continued fraction
    (26.5.8, evaluated by Lentz's method).
    """
    if t == 0.0:
        return 0.0
    a, b = freedom / 2, 0.5
    ratio = t * t / freedom
    if ratio < LEAST:
        return 0.0
    log_x, log_rest = -log1p(ratio), -log1p(1 / ratio)  # of x and 1 - x
    x, rest = exp(log_x), exp(log_rest)
    log_front = a * log_x + b * log_rest + lgamma(a + b) - lgamma(a) - lgamma(b)
    if x < (a + 1) / (a + b + 2):
        found = log_front + log(_fraction(a, b, x)) - log(a)
        return min(0.0, found / LOG_10)
    other = exp(log_front) * _fraction(b, a, rest) / b
    return log1p(-min(other, 1 - 1e-16)) / LOG_10


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function."""
    d = 1.0 / _not_zero(1.0 - (a + b) * x / (a + 1.0))
    c, found = 1.0, d
    for m in range(1, MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _not_zero(1.0 + term * d)
            c = _not_zero(1.0 + term / c)
            found *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return found


def _not_zero(value: float) -> float:
    return value if abs(value) > LEAST else LEAST
