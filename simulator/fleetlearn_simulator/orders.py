"""The order of each device's examples, as the device itself makes it, for many devices at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


def permutations(examples: int, seeds: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
    """``fleetlearn_device.data.permutation(examples, seed, epoch)`` for each seed: int64 (seeds, examples).

    Philox-4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the keys (seed, epoch);
    numpy has one generator for each key, whose making takes longer than its numbers.
    """
    blocks = -(-examples // 4)
    shape = (len(seeds), blocks)
    # numpy counts up before it draws.
    c0 = np.broadcast_to(np.arange(1, blocks + 1, dtype=np.uint64), shape)
    c1 = c2 = c3 = np.zeros(shape, np.uint64)
    first, second = seeds.astype(np.uint64)[:, None], np.uint64(epoch)
    with np.errstate(over="ignore"):
        for number in range(10):
            k0, k1 = first + np.uint64(number * _W0 % 2**64), second + np.uint64(number * _W1 % 2**64)
            high0, low0 = _multiply(_M0, c0)
            high1, low1 = _multiply(_M1, c2)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    numbers = np.stack([c0, c1, c2, c3], axis=2).reshape(len(seeds), -1)[:, :examples]
    return np.argsort(numbers, axis=1, kind="stable")


def _multiply(a: np.uint64, b: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The high and the low 64 bits of the products."""
    a_low, a_high = a & _LOW, a >> _HALF
    b_low, b_high = b & _LOW, b >> _HALF
    middle = a_high * b_low + (a_low * b_low >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (other >> _HALF), a * b
