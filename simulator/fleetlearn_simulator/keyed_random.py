"""Random numbers by name: what is drawn depends on the seed, the purpose and the keys, and on nothing else.

There is no state, so neither the order of the calls nor their number matters: device 7's luck in round 3 is the same
in a population of ten and of ten million, on one process and on eight. The keys are hashed by SplitMix64 (Steele, Lea
and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 17), one round of it per key.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Key: TypeAlias = int | NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

COLUMN: NDArray[np.int64] = np.arange(16)[:, None]
"""A key for several numbers at once."""

_GAMMA, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(seed: int, purpose: str, *keys: Key) -> Floats:
    """Numbers in [0, 1), multiples of 2**-53; the keys (integers of 64 bits) broadcast, and give the shape.

    Several numbers for each of n keys are cheapest in one call whose last key is a column, ``COLUMN[:count]``; the
    result is (count, n).
    """
    return _unit(_hash(seed, purpose, keys))


def normal(seed: int, purpose: str, *keys: Key) -> Floats:
    """Standard normal numbers (Box and Muller, A Note on the Generation of Random Normal Deviates, 1958); the keys
    broadcast."""
    hashed = _hash(seed, purpose, keys)
    radius = np.sqrt(-2 * np.log1p(-_unit(_more(hashed, 0))))
    return np.asarray(radius * np.cos(2 * np.pi * _unit(_more(hashed, 1))))


def exponential(seed: int, purpose: str, *keys: Key) -> Floats:
    """Exponential numbers of mean 1; the keys broadcast."""
    return np.asarray(-np.log1p(-uniform(seed, purpose, *keys)))


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """A generator (Philox) of its own for each seed, purpose and keys, for drawing in bulk."""
    name = "\0".join(map(str, (seed, purpose, *keys)))
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(name.encode()).digest()[:16])))


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
    with np.errstate(over="ignore"):  # numpy warns of scalars that wrap around, as they shall here
        hashed = hashed + (np.asarray(key, np.int64).view(np.uint64) + np.uint64(1)) * _GAMMA
        hashed = (hashed ^ (hashed >> np.uint64(30))) * _FIRST
        hashed = (hashed ^ (hashed >> np.uint64(27))) * _SECOND
        return np.asarray(hashed ^ (hashed >> np.uint64(31)))


def _unit(hashed: NDArray[np.uint64]) -> Floats:
    return np.asarray((hashed >> np.uint64(11)) * 2.0**-53)
