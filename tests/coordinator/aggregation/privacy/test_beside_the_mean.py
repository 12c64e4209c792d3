"""What a private round releases beside the mean: the noisy count that moves the clip norm, and
noisy metrics. Their noise, their divisor, and what one device can change."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, nan, sqrt

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.privacy import beside_the_mean
from fleetlearn_coordinator.aggregation.privacy.beside_the_mean import (
    count_within,
    noisy_metrics,
    noisy_sum,
)
from fleetlearn_coordinator.aggregation.privacy.noise_split import count_noise
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.state import PrivacyState
from fleetlearn_protocol.messages import Evaluation

STATE = PrivacyState(bytes(32), 0, 1.0)
ADAPTIVE = PrivacyRules(
    mechanism="gaussian", noise=1.0, clip=1.0, clip_quantile=0.5, goal=100, participations=9
)
BOUNDS = {"accuracy": (0.0, 1.0), "loss": (0.0, 4.0)}
MEASURED = replace(
    ADAPTIVE, clip_quantile=None, metrics=True, metrics_noise=sqrt(10), metric_bounds=BOUNDS
)


def numbered(number: int) -> PrivacyState:
    return replace(STATE, releases=number)


def test_the_count_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 within and 20 longer of a goal of 100: b = 1/2 + (60 - 20) / 2 / 100 = 0.7, whoever did
    not come."""
    monkeypatch.setattr(beside_the_mean.discrete_gaussian, "sample", lambda sigma, size, secret: 0)
    clipped = [False] * 60 + [True] * 20
    counted = count_within(replace(ADAPTIVE, clip_rate=0.3), STATE, clipped)
    assert counted is not None
    assert counted == (pytest.approx(0.7), pytest.approx(exp(-0.3 * (0.7 - 0.5))))
    assert count_within(replace(ADAPTIVE, clip_quantile=None), STATE, clipped) is None


def test_metrics_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of a goal of 4, the others in the middle: accuracies of 0.75 and 1, losses of 1
    and of more than can be."""
    monkeypatch.setattr(beside_the_mean.discrete_gaussian, "sample", lambda sigma, size, secret: 0)
    evaluations = [
        Evaluation(4, 4.0, {"accuracy": 3.0, "other": 9.0}),
        Evaluation(1, 1e30, {"accuracy": 1.0}),
        None,
    ]
    released = noisy_metrics(replace(MEASURED, goal=4), STATE, evaluations)
    assert released is not None
    assert released.metrics == pytest.approx(
        {"accuracy": 0.5 + (0.25 + 0.5) / 4, "loss": 2 + (-1 + 2) / 4}
    )
    assert released.noise == pytest.approx(sqrt(10) * sqrt(2) / 2 / 4)
    assert noisy_metrics(ADAPTIVE, STATE, evaluations) is None
    nobody = noisy_metrics(MEASURED, STATE, [])
    assert nobody is not None
    assert nobody.metrics == {"accuracy": 0.5, "loss": 2.0}


@pytest.mark.parametrize("sigma", [0.3, 5.0, 1000.0])
def test_the_noise_has_the_stated_standard_deviation(sigma: float) -> None:
    """Of 4000 releases of the sum 0: within four standard errors."""
    empty = np.zeros((1, 4000))
    found = noisy_sum(STATE, "test", empty, sigma)
    assert found.std() == pytest.approx(sigma, rel=4 / sqrt(2 * 4000))
    assert abs(found.mean()) < 4 * sigma / sqrt(4000)


def test_the_same_parts_in_any_order_give_the_same_noise() -> None:
    parts = np.random.default_rng(0).uniform(-0.5, 0.5, (50, 3))
    found = noisy_sum(STATE, "test", parts, 2.0).tolist()
    assert noisy_sum(STATE, "test", parts[::-1], 2.0).tolist() == found
    noise = np.array(found) - parts.sum(axis=0)
    for other in (
        noisy_sum(STATE, "other", parts, 2.0) - parts.sum(axis=0),
        noisy_sum(numbered(1), "test", parts, 2.0) - parts.sum(axis=0),
        noisy_sum(STATE, "test", parts[1:], 2.0) - parts[1:].sum(axis=0),
    ):
        assert not np.isclose(noise, other, atol=1e-3).any(), "noise was drawn twice"


@pytest.mark.parametrize("said", [-1e30, 1e30, nan, inf, -inf])
def test_a_device_that_says_anything_moves_the_metrics_by_half_a_span(
    said: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_the_mean.discrete_gaussian, "sample", lambda sigma, size, secret: 0)
    honest = [Evaluation(1, 2.0, {"accuracy": 0.5})] * 9
    hostile = Evaluation(1, said, {"accuracy": said})
    zero = noisy_metrics(MEASURED, STATE, [*honest, None])
    moved = noisy_metrics(MEASURED, STATE, [*honest, hostile])
    assert zero is not None
    assert moved is not None
    spans = {name: high - low for name, (low, high) in BOUNDS.items()}
    apart = [(moved.metrics[name] - zero.metrics[name]) / span for name, span in spans.items()]
    limit = sqrt(len(BOUNDS)) / 2 / MEASURED.goal
    assert sqrt(sum(each * each for each in apart)) <= limit * (1 + 1e-12)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("first", [0.03, 30.0])
def test_the_clip_norm_comes_to_the_quantile_of_the_norms(quantile: float, first: float) -> None:
    """Norms exp(N(0, 1)), a goal of 200, of which a tenth vanishes in each round. Each that
    vanishes counts as 1/2: the quantile that is reached is the q with 0.9 q + 0.05 = quantile."""
    rules = replace(ADAPTIVE, goal=200, clip_quantile=quantile)
    random, clip, late = np.random.default_rng(3), first, []
    for number in range(150):
        norms = np.exp(random.standard_normal(180))
        counted = count_within(rules, replace(numbered(number), clip=clip), list(norms > clip))
        assert counted is not None
        clip = counted.next_clip
        late.append(clip)
    reached = np.mean(late[-60:])
    everything = np.exp(random.standard_normal(100_000))
    share = (everything <= reached).mean()
    assert share == pytest.approx((quantile - 0.05) / 0.9, abs=0.03)
    assert count_noise(200) == 10


def test_without_noise_on_the_count_the_norm_would_tell_it() -> None:
    """A planted mistake: the count as it is gives the same next norm for each secret."""
    clipped = [False] * 70 + [True] * 30
    states = [PrivacyState(bytes([row] * 32), 0, 1.0) for row in range(50)]
    found = [count_within(ADAPTIVE, state, clipped) for state in states]
    shares = [counted.within for counted in found if counted is not None]
    assert np.std(shares) == pytest.approx(count_noise(100) / 100, rel=0.4)
