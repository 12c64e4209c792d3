"""What goes into a state or into sums comes out bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_protocol.computations.layout import Layout, StateField, SumsLayout
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

LAYOUT = Layout(
    StateField("whole", (2, 3), "int64"),
    StateField("real", (4,)),
    StateField("single", (2,), "float32"),
)


@given(
    arrays(np.int64, (2, 3), elements=st.integers(-(2**63), 2**63 - 1)),
    arrays(np.uint64, (4,), elements=st.integers(0, 2**64 - 1)),  # any bits: NaN, infinity, -0
    arrays(np.float32, (2,), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
)
def test_any_bits_come_back(whole: np.ndarray, bits: np.ndarray, single: np.ndarray) -> None:
    real = bits.view(np.float64)
    state = LAYOUT.pack({"whole": whole, "real": real, "single": single})
    assert state.dtype == np.float32
    assert state.shape == (LAYOUT.size,) == (3 * 6 + 3 * 4 + 2,)
    assert np.isfinite(state).all()
    found = LAYOUT.unpack(state)
    assert (found["whole"] == whole).all()
    assert (found["real"].view(np.uint64) == bits).all()
    assert (found["single"] == single).all()


def test_64_bits_are_three_whole_numbers() -> None:
    one = Layout(StateField("x", (), "int64"))
    assert one.pack({"x": 5}).tolist() == [5, 0, 0]
    assert one.pack({"x": 2**22 + 3}).tolist() == [3, 1, 0]
    assert one.pack({"x": 7 * 2**43}).tolist() == [0, 0, 7]
    assert one.pack({"x": -1}).tolist() == [2**22 - 1, 2**21 - 1, 2**21 - 1]


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(ValueError, match="other is no field"):
        LAYOUT.pack({"other": 1})
    with pytest.raises(ValueError, match=r"real has shape \(3,\); the state has \(4,\)"):
        LAYOUT.pack({"real": [1, 2, 3]})
    with pytest.raises(ValueError, match="single is not finite"):
        LAYOUT.pack({"single": [1, np.inf]})
    with pytest.raises(ValueError, match=r"shape \(3,\) was given; expected \(32,\)"):
        LAYOUT.unpack(np.zeros(3, np.float32))
    for wrong in (0.5, -1.0, 2.0**22):
        damaged = LAYOUT.pack({})
        damaged[0] = wrong
        with pytest.raises(ValueError, match="whole of the state is no whole numbers"):
            LAYOUT.unpack(damaged)


def test_sums_lie_one_after_another() -> None:
    layout = SumsLayout({"rows": (), "bins": (2, 2)})
    sums = layout.pack({"rows": 3, "bins": np.array([[1, 2], [3, -4]])})
    assert sums.dtype == np.int64
    assert sums.tolist() == [3, 1, 2, 3, -4]
    assert layout.unpack(sums)["bins"].tolist() == [[1, 2], [3, -4]]
    assert layout.pack({"rows": np.int64(7)}).tolist() == [7, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="bins is float64"):
        layout.pack({"bins": np.zeros((2, 2))})
    with pytest.raises(ValueError, match="more is not among the sums"):
        layout.pack({"more": 1})
    with pytest.raises(ValueError, match=r"expected \(5,\)"):
        layout.unpack(sums[1:])
