"""Digits, where each tier of devices has classes that no other has.

The data function of dropout.py's arm "tiers"."""

from __future__ import annotations

from functools import cache

import numpy as np
from fleetlearn_simulator import keyed_random
from numpy.typing import NDArray
from sklearn.datasets import load_digits

SHARES = {"pi-zero-2": 0.2, "pi-4": 0.3, "jetson": 0.1, "phone": 0.4}
"""Of the devices, by tier."""
DIGITS = {"pi-zero-2": (0, 1), "pi-4": (2, 3, 4), "jetson": (5,), "phone": (6, 7, 8, 9)}
"""Each tier's own, as many as its share: over all devices every digit is as frequent."""
OWN = 0.9
"""Of a device's examples, the share drawn from its tier's digits; the others are drawn from all."""
TEST = 0.3
"""Of the examples, the share on which no device trains."""
EXAMPLES = 20
"""On each device."""
Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]


@cache
def scans() -> Arrays:
    """scikit-learn's 1797 scans: float32 (n, 64) from 0 to 1, and their digits, int64 (n,)."""
    found = load_digits()
    return (found.data / 16.0).astype(np.float32), found.target.astype(np.int64)


@cache
def split(seed: int) -> tuple[Arrays, Arrays]:
    """Return the digits to train on and the digits to test on."""
    x, y = scans()
    order = keyed_random.generator(seed, "dropout.split").permutation(len(y))
    test, train = np.split(order, [round(TEST * len(y))])
    return (x[train], y[train]), (x[test], y[test])


def tier_of(device: int, seed: int) -> str:
    """Return the device's tier, as the simulator draws it if the data's seed is the scenario's."""
    luck = keyed_random.uniform(seed, "tier", np.array([device]))[0]
    ends = np.cumsum([*SHARES.values()])
    return [*SHARES][int(np.searchsorted(ends / ends[-1], luck, side="right"))]


def own_digits(device: int, seed: int) -> Arrays:
    """A device's examples."""
    random = keyed_random.generator(seed, "dropout.places", device)
    own = np.flatnonzero(np.isin(split(seed)[0][1], DIGITS[tier_of(device, seed)]))
    return drawn(seed, random, own, OWN, EXAMPLES)


def drawn(
    seed: int, random: np.random.Generator, own: NDArray[np.int64], share: float, count: int
) -> Arrays:
    """Return ``count`` examples to train on: each is, with probability ``share``, from the places
    ``own``, else from all."""
    x, y = split(seed)[0]
    places = np.where(
        random.random(count) < share,
        own[random.integers(len(own), size=count)],
        random.integers(len(y), size=count),
    )
    return x[places], y[places]


def test(seed: int) -> Arrays:
    """The examples to test on."""
    return split(seed)[1]
