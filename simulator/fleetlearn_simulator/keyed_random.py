"""Random numbers that depend on the seed, the purpose and some keys, and on nothing else.

There is no state: neither the order of calls nor their number matters. What device 7 draws in round
3 is the same in a population of ten and of ten million, in one process and in eight. The keys are
hashed by SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA
2014, figure 17), one step of it for each key.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from fleetlearn_protocol.splitmix64 import GAMMA, mix
from numpy.typing import NDArray

Key: TypeAlias = int | NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

COLUMN: NDArray[np.int64] = np.arange(16)[:, None]
"""A key that draws several numbers at once: see ``uniform``."""


def uniform(seed: int, purpose: str, *keys: Key) -> Floats:
    """Return numbers in [0, 1), multiples of 2**-53. The keys (integers of 64 bits) are broadcast,
    and give the shape.

    To draw several numbers for each of n keys, give a column, ``COLUMN[:count]``, as the last key.
    This is cheaper than several calls. The result has the shape (count, n).
    """
    return _unit(_hash(seed, purpose, keys))


def normal(seed: int, purpose: str, *keys: Key) -> Floats:
    """Return standard normal numbers (Box and Muller, A Note on the Generation of Random Normal
    Deviates, 1958). The keys are broadcast."""
    hashed = _hash(seed, purpose, keys)
    # log1p of the negative: the number may be 0 and is never 1, so the logarithm is always finite.
    radius = np.sqrt(-2 * np.log1p(-_unit(_more(hashed, 0))))
    return np.asarray(radius * np.cos(2 * np.pi * _unit(_more(hashed, 1))))


def exponential(seed: int, purpose: str, *keys: Key) -> Floats:
    """Return exponential numbers with mean 1. The keys are broadcast."""
    return np.asarray(-np.log1p(-uniform(seed, purpose, *keys)))


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return a generator (Philox), for many numbers. Each seed, purpose and keys have a generator
    of their own."""
    key = int.from_bytes(secret_bytes(seed, purpose, *keys)[:16])
    return np.random.Generator(np.random.Philox(key=key))


def secret_bytes(seed: int, purpose: str, *keys: int) -> bytes:
    """Return 32 bytes, as a simulation has them in the place of a coordinator's secret."""
    name = "\0".join(map(str, (seed, purpose, *keys)))
    return hashlib.sha256(name.encode()).digest()


@lru_cache(1024)
def _start(seed: int, purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{purpose}".encode()).digest()[:8])


def _hash(seed: int, purpose: str, keys: tuple[Key, ...]) -> NDArray[np.uint64]:
    hashed = np.asarray(_start(seed, purpose), np.uint64)
    for key in keys:
        hashed = _more(hashed, key)
    return hashed


def _more(hashed: NDArray[np.uint64], key: Key) -> NDArray[np.uint64]:
    """The hash with one more key."""
    with np.errstate(over="ignore"):  # numpy would warn that scalars wrap around
        return np.asarray(
            # One more, so that the key 0 changes the hash too.
            mix(hashed + (np.asarray(key, np.int64).view(np.uint64) + np.uint64(1)) * GAMMA)
        )


def _unit(hashed: NDArray[np.uint64]) -> Floats:
    # The upper 53 bits, which a float64 holds exactly.
    return np.asarray((hashed >> np.uint64(11)) * 2.0**-53)
