"""What staleness takes from an update: the factor s(tau) of an update whose task began tau model
versions ago.

``constant`` and ``polynomial`` and ``hinge`` are the three functions of Xie, Koyejo and Gupta,
"Asynchronous Federated Optimization" (2019), arXiv 1903.03934. Polynomial with a = 1/2 is what
buffered asynchronous training
uses: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (2022), arXiv
2106.06639.

A fresh update (tau = 0) has the factor 1 with each of them. The mean divides by the weights without
the factors: sum(s(tau_i) * w_i * delta_i) / sum(w_i). With all weights 1 that is the update of the
second paper's Algorithm 1, 1/K * sum(s(tau_i) * delta_i).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.aggregation.own_calls import call_own


class StalenessConstants(NamedTuple):
    """The constants of a staleness function, by the names of the paper."""

    a: float
    b: float


def constant(tau: int, constants: StalenessConstants) -> float:
    """Return 1: staleness takes nothing."""
    return 1.0


def polynomial(tau: int, constants: StalenessConstants) -> float:
    """Return (1 + tau)^-a."""
    return float((1 + tau) ** -constants.a)


def hinge(tau: int, constants: StalenessConstants) -> float:
    """Return 1 up to tau = b, and 1 / (a * (tau - b) + 1) beyond."""
    return 1.0 if tau <= constants.b else 1.0 / (constants.a * (tau - constants.b) + 1.0)


class Function(NamedTuple):
    """A function of the staleness."""

    of: Callable[[int, StalenessConstants], float]
    defaults: Mapping[str, float]
    """Constants that the function takes -> where the paper's experiments have them."""


FUNCTIONS: Mapping[str, Function] = {
    "constant": Function(constant, {}),
    "polynomial": Function(polynomial, {"a": 0.5}),
    "hinge": Function(hinge, {"a": 10.0, "b": 4.0}),
}


def own_factor(function: Callable[[int], float], tau: int) -> float:
    """Return what a function of another package says of this staleness: above 0, at most 1. Raises
    FleetError where it fails, or returns anything else."""
    factor = call_own("staleness.function", lambda: float(function(tau)))
    if not (math.isfinite(factor) and 0 < factor <= 1) or (tau == 0 and factor != 1):
        takes = "1, as the update is fresh" if tau == 0 else "a factor above 0, at most 1"
        raise FleetError(
            Code.BAD_MESSAGE,
            f"staleness.function returned {factor} for a staleness of {tau}; expected {takes}",
        )
    return factor
