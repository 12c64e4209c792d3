"""Two exact sums made one: the bits of one sum that had all updates, also where bins are full."""

from collections.abc import Sequence

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import exact_mean, exact_merge
from fleetlearn_coordinator.aggregation.exact_mean import (
    GRIDS,
    MAX_ELEMENT,
    MAX_UPDATES,
    MAX_WEIGHT,
    USUAL,
    Sum,
)
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector
from hypothesis import given, settings
from hypothesis import strategies as st

Updates = list[tuple[Vector, int]]


def added(size: int, updates: Updates) -> Sum:
    total = exact_mean.init(size)
    for vector, weight in updates:
        exact_mean.add(total, (vector,), weight, float(np.abs(vector).max(initial=0.0)))
    return total


def in_units(total: Sum) -> list[int]:
    """Each element's sum in units of the finest grid: exact, however the bins share it."""
    sums = [0] * total.size
    for exponent, held in total.bins.items():
        for place, value in enumerate(np.ldexp(held, -exponent).tolist()):
            assert value == int(value)
            assert abs(value) <= 2**53
            sums[place] += int(value) << (exponent - GRIDS[-1])
    return sums


def merged(sums: Sequence[Sum]) -> Sum:
    total, *others = sums
    for other in others:
        exact_merge.merge(total, other)
    return total


FLOAT32 = st.floats(width=32, allow_nan=False, min_value=-MAX_ELEMENT, max_value=MAX_ELEMENT)
SCALES = st.sampled_from([0, 0, 0, 7, 20, 40, 60, 100, 140]).map(lambda by: np.float32(2.0**-by))


@st.composite
def some_updates(draw: st.DrawFn) -> Updates:
    """Updates of every magnitude that float32 has, up to the largest allowed, with any weight."""
    size = draw(st.integers(1, 5))
    rows = st.lists(FLOAT32, min_size=size, max_size=size)
    vectors = rows.map(lambda row: np.array(row, np.float32))
    update = st.tuples(vectors, SCALES, st.integers(1, MAX_WEIGHT) | st.integers(1, 100))
    drawn = draw(st.lists(update, min_size=1, max_size=12))
    return [(vector * scale, weight) for vector, scale, weight in drawn]


@settings(max_examples=150, deadline=None)
@given(some_updates(), st.integers(1, 4), st.booleans())
def test_partial_sums_are_the_whole_one(updates: Updates, cuts: int, restarted: bool) -> None:
    size = len(updates[0][0])
    expected = added(size, updates)
    parts = [added(size, updates[start::cuts]) for start in range(cuts)]
    if restarted:  # a partial sum that another process has sent
        parts = [exact_mean.from_tensors(exact_mean.to_tensors(part)) for part in parts]
    total = merged(parts[::-1])
    assert in_units(total) == in_units(expected)
    assert (total.weight, total.count) == (expected.weight, expected.count)
    assert exact_mean.mean(total).tobytes() == exact_mean.mean(expected).tobytes()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 6), st.sampled_from([USUAL, USUAL - 36, USUAL - 72]))
def test_full_bins_are_carried(seed: int, sums: int, exponent: int) -> None:
    """Each has as much whole in a bin as a sum takes: added up they would not be exact."""
    random = np.random.default_rng(seed)
    most = 2**52  # multiples of the grid, of updates that are whole in it; and as many of parts
    parts, expected = [], [0, 0, 0]
    for _ in range(sums):
        multiples = random.integers(2 * most - 2**20, 2 * most, 3) * random.choice([-1, 1], 3)
        held = np.ldexp(multiples.astype(np.float64), exponent)
        parts.append(Sum(3, {exponent: held}, {exponent: float(most) * 2.0**exponent}, 2, 2))
        expected = [a + int(b) for a, b in zip(expected, multiples, strict=True)]
    total = merged(parts)
    assert in_units(total) == [value << (exponent - GRIDS[-1]) for value in expected]
    assert total.whole[exponent] < 2.0 ** (exponent + 52)
    more = np.full(3, np.float32(2.0 ** (exponent + 30)))
    before = in_units(total)
    exact_mean.add(total, (more,), 3, float(more[0]))
    step = 3 << (exponent + 30 - GRIDS[-1])
    assert in_units(total) == [value + step for value in before]


def test_a_carry_leaves_bins_that_add_up_to_the_same_bits() -> None:
    """The bin of 2^-44 is too full only together."""
    size = 4
    heavy = [(np.full(size, np.float32(2.0**-20 * (1 + k / 7))), 2**26) for k in range(6)]
    one = added(size, heavy * 2)
    halves = [added(size, heavy), added(size, heavy)]
    for half in halves:
        half.whole[USUAL] = 2.0 ** (USUAL + 52) - 1
    total = merged(halves)
    assert total.whole[USUAL] < 2.0 ** (USUAL + 52)
    assert in_units(total) == in_units(one)
    assert exact_mean.mean(total).tobytes() == exact_mean.mean(one).tobytes()


def test_what_does_not_fit_together_changes_nothing() -> None:
    updates = [(np.ones(3, np.float32), 2)]
    total = added(3, updates)
    with pytest.raises(ValueError, match="sums of 3 and of 4 elements cannot be merged"):
        exact_merge.merge(total, exact_mean.init(4))
    full = added(3, updates)
    full.count = MAX_UPDATES
    with pytest.raises(ProtocolError, match="have 131073 updates together") as refused:
        exact_merge.merge(total, full)
    assert refused.value.code is Code.OUT_OF_RANGE
    assert (in_units(total), total.count) == (in_units(added(3, updates)), 1)


def test_nothing_merged_is_nothing_added() -> None:
    total = added(3, [(np.ones(3, np.float32), 2)])
    exact_merge.merge(total, exact_mean.init(3))
    assert exact_mean.mean(total).tolist() == [1.0, 1.0, 1.0]
    empty = exact_mean.init(3)
    exact_merge.merge(empty, total)
    assert exact_mean.mean(empty).tolist() == [1.0, 1.0, 1.0]
