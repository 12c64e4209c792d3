"""Whole numbers are added exactly, in any order; what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.exact_sums import ExactSums, exact_sums
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate, SumsArray
from fleetlearn_protocol.errors import Code, ProtocolError
from hypothesis import given
from hypothesis import strategies as st

THREE = exact_sums(2, 3)
MOST = 2**62 // 3


def added(rows: list[list[int]]) -> ExactSums:
    state = THREE.init(99)  # the model's size says nothing
    for row in rows:
        THREE.add(state, SumsArray(np.array(row, np.int64)), 1, 0.0, 1.0, None)
    return state


WHOLE = st.integers(-MOST, MOST)


@given(st.lists(st.tuples(WHOLE, WHOLE), min_size=1, max_size=3), st.randoms())
def test_any_order_gives_the_exact_total(rows: list[tuple[int, int]], random: object) -> None:
    shuffled = rows.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    state = added([[*row] for row in shuffled])
    assert state.total.tolist() == [sum(column) for column in zip(*rows, strict=True)]
    together = THREE.init(0)
    block = np.array(rows, np.int64)
    ones = np.ones(len(rows))
    THREE.add_many(together, [block[:1], block[1:]], ones.astype(np.int64), ones, None, None)
    assert together.total.tolist() == state.total.tolist()
    assert together.devices == state.devices == len(rows)


def test_zeros_at_the_end_need_not_come() -> None:
    state = added([[1, 2], [5], [0]])
    assert (state.total.tolist(), state.devices) == ([6, 2], 3)
    for wrong in ([], [1, 2, 3]):
        with pytest.raises(ValueError, match=f"{len(wrong)} sums were given; the total has 2"):
            added([wrong])


def test_sums_that_would_not_fit_together_are_refused() -> None:
    THREE.check(float(MOST), 1)
    for largest in (float(MOST + 2**20), float("inf"), float("nan")):
        with pytest.raises(ProtocolError, match="can be at most") as refused:
            THREE.check(largest, 1)
        assert refused.value.code == Code.OUT_OF_RANGE
    columns = np.array([1.0, float(MOST + 2**20)]), np.ones(2, np.int64)
    assert THREE.passes_check(*columns).tolist() == [True, False]


def test_more_devices_than_a_round_has_are_a_fault() -> None:
    state = added([[1, 2]] * 3)
    with pytest.raises(ValueError, match="4 devices' sums were given; a round has 3"):
        THREE.add(state, SumsArray(np.zeros(2, np.int64)), 1, 0.0, 1.0, None)


def test_what_is_no_sums_leaves_the_total_as_it_was() -> None:
    state = added([[1, 2]])
    with pytest.raises(ProtocolError, match="floats were given"):
        THREE.add(state, ArrayUpdate(np.zeros(2, np.float32)), 1, 0.0, 1.0, None)
    with pytest.raises(ValueError, match="3 sums were given; the total has 2"):
        THREE.add(state, SumsArray(np.zeros(3, np.int64)), 1, 0.0, 1.0, None)
    with pytest.raises(ValueError, match="count whole"):
        THREE.add(state, SumsArray(np.zeros(2, np.int64)), 1, 0.0, 0.5, None)
    with pytest.raises(ValueError, match="expected int64"):
        THREE.add_many(state, [np.zeros((1, 2))], np.ones(1, np.int64), np.ones(1), None, None)
    with pytest.raises(ValueError, match="takes their total"):
        THREE.result(state, np.zeros(0, np.float32))
    assert (state.total.tolist(), state.devices) == ([1, 2], 1)


def test_a_saved_total_comes_back_in_memory_of_its_own() -> None:
    state = added([[MOST, -MOST], [5, 7]])
    again = THREE.from_tensors(THREE.to_tensors(state))
    state.total += 1
    assert (again.total.tolist(), again.devices) == ([MOST + 5, 7 - MOST], 2)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"sum": np.zeros(2)}, "it is no total of sums"),
        ({"total": np.zeros(2), "devices": np.array([1])}, "float64 of shape"),
        ({"total": np.zeros(3, np.int64), "devices": np.array([1])}, "expected int64 of"),
        ({"total": np.zeros(2, np.int64), "devices": np.array([4])}, "how many devices"),
        ({"total": np.zeros(2, np.int64), "devices": np.array([1.0])}, "how many devices"),
    ],
)
def test_a_damaged_total_is_refused(tensors: dict[str, np.ndarray], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        THREE.from_tensors(tensors)
