"""Correlated noise in whole numbers: what it is, that it cancels, and what rounding can do."""

from __future__ import annotations

from itertools import product
from math import sqrt
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.privacy import correlated
from fleetlearn_coordinator.aggregation.privacy.blt import BltStrategy, correlated_sensitivity
from fleetlearn_coordinator.aggregation.privacy.release import begin, release
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_protocol import discrete_gaussian
from strategy_matrices import inverse, toeplitz

SECRET = bytes(range(32))
SIGMA = 1.5 * 2**30


def rules_of(planned: int = 30, **more: Any) -> PrivacyRules:
    usual: dict[str, Any] = {
        "mechanism": "dp-ftrl",
        "noise": 4.0,
        "clip": 0.5,
        "goal": 1,
        "separation": 10,
        "participations": 3,
        "planned": planned,
    }
    return PrivacyRules(**(usual | more))


def noises(rules: PrivacyRules, size: int, sigma: float = SIGMA) -> np.ndarray:
    """Return the noise of all planned releases, int64, (T, P)."""
    buffers, rows = correlated.begin(rules, size), []
    for number in range(rules.planned):
        noise, buffers = correlated.draw(rules, sigma, bytes([number]) * 32, buffers, size)
        rows.append(noise)
    return np.array(rows)


def fresh(rules: PrivacyRules, size: int, sigma: float = SIGMA) -> np.ndarray:
    return np.array(
        [
            discrete_gaussian.sample(sigma, size, bytes([number]) * 32)
            for number in range(rules.planned)
        ]
    )


def test_the_noise_is_that_of_the_dense_matrix_but_for_rounding() -> None:
    """C n is z, to the bound that ``rounding`` gives."""
    rules = rules_of()
    strategy = correlated.strategy_of(rules)
    matrix = toeplitz(strategy.coefficients(30)).astype(np.longdouble)
    errors = matrix @ noises(rules, 4000) - fresh(rules, 4000)
    bound = correlated.rounding(strategy, 30)
    assert 0.4 < np.abs(errors).max() <= bound < 0.6


@pytest.mark.parametrize("planned", [1, 5, 400])
def test_buffers_stay_within_what_they_are_made_for(planned: int) -> None:
    """With the farthest noise that there is, of the sign that moves each buffer most."""
    rules = rules_of(planned)
    strategy = correlated.strategy_of(rules)
    bits = correlated.fraction_bits(strategy, planned)
    response = inverse(strategy.coefficients(planned))
    for theta in strategy.theta:
        decays = theta ** np.arange(planned)
        of_impulse = np.convolve(decays, response)[:planned]
        most = 38 * 2.0**31 * np.abs(of_impulse).sum() * 2**bits
        assert most < 2**52
    assert 0 <= bits <= 16


def test_refuses_more_releases_than_fit() -> None:
    strategy = BltStrategy((1 - 2.0**-40,), (2.0**-40,))
    with pytest.raises(ValueError, match="does not fit the 64 bits"):
        correlated.fraction_bits(strategy, 60_000)


def test_what_one_device_moves_is_bounded_with_all_rounding() -> None:
    """All histories of small whole numbers, all neighbours: the centre of the noise moves by no
    more than C (x - x') and twice the bound of the error."""
    rules = rules_of(3, separation=1, participations=2)
    strategy = correlated.strategy_of(rules)
    matrix = toeplitz(strategy.coefficients(3))
    bound = correlated.rounding(strategy, 3)

    bits = correlated.fraction_bits(strategy, 3)

    def centres(x: np.ndarray, released: np.ndarray) -> np.ndarray:
        """x_t - g_t, where the noise so far was what is released less x. Shape (3,)."""
        buffers, found = correlated.begin(rules, 1), []
        for value, result in zip(x, released, strict=True):
            without = correlated.correlate(strategy, bits, np.zeros(1, np.int64), buffers)
            taken = -without.noise
            found.append(value - taken[0])
            z = result - value + taken  # with which n is what was released less x
            noise, buffers = correlated.correlate(strategy, bits, z, buffers)
            assert noise == result - value
        return np.array(found)

    most = 0.0
    for history in product((-7, 3), repeat=3):
        released = np.array(history)
        for x in product((0, 5), (0, -4), (0, 1)):
            if np.count_nonzero(x) > 2:
                continue
            moved = centres(np.array(x), released) - centres(np.zeros(3, np.int64), released)
            error = np.abs(moved - matrix @ np.array(x))
            assert (error <= 2 * bound).all()
            most = max(most, float(error.max()))
    assert most > 0.5  # rounding is there


