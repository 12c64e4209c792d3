"""q-FedAvg: devices on whose data the model is worse have more say.

Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning" (2020), arXiv 1905.10497, Algorithm 2.
With the loss F_k of the round's model on device k's data, its update x_k (the device's model minus the round's), and
L = 1 / lr:

    delta_k = F_k^q * L * x_k
    h_k = q * F_k^(q - 1) * ||L * x_k||^2 + L * F_k^q
    the model moves by sum(delta_k) / sum(h_k)

With q = 0 it is the plain mean. Both sums are weighted by the plan's weights: with round.weighting = "uniform", the
recipe's, as in the paper. The norm is of the trained parameters.

Losses are taken in units of a level that is near their median in the round before (a power of two; 1 in the first
round): r_k = F_k / level, within LEAST_RATIO and MOST_FACTOR^(1/q). The unit cancels out of the quotient. It keeps F^q
within the exact sum whatever the loss's size and q, and a device that claims a loss of 10^30 from being the only one
that counts. A factor is r_k^q / MOST_FACTOR, at most 1; with a loss at the level the sum is exact to 2^-33 of an
element's unit.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from math import fsum, log2
from statistics import median

from fleetlearn_coordinator.aggregation.weighing.weighing import Reported, Rule

MOST_FACTOR = 2.0**12
"""The most that F^q counts, as a multiple of level^q."""
MOST_RATIO = 2.0**1000
"""The most that a loss counts, in levels: for a small q."""
LEAST_RATIO = 1e-10
"""A loss counts as at least this many levels: the paper's code adds as much to each loss."""
MOST_Q = 10.0
"""The largest q that a plan may have."""


def ratio(loss: float, level: float, q: float) -> float:
    """Return r_k."""
    most = MOST_RATIO if q < 0.012 else MOST_FACTOR ** (1 / q)
    return min(max(loss / level, LEAST_RATIO), most)


def factor(reported: Reported, level: float, q: float) -> float:
    """Return what the update is multiplied by."""
    return float(min(1.0, ratio(reported.loss, level, q) ** q / MOST_FACTOR))


def scale(reports: Collection[Reported], level: float, q: float, lr: float) -> float:
    """Return what the mean of the updates times their factors is multiplied by."""
    terms = []
    for each in reports:
        r = ratio(each.loss, level, q)
        terms.append(each.weight * (q * r ** (q - 1) * each.norms.trained**2 / (lr * level) + r**q))
    return MOST_FACTOR * sum(each.weight for each in reports) / fsum(terms)


def next_level(reports: Collection[Reported], level: float) -> float:
    """Return the level of the next round: the power of two that is nearest to the median loss."""
    loss = median(each.loss for each in reports)
    return float(2.0 ** round(min(max(log2(loss), -300), 300))) if loss > 0 else level


def fair(q: float, lr: float) -> Rule:
    """Return the rule for this q, and the learning rate ``lr`` of the local step."""
    return Rule("fair", partial(factor, q=q), partial(scale, q=q, lr=lr), next_level, True, True)
