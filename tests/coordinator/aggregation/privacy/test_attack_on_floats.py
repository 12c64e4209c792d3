"""Which floats can occur tells what a sum was: Mironov's attack, on noise in floating point and on
ours.

Ilya Mironov, "On Significance of the Least Significant Bits for Differential Privacy" (CCS 2012):
noise that is added in floating point leaves a mark. The sum of a value and of a float is rounded to
the float's last place, so that some results occur with one value and never with another, however
large the noise is. Here one device is in the sum or not. The noise is far larger than what it adds:
whoever has to tell both apart by size alone is right in little more than half of the cases.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erf, sqrt

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.privacy import mechanisms
from fleetlearn_coordinator.aggregation.privacy.release import begin, release
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.state import Buffers, Drawn
from numpy.typing import NDArray

SIZE, GOAL, NOISE = 2**16, 8, 10.0
"""A division by 8 does not round."""
RULES = PrivacyRules(mechanism="gaussian", noise=NOISE, clip=1.0, goal=GOAL, participations=1)
VALUE = 1 / 256
"""The device adds this to each element: together the clip norm 1."""
TRIALS = 60
Release = Callable[[NDArray[np.float64], int], NDArray[np.float64]]


def ours(total: NDArray[np.float64], trial: int) -> NDArray[np.float64]:
    return release(RULES, begin(RULES, trial.to_bytes(32, "little"), SIZE), total).mean


def naive(total: NDArray[np.float64], trial: int) -> NDArray[np.float64]:
    """What nearly everybody writes."""
    return (total + np.random.default_rng(trial).normal(0.0, NOISE, SIZE)) / GOAL


def was_there(mean: NDArray[np.float64]) -> bool:
    """The attack: say whether the device was in the sum.

    With the device a result between -VALUE / 2 and VALUE / 2 is VALUE + x of a float x of at least
    half of its size: exact, and a multiple of the last place of VALUE / 2. Without it, a result is
    a float of its own size, and has finer places."""
    sums = mean * GOAL
    near = sums[np.abs(sums) < VALUE / 2]
    last_place = float(np.spacing(VALUE / 2))
    return bool(np.array_equal(near / last_place, np.rint(near / last_place)))


def right_guesses(mechanism: Release) -> float:
    """The share of trials in which the attack is right. Half of them have the device."""
    right = 0
    for trial in range(TRIALS):
        there = trial % 2 == 0
        total = np.full(SIZE, VALUE if there else 0.0)
        right += was_there(mechanism(total, trial)) == there
    return right / TRIALS


MOST = 0.5 + erf(1 / NOISE / sqrt(8)) / 2 + 3 * sqrt(0.25 / TRIALS)
"""What the privacy of the Gaussian mechanism allows, (1 + TV) / 2 with TV = erf(mu / sqrt(8)), and
three standard deviations of TRIALS guesses."""


def test_the_attack_breaks_noise_in_floating_point() -> None:
    assert right_guesses(naive) > 0.95 > MOST


def test_the_attack_does_not_break_ours() -> None:
    assert right_guesses(ours) < MOST


def of_floats(
    rules: PrivacyRules, sigma: float, secret: bytes, buffers: Buffers, size: int
) -> Drawn:
    """Planted mistake: a sampler of floats in the place of ours."""
    random = np.random.default_rng(int.from_bytes(secret, "little"))
    return Drawn(random.normal(0.0, sigma, size), {})  # type: ignore[arg-type]


def put_in_place(patch: pytest.MonkeyPatch, draw: Callable[..., Drawn]) -> None:
    row = mechanisms.MECHANISMS["gaussian"]._replace(draw=draw)
    patch.setitem(mechanisms.MECHANISMS, "gaussian", row)  # type: ignore[misc]


def test_a_sampler_of_floats_cannot_take_the_place_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_in_place(monkeypatch, of_floats)
    with pytest.raises(TypeError, match="'add' output from dtype\\('float64'\\)"):
        ours(np.zeros(SIZE), 1)


def test_a_release_with_noise_of_floats_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a release is ours, its grid too, but for the noise."""

    def mixed(total: NDArray[np.float64], trial: int) -> NDArray[np.float64]:
        return ours(total, trial) + naive(np.zeros(SIZE), trial)

    zeros = Drawn(np.zeros(SIZE, np.int64), {})
    put_in_place(monkeypatch, lambda *arguments: zeros)
    assert right_guesses(mixed) > 0.95


@pytest.mark.parametrize("value", [0.0, VALUE, 1 / 3, -1e-7])
def test_whatever_the_sum_is_the_same_floats_can_occur(value: float) -> None:
    """All multiples of one step, which the plan alone decides; as likely as the normal law says."""
    sums = ours(np.full(SIZE, value), 1) * GOAL
    step = 2.0 ** (3 - 30)  # of noise between 2^3 and 2^4
    steps = sums / step
    assert np.array_equal(steps, np.rint(steps))
    odd = np.mod(steps, 2).mean()
    assert abs(odd - 0.5) < 5 * sqrt(0.25 / SIZE), "no step is left out"
