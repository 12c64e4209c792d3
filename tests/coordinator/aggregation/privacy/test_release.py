"""A release: noise on the exact sum, the same for the same sum, and as large whoever came."""

from __future__ import annotations

from dataclasses import replace
from math import ldexp, sqrt
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.privacy.mechanisms import MECHANISMS
from fleetlearn_coordinator.aggregation.privacy.release import (
    GRID_BITS,
    begin,
    noise_secret,
    release,
    slack,
)
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules

SECRET = bytes(range(32))


def privacy_rules(**more: Any) -> PrivacyRules:
    usual: dict[str, Any] = {
        "mechanism": "gaussian",
        "noise": 1.0,
        "clip": 0.5,
        "goal": 10,
        "largest_weight": 4,
        "participations": 1,
    }
    return PrivacyRules(**(usual | more))


def test_the_mean_is_the_sum_by_the_fixed_divisor_and_its_noise() -> None:
    rules = privacy_rules()
    total = np.linspace(-10, 10, 20_000)
    mean, after = release(rules, begin(rules, SECRET, total.size), total)
    noise = mean * 40 - total
    sigma = 1.0 * 4 * 0.5 * (1 + slack(1.0, total.size))
    assert abs(noise.mean()) < 5 * sigma / sqrt(total.size)
    assert abs(noise.std() / sigma - 1) < 5 / sqrt(2 * total.size)
    assert after.releases == 1
    assert after.clip == 0.5


def test_what_is_released_is_a_whole_number_of_grid_steps() -> None:
    rules = privacy_rules(goal=8)  # by a power of two, which does not round
    total = np.full(1000, 1 / 3)
    mean, _ = release(rules, begin(rules, SECRET, total.size), total)
    grid = ldexp(1.0, 1 - GRID_BITS)  # 2^1 is the largest power of two that sigma = 2.0000001 has
    steps = mean * 32 / grid
    assert np.array_equal(steps, np.rint(steps))
    assert len({*(np.abs(steps) % 1024).tolist()}) > 500  # and all of them occur


def test_the_same_sum_has_the_same_noise_and_another_sum_another() -> None:
    rules = privacy_rules()
    state, total = begin(rules, SECRET, 1000), np.zeros(1000)
    first = release(rules, state, total).mean
    assert np.array_equal(release(rules, state, total).mean, first)
    other = total.copy()
    other[7] = 1e-6  # a few steps of the grid
    for apart in (
        release(rules, state, other).mean - other / 40,
        release(rules, replace(state, releases=1), total).mean,
        release(rules, begin(rules, SECRET + b"\0", 1000), total).mean,
        release(rules, replace(state, clip=0.5000001), total).mean,
    ):
        share = np.mean(first * apart) / np.mean(first * first)
        assert abs(share) < 6 / sqrt(1000)


def test_purposes_of_one_release_have_noise_of_their_own() -> None:
    state, exact = begin(privacy_rules(), SECRET, 4), np.arange(4)
    assert noise_secret(state, "mean", exact) != noise_secret(state, "clip", exact)
    assert noise_secret(state, "mean", exact) != noise_secret(state, "mean", exact, sigma=1.0)


def test_the_secret_is_not_in_what_is_printed() -> None:
    state = begin(privacy_rules(), SECRET, 4)
    assert SECRET.hex() not in repr(state)
    assert repr(SECRET) not in repr(state)


def test_a_secret_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="a secret of 31 bytes was given; it takes 32 or more"):
        begin(privacy_rules(), SECRET[:31], 4)


def test_a_noise_that_is_too_small_for_the_grid_is_refused() -> None:
    rules = privacy_rules(noise=1e-4)
    with pytest.raises(ValueError, match=r"a noise multiplier of 0\.0001 was given"):
        release(rules, begin(rules, SECRET, 4), np.zeros(4))


def test_with_noise_of_the_devices_none_is_added_and_nothing_overflows() -> None:
    """Nobody clips such updates: hostile ones may be longer than any grid has steps for."""
    rules = privacy_rules(mechanism="local")
    total = np.array([1.0, -1e15, 2.0**60])
    mean, after = release(rules, begin(rules, SECRET, 3), total)
    assert mean.tolist() == (total / 40).tolist()
    assert after.releases == 1


def test_slack_is_small_and_grows_with_the_model() -> None:
    assert 0 < slack(1.0, 1) < slack(1.0, 10**6) < 2e-6
    assert slack(1.0, 10**9) < 7e-5


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_a_mechanism_is_a_pure_function(name: str) -> None:
    rules = privacy_rules(mechanism=name)
    mechanism = MECHANISMS[name]
    buffers = mechanism.begin(rules, 100)
    one, other = (mechanism.draw(rules, 1.5 * 2**30, SECRET, buffers, 100) for _ in range(2))
    assert np.array_equal(one.noise, other.noise)
    assert one.noise.dtype == np.int64
    assert one.buffers.keys() == buffers.keys()
    assert all(np.array_equal(one.buffers[key], other.buffers[key]) for key in buffers)
