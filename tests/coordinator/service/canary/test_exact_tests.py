"""A canary's statistics, against scipy's and against cases worked by hand."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.service.canary.exact_tests import (
    least_share,
    most_are_above,
    share_rises,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, int]:
    all_ = draw(st.integers(1, 300))
    return draw(st.integers(0, all_)), all_


@given(shares(), shares())
def test_a_share_that_rises_is_fishers_exact_test(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    table = [[bad, all_ - bad] for bad, all_ in (one, other)]
    expected = stats.fisher_exact(table, alternative="greater").pvalue
    assert share_rises(*one, *other) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(shares())
def test_the_sign_test_is_a_binomial_tail(found: tuple[int, int]) -> None:
    expected = stats.binomtest(*found, 0.5, alternative="greater").pvalue
    assert most_are_above(*found) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(shares(), st.sampled_from([0.9, 0.99, 0.999]))
def test_the_least_share_is_wilsons(found: tuple[int, int], certainty: float) -> None:
    test = stats.binomtest(*found, 0.5, alternative="greater")
    expected = test.proportion_ci(certainty, method="wilson").low
    assert least_share(*found, certainty) == pytest.approx(max(0.0, expected), abs=1e-9)


def test_by_hand() -> None:
    # Of 52 tasks 2 are bad, and both are among the canary's 2: one of 1,326 pairs.
    assert share_rises(2, 2, 0, 50) == pytest.approx(1 / 1326)
    assert most_are_above(10, 10) == pytest.approx(1 / 1024)
    # z = 0 in the middle: the share itself.
    assert least_share(3, 4, 0.5) == pytest.approx(0.75)


def test_nothing_is_known_of_an_empty_group() -> None:
    assert share_rises(0, 0, 5, 10) == share_rises(5, 10, 0, 0) == 1.0
    assert most_are_above(0, 0) == 1.0
    assert least_share(0, 0, 0.999) == 0.0


def test_many_tasks_take_no_time() -> None:
    assert share_rises(60_000, 1_000_000, 500_000, 10_000_000) == pytest.approx(0.0, abs=1e-300)
    assert share_rises(40_000, 1_000_000, 500_000, 10_000_000) == pytest.approx(1.0)
    assert 0.4 < share_rises(50_000, 1_000_000, 500_000, 10_000_000) < 0.6
