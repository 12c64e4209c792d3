from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_protocol.computations.shared_edges import (
    MAX_EXCHANGES,
    UNUSED,
    boundaries_for,
    count_between,
    equal_edges,
    first_boundaries,
    keys_of,
    refine,
    refine_range,
    values_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

LARGE = float(np.nextafter(UNUSED, np.float32(0)))
FLOATS = st.floats(-LARGE, LARGE, width=32)


def edges_of(column: np.ndarray, bins: int) -> tuple[np.ndarray, int]:
    """Return the edges, and how many counts they took."""
    boundaries, exchanges = first_boundaries(boundaries_for(bins)), 1
    counts = count_between(column, boundaries)
    while (finer := refine(boundaries, counts, bins)) is not None and exchanges < MAX_EXCHANGES:
        boundaries, exchanges = finer, exchanges + 1
        counts = count_between(column, boundaries)
    return equal_edges(boundaries, counts, bins), exchanges


def range_of(column: np.ndarray, size: int) -> tuple[float, float, int]:
    boundaries, exchanges = first_boundaries(size), 0
    while True:
        exchanges += 1
        finer, low, high = refine_range(boundaries, count_between(column, boundaries))
        if finer is None:
            return low, high, exchanges
        boundaries = finer


@settings(max_examples=30)
@given(arrays(np.float32, st.integers(1, 20), elements=FLOATS))
def test_keys_are_in_the_order_of_the_numbers(values: np.ndarray) -> None:
    keys = keys_of(values)
    assert (values_of(keys) == values).all()
    assert (np.sign(keys[:, None] - keys) == np.sign(values[:, None].astype(float) - values)).all()


def test_both_zeros_have_one_key_and_neighbours_differ_by_one() -> None:
    near = np.nextafter(np.float32(1), np.float32(2))
    keys = keys_of(np.array([0.0, -0.0, 1.0, near], np.float32))
    assert keys[0] == keys[1] == 0
    assert keys[3] - keys[2] == 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.normal(size=5000),
        lambda rng: rng.exponential(size=5000) * 1e6,
        lambda rng: 1.7e9 + rng.uniform(0, 3e7, 5000),
        lambda rng: np.exp(rng.normal(size=5000) * 8),
    ],
    ids=["normal", "exponential", "times", "wide"],
)
def test_bins_are_about_equally_full(draw: object) -> None:
    column = draw(np.random.default_rng(5)).astype(np.float32)
    edges, exchanges = edges_of(column, 16)
    assert exchanges <= 4
    assert (edges < UNUSED).sum() == 15
    filled = np.bincount(np.searchsorted(edges, column, side="right"), minlength=16)
    assert filled.min() > 0.5 * 5000 / 16
    assert filled.max() < 1.6 * 5000 / 16


def test_few_values_have_a_bin_each_with_the_edges_half_way() -> None:
    column = np.repeat(np.array([-3, 0, 1, 2, 10], np.float32), [8, 90, 40, 8, 50])
    edges, _ = edges_of(column, 32)
    assert edges[edges < UNUSED].tolist() == pytest.approx([-1.5, 0.5, 1.5, 6], abs=1e-6)


@settings(max_examples=30)
@given(arrays(np.float32, st.integers(1, 60), elements=FLOATS), st.integers(2, 9))
def test_edges_divide_any_values(column: np.ndarray, bins: int) -> None:
    edges, _ = edges_of(column, bins)
    used = edges[edges < UNUSED]
    assert edges.shape == (bins - 1,)
    assert (np.diff(used.astype(float)) > 0).all()
    # No bin is empty: each edge tells some values from some others.
    filled = np.bincount(np.searchsorted(used, column, side="right"), minlength=len(used) + 1)
    assert (filled > 0).all()
    if len(used) < bins - 1 and len({*column.tolist()}) > bins:
        # Fewer bins than allowed, and more values than bins: only where one value fills several.
        assert filled.max() > len(column) / bins


def test_missing_values_and_infinities() -> None:
    column = np.array([np.nan, -np.inf, 1, 2, np.inf, np.nan], np.float32)
    boundaries = np.array([1.5, UNUSED], np.float32)
    assert count_between(column, boundaries).tolist() == [2, 1, 1]
    assert equal_edges(boundaries, count_between(column, boundaries), 2)[0] == np.float32(1.5)
    assert range_of(column, 16)[1] == LARGE
    nothing = np.full(3, np.nan, np.float32)
    assert (edges_of(nothing, 4)[0] == UNUSED).all()
    assert range_of(nothing, 16)[:2] == (0.0, 0.0)


@settings(max_examples=30)
@given(arrays(np.float32, st.integers(1, 20), elements=FLOATS))
def test_a_range_is_found_to_the_last_bit(column: np.ndarray) -> None:
    low, high, exchanges = range_of(column, 128)
    assert (low, high) == (column.min(), column.max())
    assert exchanges <= 6


@pytest.mark.parametrize("count", [-1, 2**61])
def test_what_can_be_no_counts_is_refused_before_memory_is_taken_for_it(count: int) -> None:
    """These counts of one hostile device asked for eight million boundaries in the place of 512,
    others for gigabytes."""
    boundaries = first_boundaries(boundaries_for(64))
    counts = np.zeros(len(boundaries) + 1, np.int64)
    counts[[0, 200, 300, 400]] = 10**15, 1 - 10**15, 10**14, -(10**17)
    if count > 0:
        counts = np.full_like(counts, count)
    for refused in (refine, equal_edges):
        with pytest.raises(ValueError, match="values of a column were counted between"):
            refused(boundaries, counts, 64)
    with pytest.raises(ValueError, match="values of a column were counted between"):
        refine_range(boundaries, counts)
