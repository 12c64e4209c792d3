"""The order of each device's examples, as the device itself makes it, for many devices at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)
_FACTOR = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], np.uint64)[:, None, None]
_LOW_FACTOR, _HIGH_FACTOR = _FACTOR & _LOW, _FACTOR >> _HALF
_STEP = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], np.uint64)[:, None, None]
"""By which the key grows from round to round."""


def permutations(examples: int, seeds: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
    """``fleetlearn_device.data.permutation(examples, seed, epoch)`` for each seed: int64 (seeds, examples).

    Philox-4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the keys (seed, epoch);
    numpy has one generator for each key, whose making takes longer than its numbers.
    """
    blocks = -(-examples // 4)
    # The generator's four words, as two pairs: those that are multiplied, c0 and c2, and the others, c1 and c3. All
    # words of all generators in one array each, as there are hundreds of operations. numpy counts up before it draws.
    pair = np.zeros((2, len(seeds), blocks), np.uint64)
    pair[0] = np.arange(1, blocks + 1)
    others = np.zeros_like(pair)
    key = np.stack([seeds.astype(np.uint64), np.full(len(seeds), epoch, np.uint64)])[:, :, None]
    with np.errstate(over="ignore"):
        for _ in range(10):
            high, low = _multiply(pair)
            np.bitwise_xor(high[::-1], others, out=pair)
            pair ^= key
            others = low[::-1]
            key = key + _STEP
    numbers = np.stack([pair[0], others[0], pair[1], others[1]], axis=2).reshape(len(seeds), -1)[:, :examples]
    return np.argsort(numbers, axis=1, kind="stable")


def _multiply(b: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The high and the low 64 bits of the products with the generator's factors, from products of 32 bits."""
    b_low, b_high = b & _LOW, b >> _HALF
    middle = _LOW_FACTOR * b_low
    middle >>= _HALF
    middle += _HIGH_FACTOR * b_low
    other = _LOW_FACTOR * b_high
    other += middle & _LOW
    other >>= _HALF
    middle >>= _HALF
    other += middle
    b_high *= _HIGH_FACTOR
    other += b_high
    return other, b * _FACTOR
