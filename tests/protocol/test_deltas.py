from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.deltas import apply_delta, encode_delta
from fleetlearn_protocol.errors import Code, ProtocolError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

PAIRS = st.integers(1, 50).flatmap(
    lambda size: st.tuples(*[hnp.arrays(np.float32, size, elements=st.floats(width=32))] * 2)
)


@given(PAIRS)
def test_every_bit_comes_back(pair: tuple[Any, Any]) -> None:
    base, vector = pair
    assert apply_delta(base.tobytes(), encode_delta(base, vector)) == vector.tobytes()


def test_bytes_by_hand() -> None:
    """1.0 is 3f800000 and 1.5 is 3fc00000; 2.0 is 40000000 and stays."""
    base, vector = np.array([1, 2], np.float32), np.array([1.5, 2], np.float32)
    assert zlib.decompress(encode_delta(base, vector)).hex() == "0000" + "0000" + "4000" + "0000"


def test_models_that_are_alike_are_small() -> None:
    base = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    assert len(encode_delta(base, base)) < 0.01 * base.nbytes
    moved = base + np.float32(1e-4) * np.random.default_rng(1).standard_normal(100_000).astype(
        np.float32
    )
    assert len(encode_delta(base, moved)) < 0.65 * base.nbytes


@pytest.mark.parametrize(
    ("base", "delta"),
    [
        (8, b"nonsense"),
        (8, zlib.compress(bytes(7))),
        (8, zlib.compress(bytes(9))),
        (8, zlib.compress(bytes(10**7))),
        (8, zlib.compress(bytes(8))[:-1]),
        (7, zlib.compress(bytes(7))),
        (8, b""),
    ],
    ids=["not zlib", "too short", "too long", "a bomb", "cut short", "half an element", "empty"],
)
def test_what_is_no_difference_is_refused(base: int, delta: bytes) -> None:
    with pytest.raises(ProtocolError, match="the difference") as caught:
        apply_delta(bytes(base), delta)
    assert caught.value.code is Code.BAD_ENCODING
