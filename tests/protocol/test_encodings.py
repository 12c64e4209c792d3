from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.encodings import ENCODINGS, FLOAT32, Encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import Part, VectorReference
from fleetlearn_protocol.vector import checksum, digest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)


def test_names() -> None:
    assert ENCODINGS == {"float32": FLOAT32}
    assert FLOAT32.name == "float32"


@every_encoding
@given(hnp.arrays(np.float32, st.integers(1, 40), elements=FINITE), st.integers(0, 40))
def test_blocks_of_whole_elements_are_the_whole(encoding: Encoding, vector: Any, cut: int) -> None:
    """The coordinator relies on this: it checks and decodes an update block by block."""
    content = encoding.encode(vector)
    assert content.nbytes == encoding.size(len(vector))
    blocks = [content[: encoding.size(cut)], content[encoding.size(cut) :]]
    whole = encoding.decode(content)
    assert whole.dtype == np.float32
    assert np.concatenate([encoding.decode(block) for block in blocks]).tobytes() == whole.tobytes()
    assert max(encoding.check(block) for block in blocks) == encoding.check(content) == np.abs(whole).max()


@given(hnp.arrays(np.float32, st.integers(1, 20), elements=FINITE))
def test_float32_is_exact(vector: Any) -> None:
    content = vector.tobytes()
    for same in (content, bytearray(content), memoryview(content), vector.data):
        assert FLOAT32.decode(same).tobytes() == content
    assert FLOAT32.encode(vector).tobytes() == content


def test_float32_by_hand() -> None:
    assert FLOAT32.encode(np.array([1, -2], np.float32)).hex() == "0000803f000000c0"
    assert FLOAT32.encode(np.arange(4, dtype=np.float32)[::2]).hex() == "0000000000000040"
    assert FLOAT32.size(3) == 12


def test_decoding_float32_copies_nothing() -> None:
    content = bytearray(8)
    vector = FLOAT32.decode(content)
    content[3] = 0x40
    assert vector.tolist() == [2, 0]
    assert vector.flags.writeable
    assert not FLOAT32.decode(bytes(content)).flags.writeable


def test_float32_that_is_not_aligned() -> None:
    content = b"x" + np.array([1, 2], "<f4").tobytes()
    assert FLOAT32.decode(memoryview(content)[1:]).tolist() == [1, 2]


@pytest.mark.parametrize("size", [1, 3, 5])
def test_half_an_element(size: int) -> None:
    for read in (FLOAT32.decode, FLOAT32.check):
        with pytest.raises(
            ProtocolError, match=f"{size} bytes of float32 were given; expected a multiple of 4"
        ) as caught:
            read(bytes(size))
        assert caught.value.code is Code.WRONG_LENGTH


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(value: float) -> None:
    with pytest.raises(ProtocolError, match="element 1 of the vector is") as caught:
        FLOAT32.check(np.array([0, value], np.float32).tobytes())
    assert caught.value.code is Code.NOT_FINITE


@every_encoding
def test_what_messages_say_of_a_vector(encoding: Encoding) -> None:
    vector = np.array([1, 2, 3], np.float32)
    content = encoding.encode(vector)
    size = encoding.size(3)
    assert encoding.reference("model", vector) == VectorReference("model", digest(content), size, encoding.name)
    assert encoding.part("update", content) == Part("update", encoding.name, size, checksum(content))
