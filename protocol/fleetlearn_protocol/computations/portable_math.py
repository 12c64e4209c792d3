"""exp and log by additions, multiplications and divisions alone: the same 64 bits on every
processor and with every version of NumPy, whose own functions differ in the last bit. Boosting
rounds what comes of them to whole numbers, which must not depend on the device."""

from __future__ import annotations

from math import factorial

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
_LN2_HIGH = float.fromhex("0x1.62E42FEEp-1")
"""The first 32 bits of ln 2: its product with a whole number below 2^21 is exact."""
_LN2_LOW = float.fromhex("0x1.A39EF35793C76p-33")
_LOG2_E = float.fromhex("0x1.71547652B82FEp0")
_SQRT_HALF = float.fromhex("0x1.6A09E667F3BCDp-1")
_EXP_TERMS = [1 / factorial(power) for power in range(13, -1, -1)]
_LOG_TERMS = [1 / odd for odd in range(21, 0, -2)]
LARGEST = 700.0
"""exp takes arguments that are further from 0 as this far."""


def portable_exp(values: Doubles) -> Doubles:
    """Return e to the power of each value, within 2 units of the last place: float64, the same
    shape. Values beyond +-700 count as +-700; NaN stays."""
    clipped = np.clip(values, -LARGEST, LARGEST)
    powers = np.rint(clipped * _LOG2_E)
    rest = (clipped - powers * _LN2_HIGH) - powers * _LN2_LOW  # at most ln(2) / 2 from 0
    total = np.full_like(rest, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        total = total * rest + term
    return np.ldexp(total, np.nan_to_num(powers).astype(np.int32))


def portable_log(values: Doubles) -> Doubles:
    """Return the natural logarithm of each value above 0, within 2 units of the last place where
    that is not near 1: float64, the same shape."""
    mantissas, powers = np.frexp(values)
    small = mantissas < _SQRT_HALF
    mantissas = np.where(small, mantissas * 2, mantissas)
    powers = (powers - small).astype(np.float64)
    ratio = (mantissas - 1) / (mantissas + 1)  # log m = 2 (r + r^3 / 3 + r^5 / 5 + ...)
    square = ratio * ratio
    total = np.full_like(ratio, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        total = total * square + term
    found: Doubles = powers * _LN2_HIGH + (powers * _LN2_LOW + 2 * ratio * total)
    return found


def sigmoid(scores: Doubles) -> Doubles:
    """Return 1 / (1 + e^-score): float64, the same shape."""
    small = portable_exp(-np.abs(scores))
    return np.where(scores >= 0, 1.0, small) / (1 + small)


def logistic_losses(scores: Doubles, y: NDArray[np.int64]) -> Doubles:
    """Return minus the log likelihood of y, 0 or 1: log(1 + e^score) - score y, float64, the same
    shape."""
    tail = portable_log(1 + portable_exp(-np.abs(scores)))
    found: Doubles = np.maximum(scores, 0) - scores * y + tail
    return found


def softmax(scores: Doubles) -> Doubles:
    """Return the probabilities of classes from their scores, float64, shape (n, K)."""
    powers = portable_exp(scores - scores.max(axis=1, keepdims=True))
    total = powers[:, :1].copy()
    for k in range(1, powers.shape[1]):  # one after another: the order of np.sum is not promised
        total += powers[:, k : k + 1]
    return powers / total
