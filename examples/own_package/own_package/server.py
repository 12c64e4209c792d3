"""How updates become the next model."""

import math

import numpy as np
from fleetlearn_coordinator import Optimizer, WeighingRule


def without_longest(least: int = 3):
    """The mean of the updates without the longest one, where there are this many."""

    def combine(updates):
        shares = updates.weights.copy()
        if len(shares) >= least:
            shares[np.argmax(updates.norms())] = 0.0
        return updates.combination(shares / shares.sum())

    return combine


def heavy_ball(lr: float = 1.0, momentum: float = 0.9):
    """Momentum (Polyak 1964)."""

    def step(delta, state, share):
        state["v"] = momentum * state["v"] + delta
        return lr * state["v"]

    return Optimizer("heavy-ball", {"v": 0.0}, step)


def root(most: float = 1000.0):
    """Updates count by the square root of their weight; a weight above ``most`` counts as that."""

    def factor(reported, level):
        return min(1.0, math.sqrt(reported.weight / most))

    def scale(reports, level):  # the mean divides by the weights alone
        counted = math.fsum(each.weight * factor(each, level) for each in reports)
        return sum(each.weight for each in reports) / counted

    return WeighingRule(
        "root", factor, scale, lambda reports, level: None, needs_norms=False, needs_losses=False
    )


def halved(versions: float = 4.0):
    """An update counts half when the model went on by this many versions."""
    return lambda staleness: 0.5 ** (staleness / versions)
