from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import (
    CHUNK_BYTES,
    HEADER,
    MAX_FRAME_BYTES,
    pack_chunk,
    pack_chunks,
    unpack_chunk,
)
from hypothesis import given
from hypothesis import strategies as st


def test_the_header_by_hand() -> None:
    frame = pack_chunk(0x01020304, 0x1112131415161718, b"\xff")
    assert frame.hex() == "01" + "00" + "0000" + "04030201" + "1817161514131211" + "ff"


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=300))
def test_round_trip(transfer: int, offset: int, payload: bytes) -> None:
    for kind in (bytes, bytearray, memoryview):
        chunk = unpack_chunk(kind(pack_chunk(transfer, offset, kind(payload))))
        assert chunk == (transfer, offset, payload)


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda rest: b"\1\0\0\0" + rest))
def test_any_bytes_are_a_chunk_or_refused(message: bytes) -> None:
    good = len(message) > 16 and message[:4] == bytes([1, 0, 0, 0])
    if good:
        assert pack_chunk(*unpack_chunk(message)) == message
    else:
        with pytest.raises(ProtocolError) as caught:
            unpack_chunk(message)
        assert caught.value.code is Code.BAD_FRAME


@given(st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 65535)))
def test_kind_flags_and_reserved_bits_are_1_0_0(start: tuple[int, int, int]) -> None:
    message = HEADER.pack(*start, 1, 0) + b"x"
    if start == (1, 0, 0):
        assert unpack_chunk(message).payload == b"x"
    else:
        with pytest.raises(
            ProtocolError, match=f"kind {start[0]}, flags {start[1]}, reserved {start[2]}"
        ):
            unpack_chunk(message)


def test_a_full_chunk_and_one_byte_more() -> None:
    full = pack_chunk(1, 0, bytes(CHUNK_BYTES))
    assert len(full) == MAX_FRAME_BYTES
    assert len(unpack_chunk(full).payload) == CHUNK_BYTES
    with pytest.raises(ProtocolError, match="131089 bytes was sent; the limit is 131088") as caught:
        unpack_chunk(full + b"x")
    assert caught.value.code is Code.TOO_LARGE


@pytest.mark.parametrize("size", range(HEADER.size + 1))
def test_a_frame_without_payload(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"a binary frame of {size} bytes") as caught:
        unpack_chunk(pack_chunk(1, 0, b"x")[:size])
    assert caught.value.code is Code.BAD_FRAME


@pytest.mark.parametrize(
    "payload", [b"", bytes(CHUNK_BYTES + 1), np.zeros(CHUNK_BYTES, "<f4").data]
)
def test_a_payload_of_the_wrong_size_is_not_packed(payload: Any) -> None:
    with pytest.raises(ValueError, match="it takes 1 to 131072"):
        pack_chunk(1, 0, payload)


@pytest.mark.parametrize(("transfer", "offset"), [(-1, 0), (2**32, 0), (1, -1), (1, 2**64)])
def test_numbers_that_do_not_fit_the_header_are_not_packed(transfer: int, offset: int) -> None:
    with pytest.raises(ValueError, match="does not fit the header"):
        pack_chunk(transfer, offset, b"x")


def test_the_payload_is_a_view_that_float32_can_be_read_from() -> None:
    message = pack_chunk(1, 0, struct.pack("<3f", 1, -2, 0.5))
    payload = unpack_chunk(message).payload
    assert payload.obj is message
    values = np.frombuffer(payload, "<f4")
    assert values.tolist() == [1, -2, 0.5]
    assert values.flags.aligned


@pytest.mark.parametrize(
    "offset", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 9]
)
def test_a_content_from_any_offset(offset: int) -> None:
    content = np.random.default_rng(1).bytes(2 * CHUNK_BYTES + 10)
    chunks = [unpack_chunk(message) for message in pack_chunks(7, content, offset)]
    assert b"".join(chunk.payload for chunk in chunks) == content[offset:]
    assert all(chunk.transfer == 7 for chunk in chunks)
    ends = [chunk.offset + len(chunk.payload) for chunk in chunks]
    assert [chunk.offset for chunk in chunks] == [offset, *ends[:-1]]
    assert all(len(chunk.payload) == CHUNK_BYTES for chunk in chunks[:-1])


@pytest.mark.parametrize("offset", [10, 11])
def test_a_content_whose_bytes_are_all_there_has_no_chunks(offset: int) -> None:
    assert list(pack_chunks(1, bytes(10), offset)) == []


def test_a_vector_s_memory_is_sent_as_it_is() -> None:
    vector = np.arange(5, dtype="<f4")
    (message,) = pack_chunks(1, vector.data)
    assert unpack_chunk(message).payload == vector.tobytes()
