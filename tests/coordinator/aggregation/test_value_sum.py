"""The sum of buffers' values: exact, in any order, and its mean within the values' range."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from fleetlearn_coordinator.aggregation import value_sum
from fleetlearn_coordinator.aggregation.exact_mean import (
    MAX_UPDATES,
    MAX_WEIGHT,
    multiplier,
    multipliers,
)
from hypothesis import given
from hypothesis import strategies as st

Report = tuple[list[float], int, float]
"""Values, weight, and how far they count."""
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False)
REPORTS = st.lists(
    st.tuples(
        st.lists(VALUES, min_size=2, max_size=2),
        st.integers(1, MAX_WEIGHT),
        st.floats(1e-3, 1.0),
    ),
    min_size=1,
    max_size=6,
)


def added(reports: list[Report], bins: value_sum.Bins | None = None) -> value_sum.Bins:
    bins = value_sum.init(2) if bins is None else bins
    for values, weight, factor in reports:
        value_sum.add(bins, np.array([values], np.float32), np.array([multiplier(weight, factor)]))
    return bins


def mean(reports: list[Report], present: list[float]) -> list[float]:
    weight = sum(weight for _, weight, _ in reports)
    return (
        value_sum.mean(added(reports), weight, np.array(present, np.float32))
        .astype(np.float32)
        .tolist()
    )


def test_two_devices_by_hand() -> None:
    """(1 * 2 + 3 * 10) / 4 is 8. Where the second counts by half: (2 + 3 * (10 + 4) / 2) / 4 is
    5.75 of 4's model."""
    assert mean([([2.0, 2.0], 1, 1.0), ([10.0, 2.0], 3, 1.0)], [4.0, 4.0]) == [8.0, 2.0]
    assert mean([([2.0, 4.0], 1, 1.0), ([10.0, 4.0], 3, 0.5)], [4.0, 4.0]) == [5.75, 4.0]


def test_a_stale_variance_stays_a_variance() -> None:
    """What the issue saw: the model's is .18 by now, six devices that began from 1 measured .2 and
    count by half. The sum of their differences, x + mean(s (y - x_old)), is .18 - .4 = -.22."""
    (found, _) = mean([([0.2, 0.2], 40, 0.5)] * 6, [0.18, 0.18])
    assert found == np.float32(0.19)


@given(REPORTS, st.lists(VALUES, min_size=2, max_size=2))
def test_the_mean_is_within_the_range_of_its_values(
    reports: list[Report], present: list[float]
) -> None:
    found = mean(reports, present)
    for place, value in enumerate(found):
        all_values = [present[place], *(values[place] for values, _, _ in reports)]
        assert min(all_values) <= value <= max(all_values)


@given(REPORTS, st.randoms(use_true_random=False))
def test_any_order_and_division_give_the_same_bits(reports: list[Report], random: object) -> None:
    expected = added(reports).tobytes()
    shuffled = [*reports]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    half = len(shuffled) // 2
    restored = (
        np.frombuffer(added(shuffled[:half]).tobytes()).reshape(len(value_sum.GRIDS), -1).copy()
    )
    assert added(shuffled[half:], restored).tobytes() == expected
    together = value_sum.init(2)
    rows = np.array([values for values, _, _ in reports], np.float32)
    weights, factors = (
        np.array([weight for _, weight, _ in reports]),
        np.array([factor for *_, factor in reports]),
    )
    value_sum.add(together, rows, multipliers(weights, factors))
    assert together.tobytes() == expected


@given(REPORTS)
def test_the_sum_is_exact(reports: list[Report]) -> None:
    bins, least = added(reports), Fraction(2) ** min(value_sum.GRIDS)
    for place in range(3):
        values = [Fraction(1.0 if place == 2 else float(row[place])) for row, _, _ in reports]
        times = [Fraction(multiplier(weight, factor)) for _, weight, factor in reports]
        exact = sum(a * b for a, b in zip(values, times, strict=True))
        assert abs(sum(map(Fraction, bins[:, place].tolist())) - exact) <= len(reports) * least / 2


def test_no_finite_value_is_too_large_whatever_the_weight() -> None:
    """A running variance of air pressure in Pascal is 1e10; the largest float32 has room too."""
    most = float(np.finfo(np.float32).max)
    assert mean([([1e10, most], MAX_WEIGHT, 1.0)] * 3, [1.0, 1.0]) == [
        float(np.float32(1e10)),
        most,
    ]


def test_as_many_reports_as_a_round_holds_are_added_exactly() -> None:
    bins, rows = value_sum.init(1), np.full((MAX_UPDATES, 1), np.finfo(np.float32).max)
    value_sum.add(bins, rows, np.full(MAX_UPDATES, float(MAX_WEIGHT)))
    exact = MAX_UPDATES * MAX_WEIGHT * Fraction(float(rows[0, 0]))
    assert sum(map(Fraction, bins[:, 0].tolist())) == exact


def test_what_hardly_counts_hardly_moves_the_mean() -> None:
    """A clipped report: 3e38 at a distance of 3e38 from the model, with a bound of 1."""
    assert mean([([3e38, 0.0], 7, 1 / 3e38)], [0.0, 0.0])[0] == np.float32(1.0)
