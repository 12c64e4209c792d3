"""Canaries: devices made up for an audit. A secret coin decides of each whether what it sends is a
long step in a random direction of its own, or zeros; the attack guesses the coins from what was
released.

Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (2023), arXiv 2305.08846,
Algorithm 1, with its white-box attack: the adversary sees every release and knows the directions.
Zeros in place of a device's contributions are the adjacency that plans are accounted for.

m canaries, T releases, models of P elements.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.audit.epsilon_bounds import CONFIDENCE, one_run_bound

Matrix = NDArray[np.float64]
FEWEST_GUESSES = 8
"""Fewer guesses prove next to nothing, even if all are right."""
RIDGE = 1e-10
"""Of the mean variance: noise that two releases share would leave a matrix without an inverse."""


class CanaryDevices(NamedTuple):
    """The canaries of one audit."""

    directions: NDArray[np.float32]
    """Shape (m, P), each of length 1."""
    takes_part: NDArray[np.bool_]
    """In which releases each canary reports, whatever its coin says, (m, T)."""
    included: NDArray[np.bool_]
    """The coins: whether it reports its step, (m,). Else it reports zeros."""


def make_canaries(seed: int, takes_part: NDArray[np.bool_], size: int) -> CanaryDevices:
    """Draw directions and coins. ``size``: P, more than there are canaries and releases together,
    so that the rest of the space tells how large the noise is. Raises ValueError if it is less."""
    count, releases = takes_part.shape
    if size <= count + releases:
        raise ValueError(
            f"{count} canaries and {releases} releases take more than {count + releases} "
            f"elements; the model of the audit has {size}"
        )
    random = keyed_random.generator(seed, "audit canaries")
    directions = random.standard_normal((count, size), np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    coins = keyed_random.uniform(seed, "audit coins", np.arange(count)) < 0.5
    return CanaryDevices(directions, takes_part, coins)


def schedule(count: int, releases: int, separation: int, participations: int) -> NDArray[np.bool_]:
    """Return in which releases each canary takes part, (count, releases): at most
    ``participations`` times, ``separation`` or more releases apart.

    Every second canary takes part as often as that allows. The others rest for twice as long, so
    that no two neighbouring releases have the same canaries: what the noise of one tells about
    that of the next is then seen.
    """
    found = np.zeros((count, releases), np.bool_)
    for canary in range(count):
        step = separation * (1 + canary % 2)
        first = canary // 2 % min(step, releases)
        found[canary, first::step][:participations] = True
    return found


def log_ratios(canaries: CanaryDevices, lengths: Matrix, released: Matrix) -> NDArray[np.float64]:
    """Return the logarithm of how much more probable the releases are if the canary is included
    than if it is not, (m,), where their noise is Gaussian.

    ``lengths``: how long a canary's step is in each release if it is included, (m, T); 0 where it
    does not take part. ``released``: the releases, in the same unit, (T, P). How large the noise
    is, and how that of one release depends on that of another, is estimated from the releases,
    outside the space of the directions. So is by how much the steps are longer than they should
    be, which a mistake can make them: half of them are there, and tell it by their mean.
    """
    directions = canaries.directions.astype(np.float64)
    count, size = directions.shape
    inverse = np.linalg.inv(directions @ directions.T)
    # Least squares: what the other canaries sent does not disturb.
    steps = inverse @ (directions @ released.T)
    rest = released - steps.T @ directions
    noise = rest @ rest.T / (size - count)
    noise += np.eye(len(noise)) * max(RIDGE * float(np.trace(noise)) / len(noise), 1e-300)
    wanted = np.linalg.solve(noise, lengths.T).T
    spread = np.diagonal(inverse)
    told = (wanted * steps).sum(axis=1) / spread
    expected = (wanted * lengths).sum(axis=1) / spread
    longer = max(1.0, 2 * float(told.sum()) / max(float(expected.sum()), 1e-300))
    found: NDArray[np.float64] = longer * (told - longer * expected / 2)
    return found


class Guesses(NamedTuple):
    """What an attack guessed of the coins, and what it proves."""

    bits: int
    guesses: int
    correct: int
    epsilon: float
    """The lower bound."""


def guess(
    ratios: NDArray[np.float64],
    included: NDArray[np.bool_],
    delta: float,
    confidence: float = CONFIDENCE,
) -> Guesses:
    """Guess the coins that the ratios tell most about, and return the best bound.

    ``ratios``: logarithms, (m,); above 0 the coin is guessed to be True. All coins are guessed, or
    half of them, or a quarter, and so on. That the best of these is taken costs confidence: each
    bound is made at the error divided by their number.
    """
    order = np.argsort(-np.abs(ratios), kind="stable")
    right = np.cumsum((ratios > 0)[order] == included[order])
    bits = len(ratios)
    counts = [count for power in range(bits.bit_length()) if (count := bits >> power)]
    counts = [count for count in counts if count >= FEWEST_GUESSES] or counts[:1]
    each = 1 - (1 - confidence) / len(counts)
    found = [
        Guesses(bits, count, correct, one_run_bound(bits, count, correct, delta, each))
        for count in counts
        for correct in [int(right[count - 1])]
    ]
    return max(found, key=lambda row: row.epsilon)
