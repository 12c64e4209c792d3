"""Whether a metric still improves."""

from __future__ import annotations

from math import inf, isfinite, nan

import pytest
from fleetlearn_coordinator.rounds.improvement import Improvement, MeasuredModel
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("below", "least", "values", "best", "without"),
    [
        (False, 0.0, [], None, 0),
        (False, 0.0, [0.5], (0, 0.5), 0),
        (False, 0.0, [0.5, 0.5, 0.4], (0, 0.5), 2),
        (False, 0.0, [0.5, 0.4, 0.6, 0.6], (2, 0.6), 1),
        (True, 0.0, [0.5, 0.4, 0.6, 0.4], (1, 0.4), 2),
        # 0.55 and 0.6 are better, and not by more than 0.125; 0.65 is, beyond 0.5.
        (False, 0.125, [0.5, 0.55, 0.6], (2, 0.6), 2),
        (False, 0.125, [0.5, 0.55, 0.6, 0.65], (3, 0.65), 0),
        (False, 0.125, [0.5, 0.625], (1, 0.625), 1),
        (True, 0.125, [0.5, 0.25, 0.2], (2, 0.2), 1),
        (True, 0.0, [nan, inf], None, 2),
        (True, 0.0, [nan, 0.5, nan, inf], (1, 0.5), 2),
        (False, 0.0, [inf, 0.5], (1, 0.5), 0),
    ],
)
def test_by_hand(
    below: bool,
    least: float,
    values: list[float],
    best: tuple[int, float] | None,
    without: int,
) -> None:
    found = Improvement(below, least)
    for version, value in enumerate(values):
        found.note(version, value)
    assert found.best == best
    assert found.without == without
    found.clear()
    assert (found.best, found.without, found.values) == (None, 0, {})
    found.note(9, 0.1)
    assert (found.best, found.without) == (MeasuredModel(9, 0.1), 0)


VALUES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0, nan, inf, -inf]), st.floats(-2, 2))


@given(
    st.booleans(),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.lists(st.tuples(st.integers(0, 12), VALUES), max_size=20),
)
def test_it_follows_from_the_last_value_of_each_version_in_any_order(
    below: bool, least: float, notes: list[tuple[int, float]]
) -> None:
    """So what a process knows is what its successor reads."""
    found, again = Improvement(below, least), Improvement(below, least)
    for version, value in notes:
        found.note(version, value)
    values = sorted(dict(notes).items())
    for version, value in values:
        again.note(version, value)
    assert (found.best, found.without) == (again.best, again.without)
    assert [*map(repr, found.values.items())] == [*map(repr, values)]
    # The definition, without a state: the measured models after the last improvement.
    sign, without, reference = -1 if below else 1, 0, None
    for _, value in values:
        improved = isfinite(value) and (
            reference is None or sign * value > sign * (reference + sign * least)
        )
        reference, without = (value, 0) if improved else (reference, without + 1)
    assert found.without == without
    good = [(sign * value, -version) for version, value in values if isfinite(value)]
    assert found.best == (None if not good else (-max(good)[1], sign * max(good)[0]))
