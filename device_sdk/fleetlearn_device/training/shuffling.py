"""The order in which a device takes its examples: for one device, or for many simulated devices at
once."""

from __future__ import annotations

import numpy as np
from fleetlearn_protocol.splitmix64 import GAMMA, mix
from numpy.typing import NDArray

_PLACE = np.uint64(2**32 - 1)


def permutation(examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of the examples: int64, shape (examples,), the same on every platform and
    numpy version."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; expected 0 to 2^64 - 1")
    (order,) = permutations(np.array([examples]), np.array([seed], np.uint64), epoch)
    return np.asarray(order)


def permutations(
    examples: NDArray[np.int64], seeds: NDArray[np.int64] | NDArray[np.uint64], epoch: int
) -> NDArray[np.int64]:
    """Return the orders of n devices: int64, shape (n, most examples of one device); shorter rows
    end with zeros.

    ``examples`` and ``seeds`` have shape (n,). Each example of a device gets a number of SplitMix64
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), from the
    state mix(mix(seed) + epoch) on. The examples are sorted by the upper halves of their numbers;
    equal halves keep their order. That is a few operations on whole arrays here, and a few lines in
    any language that a device is written in.
    """
    most = int(examples.max())
    state = mix(mix(seeds.astype(np.uint64)) + np.uint64(epoch))
    numbers = mix(state[:, None] + np.arange(1, most + 1, dtype=np.uint64) * GAMMA)
    # Each number carries its example's place in its lower half: sorting the numbers is quicker than
    # argsort.
    numbers &= ~_PLACE
    numbers |= np.arange(most, dtype=np.uint64)
    if int(examples.min()) == most:
        numbers.sort(axis=1)
    else:
        there = np.arange(most) < examples[:, None]
        # Rows have unlike lengths: what is not there sorts behind everything, and is 0 at last.
        numbers[~there] = np.uint64(2**64 - 1)
        numbers.sort(axis=1)
        numbers[~there] = 0
    numbers &= _PLACE
    return numbers.view(np.int64)
