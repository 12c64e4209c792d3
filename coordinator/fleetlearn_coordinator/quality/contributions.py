"""What each device's update of a round is worth, by a *utility*: a number for each set of devices,
such as the held-out accuracy of the model that their updates alone make.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from math import comb, fsum, sqrt
from typing import NamedTuple

import numpy as np

Utility = Callable[[frozenset[int]], float]
"""Devices' numbers, from 0 -> how good their model is. No devices: the model before the round."""
EXACT_UP_TO = 8
"""Devices of a round up to which all sets are tried: 2^8 = 256 utilities."""


class Contributions(NamedTuple):
    """A value for each device, in the utility's unit."""

    values: list[float]
    errors: list[float]
    """The standard error of each value; 0 where nothing was drawn at random."""
    utilities: int
    """How many sets were measured."""


def leave_one_out(devices: int, utility: Utility) -> Contributions:
    """Return by how much the model of all is better than the model of all others: above 0, the
    device helps. Two devices with the same data hide each other: neither is missed."""
    known = cache(utility)
    every = frozenset(range(devices))
    values = [known(every) - known(every - {device}) for device in range(devices)]
    return Contributions(values, [0.0] * devices, known.cache_info().currsize)


def shapley(
    devices: int, utility: Utility, *, utilities: int = 1000, seed: int = 0
) -> Contributions:
    """Return each device's Shapley value: what it adds to the sets of devices before it, over all
    orders in which they could come (Shapley, "A value for n-person games", 1953). The values add up
    to what the round gained.

    Up to EXACT_UP_TO devices the values are exact. Beyond, orders are drawn at random, each
    together with its reverse (Castro et al., "Polynomial calculation of the Shapley value based on
    sampling", 2009; the pairs: Mitchell et al. 2022, arXiv 2104.12199, section 4), until about
    ``utilities`` sets were measured, and at least two pairs.
    """
    known = cache(utility)
    if devices <= EXACT_UP_TO:
        values = [_exact_value(device, devices, known) for device in range(devices)]
        return Contributions(values, [0.0] * devices, known.cache_info().currsize)
    generator = np.random.default_rng(seed)
    pairs: list[np.ndarray] = []
    while len(pairs) < 2 or known.cache_info().currsize + 2 * devices <= utilities:
        order = generator.permutation(devices)
        pairs.append((_added(order, known) + _added(order[::-1], known)) / 2)
        if len(pairs) >= utilities:  # a utility of few sets is known before it is used up
            break
    drawn = np.stack(pairs)
    errors = drawn.std(axis=0, ddof=1) / sqrt(len(pairs))
    return Contributions(drawn.mean(axis=0).tolist(), errors.tolist(), known.cache_info().currsize)


def needed_sets(devices: int, utilities: int, seed: int) -> list[frozenset[int]]:
    """Return the sets that ``shapley`` and ``leave_one_out`` measure, each once, smaller ones
    first: for whoever measures them before."""
    asked = set[frozenset[int]]()

    def note(members: frozenset[int]) -> float:
        asked.add(members)
        return 0.0

    shapley(devices, note, utilities=utilities, seed=seed)
    leave_one_out(devices, note)
    return sorted(asked, key=lambda members: (len(members), sorted(members)))


def _exact_value(device: int, devices: int, utility: Utility) -> float:
    others = [other for other in range(devices) if other != device]
    terms = (
        (utility(frozenset(before) | {device}) - utility(frozenset(before)))
        / (devices * comb(devices - 1, size))
        for size in range(devices)
        for before in combinations(others, size)
    )
    return fsum(terms)


def _added(order: np.ndarray, utility: Utility) -> np.ndarray:
    """Return what each device adds to those before it in this order, (devices,)."""
    added = np.empty(len(order))
    before, members = utility(frozenset()), frozenset[int]()
    for device in order.tolist():
        members |= {device}
        after = utility(members)
        added[device], before = after - before, after
    return added
