"""Epsilon and noise, against figures that were computed apart from this code."""

from __future__ import annotations

import math

import pytest
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon, noise_for, sensitivity


@pytest.mark.parametrize(("noise", "epsilon"), [(1, 4.8866), (2, 2.2541), (4, 1.0607)])
def test_epsilon_of_one_gaussian(noise: float, epsilon: float) -> None:
    assert gaussian_epsilon(1 / noise, 1e-6) == pytest.approx(epsilon, abs=5e-5)


def test_no_loss_is_epsilon_0() -> None:
    assert gaussian_epsilon(0.0, 1e-6) == 0


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("moved", [1.0, math.sqrt(30)])
def test_the_noise_for_an_epsilon_is_the_least(epsilon: float, moved: float) -> None:
    noise = noise_for(epsilon, 1e-6, moved)
    assert gaussian_epsilon(moved / noise, 1e-6) <= epsilon
    assert gaussian_epsilon(moved / (noise * (1 - 1e-9)), 1e-6) > epsilon


@pytest.mark.parametrize(
    ("releases", "separation", "participations", "times"),
    [(1, 1, 9, 1), (10, 1, 10, 10), (10, 1, 4, 4), (10, 3, 9, 4), (9, 3, 9, 3), (2, 5, 9, 1)],
)
def test_independent_noise_counts_the_releases_that_one_device_can_be_in(
    releases: int, separation: int, participations: int, times: int
) -> None:
    found = sensitivity("gaussian", releases, separation, participations)
    assert found == pytest.approx(math.sqrt(times))
    assert found == sensitivity("local", releases, separation, participations)
