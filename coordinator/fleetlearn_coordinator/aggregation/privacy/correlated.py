"""Correlated noise, release by release: DP-FTRL with a buffered linear Toeplitz matrix.

In units of the grid, with fresh noise z_t (whole numbers) and the buffers S_j, which begin at 0:

    n_t = z_t - rint(sum over j of omega_j S_j)      and then      S_j = theta_j S_j + n_t

n_t is added to release t. The buffers are whole numbers of a fraction of the grid, so that each
step is the same on every machine, and a file holds them to the last bit.

Why the matrix C decides epsilon. Let x_t be the sums on the grid, and y_t = x_t + n_t what is
released. Given y_1 .. y_{t-1}, release t is x_t - g_t + z_t, where g_t = rint(..) is a function of
n_s = y_s - x_s for s < t. So it is Gaussian noise, rounded, around x_t - g_t. Without a device's
data there are x' and g' instead. With exact arithmetic g_t would be the sum of c_i n_{t-i} over i
from 1 on; it is that plus an error e_t. So the centre moves by

    (x_t - x'_t) - (g_t - g'_t) = (C (x - x'))_t - (e_t - e'_t)

and over all releases by at most the sensitivity of C plus the norm of e - e', whatever was
released. Gaussian mechanisms of which each is chosen by the results of those before compose as one
whose square of the shift is the sum of theirs (Smith and Thakurta, "Fully Adaptive Composition for
Gaussian Differential Privacy", 2022, arXiv 2210.17520, where that sum is bounded in advance).
``rounding`` bounds |e_t|, and ``slack`` is what follows for the noise.

The buffers are as secret as the noise: with them and the releases, anybody can compute the sums.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2, sqrt

import numpy as np
from fleetlearn_protocol import discrete_gaussian
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.privacy.blt import BltStrategy, strategy_for
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.state import Buffers, Drawn

BLOCK = 32768
"""Elements at a time, so that the temporaries stay in the processor's cache."""
SIGMA_BITS = 31
"""The standard deviation of z_t is less than 2^31 steps of the grid (``release.GRID_BITS``)."""
FARTHEST = 38
"""Standard deviations beyond which z_t is never (``discrete_gaussian.TAIL``)."""
BUFFER_BITS = 52
"""A buffer is less than 2^52 units, so that float64 holds it and its half."""


def strategy_of(rules: PrivacyRules) -> BltStrategy:
    """Return the strategy of a run's (or segment's) releases."""
    return strategy_for(rules.planned, rules.separation, rules.participations)


@lru_cache(maxsize=64)
def fraction_bits(strategy: BltStrategy, releases: int) -> int:
    """Return F: a buffer's unit is 2^-F of the grid. It is as small as ``BUFFER_BITS`` allow in
    this many releases, each buffer being the sum of all z_t so far times numbers whose absolute sum
    is computed here. Takes O(releases). Raises ValueError where not even the grid is possible."""
    theta, omega = np.array(strategy.theta), np.array(strategy.omega)
    fresh, held, reach = 1.0, np.zeros(len(theta)), np.zeros(len(theta))
    for _ in range(releases):
        noise = fresh - float((omega * held).sum())
        held = theta * held + noise
        reach += np.abs(held)
        fresh = 0.0
    bits = BUFFER_BITS - SIGMA_BITS - ceil(log2(FARTHEST * float(reach.max()) + 1))
    if bits < 0:
        raise ValueError(
            f"correlated noise for {releases} releases does not fit the 64 bits of its buffers: "
            "plan fewer releases"
        )
    return bits


def rounding(strategy: BltStrategy, releases: int) -> float:
    """Return a bound on |e_t|, how far rounding moves what is taken from z_t, in steps of the grid.

    Of a buffer, less than 2^52 units large, each release's product is off by a quarter of a unit
    in float64, then by half a unit as it becomes whole; an error decays as the buffer does. The sum
    of the buffers times omega is off by a unit for each buffer; and rint by half a step.
    """
    unit = 2.0 ** -fraction_bits(strategy, releases)
    decayed = float(strategy.coefficients(releases + 1)[1:].sum())
    return 0.5 + unit * (0.75 * decayed + len(strategy.omega))


def begin(rules: PrivacyRules, size: int) -> Buffers:
    """Return the buffers before the first release: int64, (P,) each, 0."""
    count = len(strategy_of(rules).theta)
    return {f"sum_{number}": np.zeros(size, np.int64) for number in range(count)}


def draw(rules: PrivacyRules, sigma: float, secret: bytes, buffers: Buffers, size: int) -> Drawn:
    """Return a release's noise and the buffers after it. ``sigma``: standard deviation of z_t, in
    steps of the grid, less than 2^31."""
    strategy = strategy_of(rules)
    bits = fraction_bits(strategy, rules.planned)
    return correlate(strategy, bits, discrete_gaussian.sample(sigma, size, secret), buffers)


def correlate(
    strategy: BltStrategy, bits: int, fresh: NDArray[np.int64], buffers: Buffers
) -> Drawn:
    """Return n_t, of ``fresh`` noise z_t, (P,), and the buffers, in units of 2^-``bits``."""
    noise = np.empty_like(fresh)
    after = {name: np.empty_like(values) for name, values in buffers.items()}
    rows = list(zip(strategy.theta, strategy.omega, buffers, strict=True))
    for start in range(0, fresh.size, BLOCK):
        place = slice(start, start + BLOCK)
        held = {name: values[place].astype(np.float64) for name, values in buffers.items()}
        taken = np.zeros(fresh[place].size)
        for _, omega, name in rows:
            taken += omega * held[name]
        noise[place] = fresh[place] - np.rint(taken * 2.0**-bits).astype(np.int64)
        for theta, _, name in rows:
            after[name][place] = np.rint(theta * held[name])
            after[name][place] += noise[place] << bits
    return Drawn(noise, after)


def slack(rules: PrivacyRules, size: int) -> float:
    """Return by how much the noise is raised, as a fraction, for e - e': at most 2 |e_t| in each of
    P elements and T releases, so at most 2 |e_t| sqrt(P T) steps of the grid. A step is at most
    2^-30 of the standard deviation (2^-29 here, for the part by which that is raised), which is the
    noise multiplier times the most that one participation moves."""
    error = 2 * rounding(strategy_of(rules), rules.planned)
    return error * sqrt(size * rules.planned) * rules.split.update * 2.0**-29
