"""SplitMix64: random numbers that are the same on every platform, in every language and numpy
version.

Guy Steele, Doug Lea and Christine Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014. From a state s, the numbers are mix(s + GAMMA), mix(s + 2 GAMMA), ..., modulo 2^64.
PROTOCOL.md, section 4, says what devices draw.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""What SplitMix64 adds to its state for each number."""
ROUNDING = 2**32
"""The stream of a seed that roundings are drawn from. Smaller numbers are epochs, whose streams
order the examples."""
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's output for each state. Each bit depends on all bits of the state; no two
    are equal."""
    # The paper's mix64variant13: these shifts and multipliers are David Stafford's.
    mixed = numbers ^ (numbers >> np.uint64(30))
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


class Fractions:
    """Random fractions below 1, multiples of 2^-32, in order: the lower half of each number of the
    stream mix(mix(seed) + ROUNDING) gives one, and then its upper half."""

    def __init__(self, seed: int) -> None:
        self._state = mix(mix(np.array([seed], np.uint64)) + np.uint64(ROUNDING))
        self._drawn = 0

    def next(self, count: int) -> NDArray[np.float64]:
        """Return the next fractions: float64, shape (count,)."""
        begin, self._drawn = self._drawn, self._drawn + count
        places = np.arange(begin // 2 + 1, (self._drawn + 1) // 2 + 1, dtype=np.uint64)
        # Little-endian on every processor, so that the lower half is the first one everywhere.
        halves = mix(self._state + places * GAMMA).astype("<u8", copy=False).view("<u4")
        fractions: NDArray[np.float64] = halves[begin % 2 : begin % 2 + count] * 2.0**-32
        return fractions
