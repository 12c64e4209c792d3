"""Element by element: against numpy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.robust.coordinatewise import (
    mean_around_median,
    median,
    trimmed_mean,
)

DRAWN = np.random.default_rng(0).normal(size=(9, 50))


@pytest.mark.parametrize("count", range(1, 10))
def test_the_median_is_numpys(count: int) -> None:
    np.testing.assert_array_equal(median(DRAWN[:count]), np.median(DRAWN[:count], axis=0))


def test_a_trimmed_mean_by_hand() -> None:
    column = np.array([[5.0], [-100.0], [1.0], [3.0], [100.0]])
    assert trimmed_mean(column, 1) == [3.0]
    assert trimmed_mean(column, 2) == [3.0]
    np.testing.assert_allclose(trimmed_mean(column, 0), [1.8])


def test_the_mean_around_the_median_by_hand() -> None:
    column = np.array([[9.0], [0.0], [1.0], [2.0], [4.0]])  # the median is 2
    assert mean_around_median(column, 1) == [2.0]
    assert mean_around_median(column, 2) == [1.5]  # 2 and 1
    assert mean_around_median(column, 3) == [1.0]  # 0 and 4 are equally far: the smaller
    assert mean_around_median(column, 5) == [3.2]


@pytest.mark.parametrize(
    "rule", [median, lambda v: trimmed_mean(v, 2), lambda v: mean_around_median(v, 3)]
)
def test_neither_the_order_of_the_rows_nor_two_wild_rows_matter_much(rule: object) -> None:
    assert callable(rule)
    np.testing.assert_array_equal(rule(DRAWN), rule(DRAWN[::-1]))
    wild = DRAWN.copy()
    wild[3:5] = 1e30
    assert np.abs(rule(wild)).max() <= np.abs(DRAWN).max()
