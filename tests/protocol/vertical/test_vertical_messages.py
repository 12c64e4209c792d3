"""Messages of vertical runs, and what follows them."""

from __future__ import annotations

import zlib

import pytest
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk, pack_chunks
from fleetlearn_protocol.vertical.arrays import ArrayPart
from fleetlearn_protocol.vertical.messages import (
    ContentReader,
    PartyActivations,
    PartyDone,
    PartyJoin,
    PartyRows,
    RowsWanted,
    VerticalPause,
    VerticalRefusal,
    announced_bytes,
    decode_from_party,
    decode_to_party,
    encode_from_party,
    encode_to_party,
)


def test_messages_come_back() -> None:
    join = PartyJoin(1, "bank", "a" * 64)
    assert decode_from_party(encode_from_party(join)) == join
    pause = VerticalPause("for shop")
    assert decode_to_party(encode_to_party(pause)) == pause


def test_what_is_no_json_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="VerticalRefusal cannot be sent"):
        encode_to_party(VerticalRefusal("\ud800"))


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="join does not fit"):
        encode_from_party(PartyJoin(1, "bank", "nonsense"))
    with pytest.raises(ProtocolError, match="unknown-type"):
        decode_from_party(encode_to_party(RowsWanted()))


def test_what_follows_a_message_is_collected_in_its_order() -> None:
    content = bytes(range(256)) * (CHUNK_BYTES // 128)
    message = PartyRows(len(content), zlib.crc32(content))
    reader = ContentReader(message, len(content))
    for frame in pack_chunks(0, content):
        assert not reader.is_complete
        reader.add(frame)
    assert reader.is_complete
    assert reader.content() == content
    assert ContentReader(PartyDone(1), 0).is_complete
    assert announced_bytes(message) == len(content)
    parts = (ArrayPart("h", "float32", 8, 0), ArrayPart("y", "plain", 16, 0))
    assert announced_bytes(PartyActivations(1, 0, "a" * 64, parts)) == 24


def test_other_bytes_than_announced_are_refused() -> None:
    with pytest.raises(ProtocolError, match="64 bytes were announced; at most 32"):
        ContentReader(PartyRows(64, 0), 32)
    reader = ContentReader(PartyRows(64, 0), 64)
    with pytest.raises(ProtocolError, match="expected transfer 0 at 0"):
        reader.add(pack_chunk(0, 8, b"x"))
    with pytest.raises(ProtocolError, match="expected transfer 0 at 0"):
        reader.add(pack_chunk(1, 0, b"x"))
    with pytest.raises(ProtocolError, match="more than the 64 announced"):
        reader.add(pack_chunk(0, 0, b"x" * 65))
    reader.add(pack_chunk(0, 0, b"x" * 64))
    with pytest.raises(ProtocolError, match="another CRC-32"):
        reader.content()
