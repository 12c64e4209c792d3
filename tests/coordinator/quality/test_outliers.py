"""Devices unlike the others."""

from __future__ import annotations

from math import inf, log10, sqrt

import numpy as np
import pytest
from fleetlearn_coordinator.quality.outliers import FEWEST, DeviceFigure, corrected, unlikeness


def test_a_hand_worked_case() -> None:
    """The others are 1, 2, 3: mean 2, deviation 1. One more would lie at 2 + sqrt(4/3) t."""
    found = unlikeness(
        {"a": DeviceFigure(1), "b": DeviceFigure(2), "c": DeviceFigure(3), "d": DeviceFigure(6)}
    )
    t = 4 / sqrt(4 / 3)
    two_degrees = 2 / (sqrt(2 + t * t) * (sqrt(2 + t * t) + t))
    assert found["d"].others == 2
    assert found["d"].deviations == 4
    assert found["d"].log10_p == pytest.approx(log10(two_degrees))
    assert min(found, key=lambda name: found[name].log10_p) == "d"


def test_the_same_test_as_grubbs() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(3).normal(size=12)
    found = unlikeness({str(place): DeviceFigure(value) for place, value in enumerate(values)})
    n = len(values)
    g = np.abs(values - values.mean()) / values.std(ddof=1)
    t = g * np.sqrt(n * (n - 2) / ((n - 1) ** 2 - n * g**2))
    expected = np.log10(2 * stats.t.sf(t, n - 2))
    assert [each.log10_p for each in found.values()] == pytest.approx(expected.tolist())


def test_fleets_without_an_outlier_raise_few_alarms() -> None:
    generator = np.random.default_rng(7)
    alarms = 0
    for _ in range(2000):
        values = generator.normal(size=6)
        numbers = {str(place): DeviceFigure(value) for place, value in enumerate(values)}
        p_values = corrected([each.log10_p for each in unlikeness(numbers).values()])
        alarms += min(p_values) < log10(0.05)
    assert 40 < alarms < 140  # at most 5 % of 2000, and not none


def test_an_uncertain_number_is_no_outlier() -> None:
    numbers = {
        name: DeviceFigure(value, 0.01) for name, value in zip("abc", (1, 1.1, 0.9), strict=True)
    }
    sure = unlikeness({**numbers, "d": DeviceFigure(5, 0.1)})["d"].log10_p
    unsure = unlikeness({**numbers, "d": DeviceFigure(5, 4.0)})["d"].log10_p
    assert sure < log10(0.01)
    assert unsure > log10(0.2)


def test_devices_that_are_all_alike_show_any_other() -> None:
    numbers = {name: DeviceFigure(2.0) for name in "abc"}
    assert unlikeness({**numbers, "d": DeviceFigure(2.0)})["d"].log10_p == 0.0
    found = unlikeness({**numbers, "d": DeviceFigure(2.5)})["d"]
    assert (found.deviations, found.log10_p) == (inf, -inf)


def test_with_few_devices_nothing_is_said() -> None:
    assert unlikeness({str(place): DeviceFigure(place) for place in range(FEWEST - 1)}) == {}


def test_holms_correction() -> None:
    """Holm 1979: 0.01 * 3, max(that, 0.02 * 2), max(that, 0.03 * 1)."""
    found = corrected([log10(0.03), log10(0.01), log10(0.02)])
    assert [10**each for each in found] == pytest.approx([0.04, 0.03, 0.04])
    assert corrected([]) == []
    assert corrected([0.0, 0.0]) == [0.0, 0.0]
