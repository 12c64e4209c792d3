"""Digits, where devices of each tenth by speed have a digit that no others have.

The data function of asynchronous.py."""

from __future__ import annotations

from functools import cache

import numpy as np
from _dropout_data import Arrays, drawn, split
from fleetlearn_simulator import keyed_random
from numpy.typing import NDArray

SPREAD = 0.8
"""Standard deviation of the logarithm of a device's speed: the 95th percentile is 14 times the
5th."""
TENTHS = SPREAD * np.array(
    [-1.281552, -0.841621, -0.524401, -0.253347, 0.0, 0.253347, 0.524401, 0.841621, 1.281552]
)
"""The logarithms of the speeds between the tenths: SPREAD times the normal distribution's
deciles."""
OWN = 0.5
"""Of a device's examples, the share that shows the digit of its tenth; the others are drawn from
all."""
EXAMPLES = 20
"""On each device."""


def speeds(devices: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Return the devices' speeds, as the simulator draws them if the data's seed is the
    scenario's."""
    drawn = keyed_random.normal(seed, "traits", devices, keyed_random.COLUMN[:3])
    return np.asarray(np.exp(SPREAD * drawn[0]))


def tenth_of(devices: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the tenth by speed that each device is in, which is its own digit: 0 for the slowest,
    9 for the fastest."""
    return np.searchsorted(TENTHS, np.log(speeds(devices, seed)), side="right")


@cache
def _places(seed: int) -> list[NDArray[np.int64]]:
    """Return where each digit is among the examples to train on."""
    _, y = split(seed)[0]
    return [np.flatnonzero(y == digit) for digit in range(10)]


def own_digits(device: int, seed: int) -> Arrays:
    """A device's examples."""
    random = keyed_random.generator(seed, "asynchronous.places", device)
    own = _places(seed)[int(tenth_of(np.array([device]), seed)[0])]
    return drawn(seed, random, own, OWN, EXAMPLES)


def test(seed: int) -> Arrays:
    """The examples to test on."""
    return split(seed)[1]
