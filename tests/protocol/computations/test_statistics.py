"""Keys in the order of doubles, and how a column's range becomes units."""

from __future__ import annotations

import numpy as np
from fleetlearn_protocol.computations.statistics import (
    HIGHEST,
    LOWEST,
    key_of,
    part_width,
    unit_of,
    value_of,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

DOUBLES = st.floats(allow_nan=False)


@given(arrays(np.float64, 20, elements=DOUBLES))
def test_keys_have_the_order_of_their_doubles(values: np.ndarray) -> None:
    keys = key_of(values)
    assert (np.argsort(keys, kind="stable") == np.argsort(values, kind="stable")).all()
    assert (value_of(keys) == values).all()
    assert (keys >= LOWEST).all()
    assert (keys <= HIGHEST).all()


def test_neighbours() -> None:
    around = np.array([-5e-324, 0.0, 5e-324, 1.0, np.nextafter(1.0, 2.0)])
    keys = key_of(around)
    assert keys.tolist()[:3] == [-2, 0, 1]
    assert keys[4] - keys[3] == 1
    assert key_of(np.array([-0.0]))[0] == key_of(np.array([0.0]))[0]


def test_parts_of_all_keys_cover_them() -> None:
    width = part_width(LOWEST, HIGHEST)
    assert 255 * width < HIGHEST - LOWEST + 1 <= 256 * width
    assert part_width(7, 7) == 1


def test_a_range_has_at_least_2_29_units() -> None:
    for low, high in ((0.0, 1.0), (-3.0, 1e6), (1e-9, 2e-9)):
        units = (high - low) / 2.0 ** unit_of(low, high)
        assert 2**29 <= units <= 2**30
