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
"""

from __future__ import annotations

from math import exp, sqrt
from typing import Literal, NamedTuple

import numpy as np
from fleetlearn_protocol.vector import Vector

LEAST, MOST = 1e-30, 1e30
"""Where an adaptive bound stays between."""


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


def clip_factor(norm: float, bound: float) -> float:
    """Return what an update of this norm is multiplied by."""
    return 1.0 if norm <= bound else bound / norm


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
    return min(max(bound * exp(-rule.rate * (within / count - rule.quantile)), LEAST), MOST)
