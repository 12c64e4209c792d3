"""A release: the noisy mean that a committed round makes of the exact sum of its updates.

The sum S is rounded to a grid, the noise is a whole number of grid steps, and the mean is

    (rint(S / grid) + noise) * grid / (goal * W)

with the goal and the largest weight W that the plan states. It is never divided by the reports that
came, so that the noise in the mean is the same whoever vanished. Why this is safe where noise in
floating point is not: docs/algorithms/privacy-noise.md.

The noise is a function of the run's secret, the number of the release and the sum itself. The same
sum gives the same noise: a process that is killed between noise and commit makes the same model
once more. Another sum gives other noise: two copies of a run that go different ways never show the
same noise twice, whose difference would be the difference of two sums without any noise.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from math import frexp, ldexp, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.privacy.mechanisms import MECHANISMS
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.state import PrivacyState

GRID_BITS = 30
"""The standard deviation of the noise is 2^30 to 2^31 steps of the grid."""
LEAST_NOISE = 2.0**-10
"""Least noise multiplier: with less, the sum may have more grid steps than an int64 holds."""


class Released(NamedTuple):
    """What a round lets the world see of its updates."""

    mean: NDArray[np.float64]
    """The noisy mean, float64, (P,)."""
    state: PrivacyState
    """For the next release."""


def begin(rules: PrivacyRules, secret: bytes, size: int, releases: int = 0) -> PrivacyState:
    """Return the state before the first release under these rules, of a model of ``size`` elements.
    ``releases``: how many the run has made before, under other rules."""
    if len(secret) < 32:
        raise ValueError(f"a secret of {len(secret)} bytes was given; it takes 32 or more")
    buffers = MECHANISMS[rules.mechanism].begin(rules, size)
    return PrivacyState(secret, releases, rules.clip, releases, buffers)


def slack(noise: float, size: int) -> float:
    """Return by how much arithmetic can make the difference of two sums that differ by one device
    larger than ``largest_weight * clip``, as a fraction, for a model of ``size`` elements. The
    noise is raised by it. What one device adds to the exact sum is bounded exactly
    (weighing/norm_bound.py); then each element may change twice more, in either sum:

    * The exact sum is rounded to float64: by at most 2^-52 of it, and it is at most 2^17
      updates. Together this is at most 2^-34 of what one update may add.
    * It is rounded to the grid: by half a step. A step is at most 2^-30 of the noise (2^-29 below:
      that noise is the raised one).
    """
    return sqrt(size) * (2.0**-34 + noise * 2.0**-29)


def release(rules: PrivacyRules, state: PrivacyState, total: NDArray[np.float64]) -> Released:
    """Return the release of the sum ``total`` = sum(w_i * c_i * x_i), float64, (P,), where each
    update x_i is clipped by c_i to ``state.clip`` and weighs w_i, at most ``largest_weight``.

    Raises ValueError where the noise is less than ``LEAST_NOISE``, or correlated noise was made for
    no more releases."""
    mechanism = MECHANISMS[rules.mechanism]
    if mechanism.as_planned and state.releases - state.began >= rules.planned:
        raise ValueError(
            f"all of the {rules.planned} releases that the {rules.mechanism} noise was made for "
            "are made: plan more rounds, with which another noise begins"
        )
    if mechanism.on_devices:
        mean = total / (rules.goal * rules.largest_weight)
        return Released(mean, replace(state, releases=state.releases + 1))
    noise = rules.split.update
    if noise < LEAST_NOISE:
        raise ValueError(f"a noise multiplier of {noise} was given; it takes {LEAST_NOISE} or more")
    raised = (1 + slack(noise, total.size)) * (1 + mechanism.slack(rules, total.size))
    sigma = noise * rules.largest_weight * state.clip * raised
    grid = ldexp(1.0, frexp(sigma)[1] - 1 - GRID_BITS)
    scaled = total / grid  # exact: the grid is a power of two
    steps = np.rint(scaled, out=scaled).astype(np.int64)
    secret = noise_secret(state, "mean", steps, sigma=sigma, mechanism=rules.mechanism)
    drawn = mechanism.draw(rules, sigma / grid, secret, state.buffers, total.size)
    steps += drawn.noise
    mean = steps.astype(np.float64)
    mean *= grid / (rules.goal * rules.largest_weight)
    after = replace(state, releases=state.releases + 1, buffers=drawn.buffers)
    return Released(mean, after)


def noise_secret(
    state: PrivacyState,
    purpose: str,
    exact: NDArray[np.int64],
    **parameters: str | float,
) -> bytes:
    """Return the secret from which the noise on ``exact``, whole numbers, follows in the next
    release. ``purpose``: names what they are, as one release may have several. ``parameters``: what
    the noise depends on beside the secret."""
    about = {
        name: value.hex() if isinstance(value, float) else value
        for name, value in parameters.items()
    }
    named = json.dumps([purpose, state.releases + 1, exact.size, about], sort_keys=True).encode()
    content = hashlib.sha256(exact.astype("<i8", copy=False).data).digest()
    return hashlib.shake_256(state.secret + content + named).digest(32)
