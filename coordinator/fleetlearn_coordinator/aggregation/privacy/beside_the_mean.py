"""What a private round releases beside the mean of its updates: how many were within the clip norm,
and what devices measured. Each is a sum of numbers from -1/2 to 1/2, one for each device, with
noise that is added once.

The count makes the clip norm follow the updates: Andrew, Thakkar, McMahan and Ramaswamy,
"Differentially Private Learning with Adaptive Clipping" (2021), arXiv 1905.03871, Algorithm 1:

    b = 1/2 + (sum of +1/2 for an update within the norm, -1/2 for a longer one, + noise) / goal
    C <- C * exp(-rate * (b - quantile))

A device's mean of a metric is limited to the plan's bounds and laid on -1/2 to 1/2, so that a
device that says anything moves the sum as little as any other. All metrics of a round are one
vector, at most sqrt(M) / 2 long.

The sums are divided by the round's goal, a number that the plan states, and never by the reports
that came, as the mean is. So a device that did not come counts like one in the middle: a share of
1/2, the middle of a metric's bounds. In a round that closes with fewer reports than its goal, the
metrics are nearer to the middle than the devices'. A quotient of two noisy sums would not be, but
it would take a second noisy sum, and be worse in all rounds that are full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import frexp, ldexp, nan, sqrt
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol import discrete_gaussian
from fleetlearn_protocol.messages import Evaluation
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.privacy.release import GRID_BITS, noise_secret
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.state import PrivacyState
from fleetlearn_coordinator.aggregation.weighing.norm_bound import moved_bound


class NoisyCount(NamedTuple):
    """What is released of how many updates were within the clip norm."""

    within: float
    """b: their noisy share of the goal. It may be below 0 or above 1."""
    next_clip: float
    """The clip norm of the next release."""


class NoisyMetrics(NamedTuple):
    """The devices' measurements, with noise, as they are released."""

    metrics: Mapping[str, float]
    """The noisy means, within the plan's bounds."""
    noise: float
    """The standard deviation of the noise in each, as a part of the distance of its bounds."""


def noisy_sum(
    state: PrivacyState, purpose: str, parts: NDArray[np.float64], sigma: float
) -> NDArray[np.float64]:
    """Return the sum of the rows of ``parts``, (n, M), each from -1/2 to 1/2, with noise of the
    standard deviation ``sigma``, (M,). The same rows in any order give the same noise."""
    grid = ldexp(1.0, frexp(sigma)[1] - 1 - GRID_BITS)
    steps: NDArray[np.int64] = np.rint(parts / grid).astype(np.int64).sum(axis=0)
    secret = noise_secret(state, purpose, steps, sigma=sigma)
    noisy = steps + discrete_gaussian.sample(sigma / grid, steps.size, secret)
    return noisy.astype(np.float64) * grid


def count_within(
    rules: PrivacyRules, state: PrivacyState, clipped: Sequence[bool]
) -> NoisyCount | None:
    """Return the noisy count and the clip norm that follows. ``clipped``: whether each update was
    longer than the clip norm. None: the clip norm stays."""
    sigma = rules.split.clip_count
    if sigma is None or rules.clip_quantile is None:
        return None
    parts = np.where(np.array(clipped, np.bool_), -0.5, 0.5)[:, None]
    (total,) = noisy_sum(state, "updates within the clip norm", parts, sigma).tolist()
    within = 0.5 + total / rules.goal
    return NoisyCount(within, moved_bound(state.clip, within, rules.clip_quantile, rules.clip_rate))


def noise_on_metrics(rules: PrivacyRules) -> float | None:
    """Return the standard deviation of the noise in each measured value that a release shows, as a
    part of the distance of its bounds. None: the plan releases none."""
    multiplier = rules.split.metrics
    if multiplier is None or not rules.metric_bounds:
        return None
    return multiplier * sqrt(len(rules.metric_bounds)) / 2 / rules.goal


def noisy_metrics(
    rules: PrivacyRules, state: PrivacyState, evaluations: Sequence[Evaluation | None]
) -> NoisyMetrics | None:
    """Return what is released of what devices measured of the round's model before they trained.
    One that did not, or does not have the metric, counts as the middle of its bounds. None: the
    plan releases nothing of it."""
    noise, names = noise_on_metrics(rules), sorted(rules.metric_bounds)
    if noise is None:
        return None
    low, high = np.array([rules.metric_bounds[name] for name in names]).T
    middle, span = (low + high) / 2, high - low
    rows = [[_mean(own, name) for name in names] for own in evaluations]
    means = np.array(rows).reshape(-1, len(names))  # also where nobody measured anything
    parts = np.nan_to_num(np.clip((means - middle) / span, -0.5, 0.5), nan=0.0)
    total = noisy_sum(state, "metrics", parts, noise * rules.goal)
    found = np.clip(middle + span * total / rules.goal, low, high)
    return NoisyMetrics(dict(zip(names, found.tolist(), strict=True)), noise)


def _mean(evaluation: Evaluation | None, name: str) -> float:
    """Return a device's mean of a metric over its examples; NaN: it has none."""
    if evaluation is None:
        return nan
    sums = {**evaluation.metric_sums, "loss": evaluation.loss_sum}
    return sums.get(name, nan) / evaluation.examples
