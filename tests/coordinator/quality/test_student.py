"""Student's t distribution, beside closed forms and SciPy's."""

from __future__ import annotations

from math import atan, log10, pi, sqrt

import pytest
from fleetlearn_coordinator.quality.student import log10_two_sided


@pytest.mark.parametrize("t", [1e-9, 0.1, 1.0, -3.0, 40.0, 1e4])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t: float) -> None:
    cauchy = 1 - 2 / pi * atan(abs(t)) if abs(t) < 10 else 2 / pi * atan(1 / abs(t))
    assert log10_two_sided(t, 1) == pytest.approx(log10(cauchy), abs=1e-12)
    root = sqrt(2 + t * t)
    two = 2 / (root * (root + abs(t)))
    assert log10_two_sided(t, 2) == pytest.approx(log10(two), abs=1e-12)


@pytest.mark.parametrize("freedom", [1, 2.5, 3, 10, 100, 1000])
@pytest.mark.parametrize("t", [0.0, 1e-6, 0.3, 1.0, 1.9, 5.0, 12.0])
def test_it_is_scipys(t: float, freedom: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = 2 * stats.t.sf(t, freedom)
    assert log10_two_sided(t, freedom) == pytest.approx(log10(expected), abs=1e-9)


def test_it_says_more_than_a_float_holds() -> None:
    assert log10_two_sided(1e3, 1000) < -1000


def test_a_value_too_small_to_be_squared_is_no_rare_one() -> None:
    assert log10_two_sided(1e-200, 5) == 0.0
