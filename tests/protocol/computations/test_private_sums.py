"""Scaled and clipped sums: no device's are longer than the clip norm, whatever its rows; what the
scales and the noise of each number are."""

from __future__ import annotations

from math import log, pi, sqrt

import numpy as np
import pytest
from fleetlearn_protocol.computations.private_sums import (
    LENGTH,
    SumsGroup,
    clip_sums,
    in_rows,
    is_short,
    noise_of_first_sums,
    noise_of_sums,
    root_of_prefix_sums,
    squared_norm,
    unscale,
)
from hypothesis import given
from hypothesis import strategies as st

GROUPS = (
    SumsGroup(np.array([0]), 1.0),
    SumsGroup(np.array([1, 2, 3, 4]), 1.0, ordered=True),
    SumsGroup(np.array([6]), 2.0**29),
)
"""Place 5 is in none."""
SUMS = st.lists(st.integers(-(2**62), 2**62), min_size=7, max_size=7)
CLIPS = st.floats(1e-3, 1e9)


@given(SUMS, CLIPS)
def test_what_a_device_sends_is_never_longer_than_the_clip_norm(
    numbers: list[int], clip: float
) -> None:
    """In whole numbers, so that nothing is rounded in the comparison."""
    sent = clip_sums(np.array(numbers), GROUPS, clip).sums
    assert sum(int(each) ** 2 for each in sent) <= LENGTH**2
    assert is_short(sent)
    assert sent[5] == 0


@given(SUMS, st.lists(SUMS, min_size=1, max_size=3), CLIPS)
def test_neighbouring_totals_differ_by_at_most_the_clip_norm(
    own: list[int], others: list[list[int]], clip: float
) -> None:
    def total(devices: list[list[int]]) -> np.ndarray:
        sent = [clip_sums(np.array(device), GROUPS, clip).sums for device in devices]
        return np.sum(sent, axis=0)

    moved = total([own, *others]) - total([[0] * 7, *others])
    assert squared_norm(moved) <= LENGTH**2
    assert np.linalg.norm(in_rows(moved, clip)) <= clip * (1 + 1e-15)


@given(st.lists(st.integers(-LENGTH, LENGTH), min_size=1, max_size=9))
def test_the_squared_norm_is_exact(numbers: list[int]) -> None:
    assert squared_norm(np.array(numbers)) == sum(each**2 for each in numbers)


def test_a_norm_above_the_bound_by_one_step_is_found() -> None:
    assert is_short(np.array([LENGTH, 0]))
    assert not is_short(np.array([LENGTH, 1]))
    assert not is_short(np.array([0, -(2**63)]))  # whose square has no room


def test_devices_with_few_rows_are_not_shortened() -> None:
    """A device with C rows, each of which moves the sums by at most 1."""
    rows = np.zeros(7, np.int64)
    rows[[0, 2, 6]] = 40, 40, 40 * 2**29  # all rows in one range, all at the end
    sent = clip_sums(rows, GROUPS, 40.0)
    assert not sent.clipped
    back = unscale(in_rows(sent.sums, 40.0), GROUPS)
    assert back[:5].tolist() == [40, 0, 40, 0, 0]
    assert back[6] == pytest.approx(40 * 2**29, rel=1e-6)


def test_a_device_with_many_rows_counts_as_fewer_of_the_same() -> None:
    rows = np.array([100, 20, 60, 20, 0, 9, 100 * 2**28])
    sent = clip_sums(rows, GROUPS, 25.0)
    assert sent.clipped
    back = unscale(in_rows(sent.sums, 25.0), GROUPS)
    assert 25 < back[0] < 100
    assert back[6] / back[0] == pytest.approx(2**28, rel=0.02)  # its mean is the same
    assert back[1:5] == pytest.approx(rows[1:5] * back[0] / 100, abs=1)


def test_the_root_of_all_prefix_sums() -> None:
    root = root_of_prefix_sums(6)
    assert root.tolist() == pytest.approx([1, 1 / 2, 3 / 8, 5 / 16, 35 / 128, 63 / 256])
    assert np.convolve(root, root)[:6] == pytest.approx(np.ones(6))
    square = root_of_prefix_sums(1000) @ root_of_prefix_sums(1000)
    assert square == pytest.approx((log(1000) + np.euler_gamma + log(16)) / pi, rel=1e-3)


def test_the_noise_is_what_is_said_of_it() -> None:
    """Against samples: of each number, and of the sums of the first ordered ones."""
    random, count = np.random.default_rng(3), 4000
    found = np.array([unscale(random.normal(0, 1e4, 7), GROUPS) for _ in range(count)])
    said = noise_of_sums(1e4, GROUPS, 7)
    assert found.std(axis=0)[said > 0] == pytest.approx(said[said > 0], rel=0.05)
    assert said[0] == 1e4 * sqrt(3)
    assert said[5] == 0
    assert said[6] == 1e4 * sqrt(3) * 2**29
    firsts = np.cumsum(found[:, 1:5], axis=1).std(axis=0)
    assert firsts == pytest.approx(noise_of_first_sums(1e4, GROUPS, GROUPS[1]), rel=0.05)


def test_the_sums_of_many_ordered_counts_have_little_noise() -> None:
    """Sixteen times the noise of one count without the root, and less than four with it."""
    one = (SumsGroup(np.arange(256), 1.0, ordered=True),)
    assert noise_of_first_sums(1.0, one, one[0]).max() < 3.0
    assert noise_of_sums(1.0, one, 256).max() < 2.0
