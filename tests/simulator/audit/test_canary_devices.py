"""The attack on canaries, against a Gaussian mechanism in numpy whose epsilon is known."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_simulator.audit.canary_devices import (
    CanaryDevices,
    Matrix,
    guess,
    log_ratios,
    make_canaries,
    schedule,
)

DELTA = 1e-6
EPSILON = 2.2541
"""Of noise / sensitivity = 2 at this delta: the Gaussian mechanism's, from another accountant."""


def sums(canaries: CanaryDevices) -> Matrix:
    """Return the exact sums of steps of length 1, (T, P)."""
    taken = (canaries.takes_part & canaries.included[:, None]).astype(np.float64)
    return taken.T @ canaries.directions


def attacked(canaries: CanaryDevices, released: Matrix) -> float:
    lengths = canaries.takes_part.astype(np.float64)
    return guess(log_ratios(canaries, lengths, released), canaries.included, DELTA).epsilon


@pytest.mark.parametrize("releases", [1, 4])
def test_the_bound_is_below_the_epsilon_of_a_gaussian_mechanism_and_above_with_less_noise(
    releases: int,
) -> None:
    """With a noise of 2 sqrt(T) one device's T contributions have noise / sensitivity = 2."""
    canaries = make_canaries(3, np.ones((300, releases), np.bool_), 1200)
    noise = np.random.default_rng(5).standard_normal((releases, 1200)) * 2 * np.sqrt(releases)
    assert attacked(canaries, sums(canaries) + noise) < EPSILON
    assert 0.3 < attacked(canaries, sums(canaries) + noise / 3) < 4.9
    assert attacked(canaries, sums(canaries) + noise / 20) > EPSILON


def test_two_releases_with_the_same_noise_give_their_canaries_away() -> None:
    """The noise of one release is that of an epsilon below 2.25; two with the same noise tell the
    coins of who took part in one of them."""
    canaries = make_canaries(3, schedule(400, 2, 1, 2), 1600)
    random = np.random.default_rng(7)
    noise = 2 * np.sqrt(2) * random.standard_normal((1, 1600))
    assert attacked(canaries, sums(canaries) + noise) > EPSILON
    noise = 2 * np.sqrt(2) * random.standard_normal((2, 1600))
    assert attacked(canaries, sums(canaries) + noise) < EPSILON


def test_what_is_not_in_the_releases_is_not_guessed() -> None:
    canaries = make_canaries(3, np.ones((200, 2), np.bool_), 1000)
    noise = np.random.default_rng(5).standard_normal((2, 1000))
    assert attacked(canaries, noise) == 0.0


def test_the_ratio_of_one_canary_is_that_of_two_normal_densities() -> None:
    """x ~ N(a, s^2) or N(0, s^2): the logarithm of the ratio is a (x - a / 2) / s^2, with the
    variance of the other elements. Where the mean of all x is above 3 / 2 the steps are longer than
    3: twice that mean."""
    direction = np.zeros((1, 5), np.float32)
    direction[0, 0] = 1.0
    canary = CanaryDevices(direction, np.ones((1, 1), np.bool_), np.ones(1, np.bool_))
    released = np.array([[1.25, 1.0, -1.0, 1.0, 1.0]])
    assert log_ratios(canary, np.array([[3.0]]), released) == pytest.approx([3 * (1.25 - 1.5)])
    released[0, 0] = 2.0
    assert log_ratios(canary, np.array([[3.0]]), released) == pytest.approx([4 * (2 - 2)])


def test_a_schedule_keeps_separation_and_participations() -> None:
    found = schedule(8, 7, 2, 2)
    assert [np.flatnonzero(row).tolist() for row in found] == [
        [0, 2],
        [0, 4],
        [1, 3],
        [1, 5],
        [0, 2],
        [2, 6],
        [1, 3],
        [3],
    ]
    assert schedule(4, 1, 5, 1).all()
    assert schedule(3, 4, 1, 4).sum(axis=1).tolist() == [4, 2, 4]


def test_a_model_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="10 canaries and 2 releases take more than 12 elements"):
        make_canaries(1, np.ones((10, 2), np.bool_), 12)
