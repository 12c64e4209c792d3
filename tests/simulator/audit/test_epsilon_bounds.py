"""Lower bounds on epsilon: against closed forms, exact sums of fractions, and a mechanism whose
epsilon is known."""

from __future__ import annotations

from fractions import Fraction
from math import comb, exp, log

import numpy as np
import pytest
from fleetlearn_simulator.audit.epsilon_bounds import (
    chance_of_guesses,
    one_run_bound,
    rates_bound,
    share_above,
    share_below,
)


def test_the_bound_of_guesses_that_are_all_right_has_a_closed_form() -> None:
    """Without delta P[all right] = q^r, so that q = 0.05^(1/r) and epsilon = log(q / (1 - q))."""
    q = 0.05 ** (1 / 100)
    assert one_run_bound(1000, 100, 100, 0.0) == pytest.approx(log(q / (1 - q)), rel=1e-12)
    assert one_run_bound(1000, 100, 100, 0.0) == pytest.approx(3.4930, abs=1e-4)


def test_half_of_the_guesses_right_proves_nothing() -> None:
    assert one_run_bound(100, 100, 50, 1e-6) == 0.0
    assert one_run_bound(100, 0, 0, 1e-6) == 0.0
    assert one_run_bound(100, 4, 4, 1e-6) == 0.0  # 1/16 is more than 0.05


def test_the_probability_of_theorem_5_2_is_that_of_fractions() -> None:
    """bits = 12, r = 9, v = 7, e^epsilon = 3, delta = 1/1000: q = 3/4, in whole numbers."""
    bits, r, v, q, delta = 12, 9, 7, Fraction(3, 4), Fraction(1, 1000)

    def exactly(w: int) -> Fraction:
        return comb(r, w) * q**w * (1 - q) ** (r - w)

    beta = sum(exactly(w) for w in range(v, r + 1))
    alpha = max(sum(exactly(w) for w in range(v - i, v)) / i for i in range(1, v + 1))
    expected = float(beta + 2 * bits * delta * alpha)
    assert chance_of_guesses(bits, r, v, log(3), 1e-3) == pytest.approx(expected, rel=1e-12)


def test_a_bound_is_too_large_for_randomised_response_once_in_twenty_runs_or_less() -> None:
    """Randomised response of epsilon = 1 tells each bit with probability e / (1 + e); how often
    the bound is above 1 is a sum of binomial probabilities, and must be at most 0.05. It comes
    close to 1 with many bits."""
    epsilon, bits = 1.0, 400
    q = exp(epsilon) / (1 + exp(epsilon))
    chances = [comb(bits, v) * q**v * (1 - q) ** (bits - v) for v in range(bits + 1)]
    first = next(v for v in range(bits + 1) if one_run_bound(bits, bits, v, 0.0) > epsilon)
    wrong = sum(chances[first:])
    assert 0.025 < wrong <= 0.05
    toss = np.random.default_rng(4).random(40_000) < q
    assert 0.9 < one_run_bound(toss.size, toss.size, int(toss.sum()), 0.0) < epsilon


def test_counts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 <= correct <= guesses <= bits"):
        one_run_bound(10, 11, 3, 0.0)


def test_the_interval_of_a_share_is_that_of_clopper_and_pearson() -> None:
    """Of 0 in n the upper end is 1 - 0.05^(1/n); the ends for 3 of 10 at 97.5 % are the 6.67 % and
    65.25 % of the usual tables."""
    assert share_above(0, 50, 0.95) == pytest.approx(1 - 0.05 ** (1 / 50), rel=1e-12)
    assert share_below(3, 10, 0.975) == pytest.approx(0.0667395, abs=1e-6)
    assert share_above(3, 10, 0.975) == pytest.approx(0.6524529, abs=1e-6)
    assert (share_below(0, 10, 0.95), share_above(10, 10, 0.95)) == (0.0, 1.0)


def test_the_bound_of_rates_by_hand() -> None:
    """With e = 0.025^(1/100): 100 of 100 members, 0 of 100 others: log((e - delta) / (1 - e))."""
    end = 0.025 ** (1 / 100)
    assert rates_bound(100, 100, 0, 100, 1e-3) == pytest.approx(log((end - 1e-3) / (1 - end)))
    assert rates_bound(50, 100, 50, 100, 1e-3) == 0.0
    # what is not accused tells as much as what is
    assert rates_bound(60, 100, 0, 100, 0.0) == rates_bound(100, 100, 40, 100, 0.0) > 1
