"""Kinds of noise, by the name that a plan gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol import discrete_gaussian

from fleetlearn_coordinator.aggregation.privacy import correlated
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.state import Buffers, Drawn


class NoiseMechanism(NamedTuple):
    """A kind of noise. All of its functions are pure; none of them changes an argument."""

    begin: Callable[[PrivacyRules, int], Buffers]
    """The rules, P -> the buffers before the first release."""
    draw: Callable[[PrivacyRules, float, bytes, Buffers, int], Drawn]
    """The rules, the standard deviation of fresh noise in units of the grid, the secret of this
    release, the buffers, P -> this release's noise. The same arguments give the same noise."""
    slack: Callable[[PrivacyRules, int], float]
    """The rules, P -> by how much the noise is raised, as a fraction, for what rounding to the grid
    adds to the sensitivity beyond ``release.slack``."""
    as_planned: bool = False
    """Whether there may be no more releases than the rules plan: the slack is for that many."""
    on_devices: bool = False
    """Whether each device has added the noise of its own update already: nothing is drawn here."""


def _no_buffers(rules: PrivacyRules, size: int) -> Buffers:
    return {}


def _no_slack(rules: PrivacyRules, size: int) -> float:
    return 0.0


def _independent(
    rules: PrivacyRules, sigma: float, secret: bytes, buffers: Buffers, size: int
) -> Drawn:
    return Drawn(discrete_gaussian.sample(sigma, size, secret), {})


def _none(rules: PrivacyRules, sigma: float, secret: bytes, buffers: Buffers, size: int) -> Drawn:
    return Drawn(np.zeros(size, np.int64), {})


MECHANISMS: Mapping[str, NoiseMechanism] = {
    "gaussian": NoiseMechanism(_no_buffers, _independent, _no_slack),
    "dp-ftrl": NoiseMechanism(correlated.begin, correlated.draw, correlated.slack, True),
    "local": NoiseMechanism(_no_buffers, _none, _no_slack, on_devices=True),
    "distributed": NoiseMechanism(_no_buffers, _none, _no_slack, on_devices=True),
}
"""``PrivacyRules.mechanism`` -> what makes the noise of a release."""
