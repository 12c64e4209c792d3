"""What updates are worth: games whose values are known."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.quality.contributions import (
    EXACT_UP_TO,
    leave_one_out,
    needed_sets,
    shapley,
)
from hypothesis import given
from hypothesis import strategies as st


def gloves(members: frozenset[int]) -> float:
    """Devices 0 and 1 have a left glove each, device 2 the right one: a pair is worth 1."""
    return float(2 in members and bool(members & {0, 1}))


def test_the_glove_game() -> None:
    found = shapley(3, gloves)
    assert found.values == pytest.approx([1 / 6, 1 / 6, 2 / 3])
    assert found.errors == [0.0] * 3
    assert found.utilities == 8


def test_two_devices_with_the_same_data_hide_each_other_in_leave_one_out_alone() -> None:
    assert leave_one_out(3, gloves).values == [0.0, 0.0, 1.0]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=EXACT_UP_TO))
def test_in_a_game_that_adds_up_each_has_its_own(own: list[float]) -> None:
    found = shapley(len(own), lambda members: sum(own[each] for each in members))
    assert found.values == pytest.approx(own, abs=1e-12)
    without = leave_one_out(len(own), lambda members: sum(own[each] for each in members))
    assert without.values == pytest.approx(own, abs=1e-12)


@pytest.mark.parametrize("devices", [5, 20])
def test_the_values_add_up_to_what_the_round_gained(devices: int) -> None:
    def utility(members: frozenset[int]) -> float:
        return float(np.log1p(sum(1 + each % 3 for each in members)) - 0.2 * (3 in members))

    found = shapley(devices, utility, utilities=300, seed=4)
    gained = utility(frozenset(range(devices))) - utility(frozenset())
    assert sum(found.values) == pytest.approx(gained)
    assert min(found.values) == found.values[3]


def test_drawn_values_are_as_near_to_the_exact_ones_as_their_errors_say() -> None:
    """Weighted majority: the exact values by generating functions (Mann and Shapley, 1962)."""
    weights = np.array([9, 7, 6, 5, 4, 3, 3, 2, 2, 1])
    quota = 22
    exact = _majority(weights, quota)
    drawn = shapley(
        10, lambda members: float(weights[list(members)].sum() >= quota), utilities=900, seed=1
    )
    assert drawn.utilities <= 900
    far = np.abs(np.array(drawn.values) - exact) / np.array(drawn.errors)
    assert far.max() < 4
    assert max(drawn.errors) < 0.05


def _majority(weights: np.ndarray, quota: int) -> np.ndarray:
    n = len(weights)
    factorials = np.cumprod([1.0, *range(1, n + 1)])
    values = np.empty(n)
    for device in range(n):
        ways = np.zeros((n, weights.sum() + 1))  # size, weight -> sets of others
        ways[0, 0] = 1
        for other in np.delete(weights, device):
            ways[1:, other:] += ways[:-1, : -other or None].copy()
        pivots = ways[:, quota - weights[device] : quota].sum(axis=1)
        values[device] = sum(
            pivots[size] * factorials[size] * factorials[n - size - 1] / factorials[n]
            for size in range(n)
        )
    return values


@pytest.mark.parametrize("devices", [1, 4, 12])
def test_what_is_measured_before_is_all_that_is_asked(devices: int) -> None:
    sets = needed_sets(devices, 60, seed=3)
    assert len(sets) == len(set(sets))
    known = {members: float(sum(members)) for members in sets}
    found = shapley(devices, known.__getitem__, utilities=60, seed=3)
    assert found.values == pytest.approx(range(devices))
    assert leave_one_out(devices, known.__getitem__).values == pytest.approx(range(devices))


def test_each_set_is_measured_once() -> None:
    asked = []

    def utility(members: frozenset[int]) -> float:
        asked.append(members)
        return float(len(members))

    shapley(12, utility, utilities=100, seed=2)
    assert len(asked) == len(set(asked)) <= 100 + 2 * 12
