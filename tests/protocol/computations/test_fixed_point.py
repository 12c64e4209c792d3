"""Numbers as whole multiples of a power of two."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_protocol.computations.fixed_point import MOST, added, from_fixed, to_fixed
from hypothesis import given
from hypothesis import strategies as st


def test_by_hand() -> None:
    # halves go to the even one
    assert to_fixed(np.array([0.5, 1.5, -0.25, 3.0]), 0).tolist() == [0, 2, 0, 3]
    assert to_fixed(np.array([0.3, -0.3]), 4).tolist() == [5, -5]  # 4.8
    assert from_fixed(np.array([5, -8]), 4).tolist() == [0.3125, -0.5]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.randoms())
def test_sums_do_not_depend_on_order_and_division(values: list[float], random: object) -> None:
    shuffled = values.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    whole = to_fixed(np.array(values), 30).sum()
    cut = len(values) // 3
    parts = (
        to_fixed(np.array(shuffled[:cut]), 30).sum() + to_fixed(np.array(shuffled[cut:]), 30).sum()
    )
    assert whole == parts
    assert abs(from_fixed(whole, 30) - np.sum(values)) <= len(values) * 2.0**-31 + 1e-6


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**33, -(2.0**33)])
def test_what_does_not_fit_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="cannot be added up"):
        to_fixed(np.array([1.0, value]), 30)
    assert to_fixed(np.array([2.0**32, -(2.0**32)]), 30).tolist() == [MOST, -MOST]


def test_a_sum_that_grows_too_large_is_refused() -> None:
    most = np.array([MOST, -MOST], np.int64)
    assert added(most, np.array([-1, 1])).tolist() == [MOST - 1, 1 - MOST]
    for more in ([1, 0], [0, -1], [MOST + 1, 0], [-(2**63), 0]):
        with pytest.raises(ValueError, match=r"beyond 2\^62"):
            added(most, np.array(more, np.int64))
