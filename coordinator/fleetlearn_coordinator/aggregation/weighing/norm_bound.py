"""A bound on the norm of each update: one that is longer is clipped, or refused.

Clipping is Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?" (2019),
arXiv 1911.07963, section 5: an update x of norm n counts as x * min(1, C / n). The bound C may
follow the updates: Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with
Adaptive Clipping" (2021), arXiv 1905.03871, section 2.2: after each round C <- C * exp(-eta * (b -
gamma)), where b is the share of the updates that were no longer than C, so that C comes to the
quantile gamma of the norms. (Without the paper's noise.)

A bound that leaves out a part of what a device sends is none. Buffers are values, and no part of
the update: what is bounded is how far they are from the present model's. A value v at the distance
n, all buffers together, counts as x + min(1, C / n) * (v - x), with the value x of the present
model, whatever the plan does with long updates.

Differential privacy needs the bound to hold exactly, since the noise is in proportion to it. What
one update adds to the exact sum is its elements times ``exact_mean.multiplier``, each rounded to a
grid. Both roundings may make it longer: the first by a factor of at most 1 + 2^-29, the second by
at most half a grid in each of P elements, and so sqrt(P) / 2 grids. A bound that is ``Enforced``
aims below C by as much (``enforced_clip``), so that the norm of what is added is at most W * C
after all roundings, for any weight W or smaller, and a weight above W counts as W.
"""

from __future__ import annotations

from math import exp, ldexp, sqrt
from typing import Literal, NamedTuple

import numpy as np
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.exact_mean import finest_grid

LEAST, MOST = 1e-30, 1e30
"""Where an adaptive bound stays between."""
FOR_ROUNDING = 1 - 2.0**-28
"""What an enforced bound leaves of C, for the rounding of the multiplier (2^-29) and of the norm,
which is far smaller."""


class Enforced(NamedTuple):
    """What a bound must know so that no update adds more to the exact sum, however it rounds."""

    largest_weight: int
    """W, the most that an update weighs."""
    size: int
    """P, the number of the model's elements."""


class NormBound(NamedTuple):
    """What a plan says of long updates."""

    first: float
    """The bound of the first round; without a quantile of each."""
    action: Literal["clip", "refuse"]
    quantile: float | None = None
    """gamma: the share of the updates that is to be within the bound. None: the bound stays as it
    is."""
    rate: float = 0.2
    """eta, the paper's 0.2: how fast the bound moves."""
    enforced: Enforced | None = None
    """In a private round: what makes the bound hold exactly. How many updates were within it is
    then no figure of the summary, and the bound moves by a noisy count."""


def clip_factor(norm: float, bound: float) -> float:
    """Return what an update of this norm is multiplied by."""
    return 1.0 if norm <= bound else bound / norm


def enforced_clip(bound: float, enforced: Enforced) -> float:
    """Return the norm to which updates are clipped so that none adds more than W * ``bound`` to the
    exact sum (L2 norm), whatever rounds."""
    most = enforced.largest_weight * bound
    half_grid = ldexp(0.5, finest_grid(most))
    return (most - half_grid * sqrt(enforced.size)) * FOR_ROUNDING / enforced.largest_weight


def enforced_factor(norm: float, weight: int, bound: float, enforced: Enforced) -> float:
    """Return what an update of this norm and weight is multiplied by, beside its weight."""
    capped = min(1.0, enforced.largest_weight / weight)
    return capped * clip_factor(norm, enforced_clip(bound, enforced))


def distance(values: Vector, present: Vector) -> float:
    """Return the L2 distance of a report's buffers from the present model's, both float32 of shape
    (B,)."""
    apart = np.subtract(values, present, dtype=np.float64)
    return sqrt(float(np.add.reduce(apart * apart)))


def next_bound(rule: NormBound, bound: float, within: int, count: int) -> float:
    """Return the bound of the round after one with this bound, of whose ``count`` updates
    ``within`` were no longer."""
    if rule.quantile is None or not count:
        return bound
    return moved_bound(bound, within / count, rule.quantile, rule.rate)


def moved_bound(bound: float, within: float, quantile: float, rate: float) -> float:
    """Return C * exp(-eta * (b - gamma)), between LEAST and MOST. ``within``: b, which may be a
    noisy share, below 0 or above 1."""
    return min(max(bound * exp(-rate * (within - quantile)), LEAST), MOST)