def test_slack_is_what_rounding_adds_to_the_sensitivity() -> None:
    """In units of the clip norm: 2 |e| in P elements of T releases, each a step of the grid."""
    rules = rules_of(30)
    size = 1_660_000
    step = 2.0**-30 * rules.noise  # in units of the clip norm, at most
    bound = correlated.rounding(correlated.strategy_of(rules), 30)
    added = 2 * bound * step * sqrt(size * 30)
    assert added <= correlated.slack(rules, size) <= 2.001 * added
    assert correlated.slack(rules, size) < 1e-4  # of the noise
    more = rules_of(30, metrics=True, metrics_noise=5.0)  # the mean's noise is larger then
    assert correlated.slack(more, size) > 1.5 * correlated.slack(rules, size)


def test_the_noise_in_the_sum_of_releases_has_the_variance_of_the_matrix() -> None:
    """Over 20,000 elements, each with noise of its own; and far less than independent noise."""
    size = 20_000
    rules = rules_of()
    state, total = begin(rules, SECRET, size), np.zeros(size)
    sums, found = np.zeros(size), []
    for _ in range(30):
        mean, state = release(rules, state, total)
        sums += mean
        found.append(float((sums**2).mean()))
    column = correlated.strategy_of(rules).coefficients(30)
    sigma = rules.noise * rules.clip
    expected = sigma**2 * np.cumsum(np.cumsum(inverse(column)) ** 2)
    assert np.array(found) == pytest.approx(expected, rel=5 * sqrt(2 / size))
    # With independent noise of the same epsilon:
    independent = (sigma * sqrt(3) / correlated_sensitivity(30, 10, 3)) ** 2 * 30
    assert found[-1] < 0.6 * independent


def test_fresh_noise_of_another_release_is_not_that_of_this_one() -> None:
    """C n is z, and no two z_t are the same or correlated."""
    size = 20_000
    rules = rules_of(3)
    state, rows = begin(rules, SECRET, size), []
    for _ in range(3):
        mean, state = release(rules, state, np.zeros(size))
        rows.append(mean)
    z = toeplitz(correlated.strategy_of(rules).coefficients(3)) @ np.array(rows)
    assert np.abs(np.corrcoef(z) - np.eye(3)).max() < 5 / sqrt(size)


def test_the_same_state_makes_the_same_noise_and_changes_nothing() -> None:
    rules = rules_of()
    state = begin(rules, SECRET, 100)
    total = np.linspace(-3, 3, 100)
    for _ in range(3):
        before = {name: values.copy() for name, values in state.buffers.items()}
        first, again = release(rules, state, total), release(rules, state, total)
        assert first.mean.tobytes() == again.mean.tobytes()
        for name, values in before.items():
            assert (state.buffers[name] == values).all()
            assert (first.state.buffers[name] == again.state.buffers[name]).all()
        state = first.state


def test_no_more_releases_than_planned() -> None:
    rules = rules_of(2)
    state = begin(rules, SECRET, 5, releases=7)
    for _ in range(2):
        _, state = release(rules, state, np.zeros(5))
    with pytest.raises(ValueError, match="plan more rounds, with which another noise begins"):
        release(rules, state, np.zeros(5))
    independent = rules_of(2, mechanism="gaussian")
    release(independent, state, np.zeros(5))


def test_a_model_larger_than_a_block() -> None:
    """Each element's noise is that of the same element in a smaller model's."""
    rules = rules_of(3)
    size = correlated.BLOCK + 5
    assert (noises(rules, size)[:, :100] == noises(rules, 100)).all()
    assert (fresh(rules, size)[0] == noises(rules, size)[0]).all()
