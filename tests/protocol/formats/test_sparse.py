from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.quantised import INT8
from fleetlearn_protocol.formats.sparse import greatest
from fleetlearn_protocol.splitmix64 import Fractions
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

PAIR = find_encoding("topk-0.4")


def test_bytes_by_hand() -> None:
    """Two of five travel: places, ascending, and then values."""
    vector = np.array([0.5, -3, 1, 0, 2], np.float32)
    assert PAIR.encode(vector).hex() == "0100" + "0400" + "000040c0" + "00000040"
    assert PAIR.decode(PAIR.encode(vector), 5).tolist() == [0, -3, 0, 0, 2]
    assert (
        find_encoding("topk-0.4-float16").encode(vector).hex() == "0100" + "0400" + "00c2" + "0040"
    )
    content = find_encoding("topk-0.4-int8").encode(np.array([0.5, -127, 1, 0, 3], np.float32))
    assert content.hex() == "0100" + "0400" + "0000803f" + "8103"


@pytest.mark.parametrize(
    ("elements", "entries"), [(1, 1), (100, 1), (101, 2), (4096, 41), (4097, 42), (8192, 82)]
)
def test_the_share_of_each_block_is_rounded_up(elements: int, entries: int) -> None:
    assert find_encoding("topk-0.01").size(elements) == 6 * entries


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 30)),
        elements=st.integers(-3, 3).map(float),
    ),
    st.data(),
)
def test_the_greatest_magnitudes_of_equal_ones_the_first(
    rows: np.ndarray, data: st.DataObject
) -> None:  # type: ignore[type-arg]
    count = data.draw(st.integers(1, rows.shape[1]))
    expected = [
        sorted(sorted(range(len(row)), key=lambda place: (-abs(row[place]), place))[:count])
        for row in rows
    ]
    assert greatest(rows, count).tolist() == expected


def test_the_last_place_of_a_block() -> None:
    vector = np.zeros(2 * 4096, np.float32)
    vector[[4095, 8191]] = 127, -254
    encoding = find_encoding("topk-0.0001-int8")
    assert np.array_equal(encoding.decode(encoding.encode(vector)), vector)


def test_values_have_the_draws_of_the_entries_in_their_order() -> None:
    """A block's entries are quantised as a row: the values alone, encoded as int8, give the same
    bytes."""
    vector = np.random.default_rng(0).standard_normal(3 * 4096).astype(np.float32)
    content = find_encoding("topk-0.01-int8").encode(vector, 77)
    block = 2 * 41 + 4 + 41
    exact = find_encoding("topk-0.01").decode(find_encoding("topk-0.01").encode(vector))
    rows = exact[exact != 0].reshape(3, 41)
    expected = INT8.encode(rows, Fractions(77))
    assert [content[place + 82 : place + block].tobytes() for place in (0, block, 2 * block)] == [
        row.tobytes() for row in expected
    ]


@pytest.mark.parametrize(
    ("places", "why"),
    [((1, 1), "repeated"), ((4, 1), "descending"), ((1, 5), "beyond the end"), ((0, 65535), "far")],
)
def test_places_that_no_encoder_writes(places: tuple[int, int], why: str) -> None:
    content = np.array(places, "<u2").tobytes() + np.ones(2, "<f4").tobytes()
    with pytest.raises(
        ProtocolError, match="the places in block 0 must ascend and be below 5"
    ) as caught:
        PAIR.check(content, 5)
    assert caught.value.code is Code.BAD_ENCODING


def test_values_that_are_not_finite() -> None:
    content = np.array([0, 1], "<u2").tobytes() + np.array([1, np.nan], "<f4").tobytes()
    with pytest.raises(ProtocolError, match="element 1 of the vector is nan"):
        PAIR.check(content, 5)
