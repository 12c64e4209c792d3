"""q-FedAvg: devices on whose data the model is worse have more say.

Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning" (2020), arXiv
1905.10497, Algorithm 2. With the loss F_k of the round's model on device k's data, its update x_k
(the device's model minus the round's), and L = 1 / lr:

    delta_k = F_k^q * L * x_k
    h_k = q * F_k^(q - 1) * ||L * x_k||^2 + L * F_k^q
    the model moves by sum(delta_k) / sum(h_k)

With q = 0 it is the plain mean. Both sums are weighted by the plan's weights: with round.weighting
= "uniform", the recipe's, as in the paper. The norm is of the trained parameters.

Losses are taken in units of a level that is near their median in the round before, a power of two:
r_k = F_k / level. The unit cancels out of the quotient. r_k^q counts as at most 2^MOST_BITS, so
that a device that claims a loss of 10^30 is not the only one that counts. The first round has no
level yet: its unit is 1, and F_k^q counts as it is from 2^-FIRST_BITS to 2^FIRST_BITS. So such a
claim decides the first round, by that device's own update; a bound on norms bounds what this does.

A factor is r_k^q divided by the most that it can be, and so at most 1. The exact sum adds updates
with the smallest factors to as many digits as any (exact_mean.py).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from math import fsum, log2
from statistics import median

from fleetlearn_coordinator.aggregation.weighing.weighing import Reported, WeighingRule

MOST_BITS = 12
"""F^q counts as at most 2^12 times level^q."""
FIRST_BITS = 128
"""In the first round, F^q counts as at most 2^128 and at least 2^-128: with q = 5, losses of 2e-8
to 5e7 as they are."""
MOST_RATIO_BITS = 1000
"""A loss counts as at most 2^1000 levels: for a small q."""
LEAST_RATIO = 1e-10
"""A loss counts as at least this many levels: the paper's code adds as much to each loss."""
MOST_Q = 10.0
"""The largest q that a plan may have."""


def ratio(loss: float, level: float | None, q: float) -> float:
    """Return r_k. ``level``: None in the first round."""
    if level is None:
        most = _root(FIRST_BITS, q)
        return min(max(loss, LEAST_RATIO, 1 / most), most)
    return min(max(loss / level, LEAST_RATIO), _root(MOST_BITS, q))


def _root(bits: int, q: float) -> float:
    """Return the number whose q-th power is 2^bits, or 2^MOST_RATIO_BITS if that is less."""
    return float(2.0 ** (bits / max(q, bits / MOST_RATIO_BITS)))


def most_factor(level: float | None) -> float:
    """Return the most that r_k^q can be."""
    return float(2 ** (FIRST_BITS if level is None else MOST_BITS))


def factor(reported: Reported, level: float | None, q: float) -> float:
    """Return what the update is multiplied by."""
    return float(min(1.0, ratio(reported.loss, level, q) ** q / most_factor(level)))


def scale(reports: Collection[Reported], level: float | None, q: float, lr: float) -> float:
    """Return what the mean of the updates times their factors is multiplied by."""
    terms, unit = [], lr * (1.0 if level is None else level)
    for each in reports:
        r = ratio(each.loss, level, q)
        h = q * r ** (q - 1) * each.norms.trained**2 / unit + r**q
        terms.append(each.weight * h)
    return most_factor(level) * sum(each.weight for each in reports) / fsum(terms)


def next_level(reports: Collection[Reported], level: float | None) -> float | None:
    """Return the level of the next round: the power of two that is nearest to the median loss, or
    the same level where that is 0."""
    loss = median(each.loss for each in reports)
    return float(2.0 ** round(min(max(log2(loss), -300), 300))) if loss > 0 else level


def fair(q: float, lr: float) -> WeighingRule:
    """Return the rule for this q, and the learning rate ``lr`` of the local step."""
    return WeighingRule(
        "fair", partial(factor, q=q), partial(scale, q=q, lr=lr), next_level, True, True
    )
