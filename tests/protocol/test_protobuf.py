"""Protobuf's encoding: the examples of its own documentation, and what is no message."""

from __future__ import annotations

import pytest
from fleetlearn_protocol.protobuf import (
    ReadField,
    read_fields,
    varint,
    write_message,
    write_number,
    write_text,
)


def test_the_examples_of_the_documentation() -> None:
    """protobuf.dev/programming-guides/encoding: Test1 {a: 150}, Test2 {b: "testing"}, Test3 with
    Test1 as its field 3."""
    inner = write_number(1, 150)
    assert inner == bytes.fromhex("089601")
    assert write_text(2, "testing") == bytes.fromhex("120774657374696e67")
    assert write_message(3, inner) == bytes.fromhex("1a03089601")
    assert varint(-2) == bytes.fromhex("feffffffffffffffff01")


def test_fields_are_read_as_they_were_written() -> None:
    fixed = bytes([4 << 3 | 5]) + b"abcd" + bytes([5 << 3 | 1]) + b"abcdefgh"
    content = write_number(1, 2**40) + write_text(2, "é") + write_message(300, b"") + fixed
    found = list(read_fields(content))
    assert [(row.number, row.value, row.content) for row in found] == [
        (1, 2**40, b""),
        (2, 0, "é".encode()),
        (300, 0, b""),
        (4, 0, b"abcd"),
        (5, 0, b"abcdefgh"),
    ]
    assert b"".join(row.raw for row in found) == content
    assert found[0] == ReadField(1, write_number(1, 2**40), value=2**40)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x08", "ends in the middle"),
        (b"\x08" + b"\xff" * 11, "more than ten bytes"),
        (b"\x0a\x05abc", "field 1 has 5 bytes; 3 are there"),
        (b"\x0d\x00", "field 1 has 4 bytes; 1 are there"),
        (b"\x0b", "wire type 3"),
    ],
)
def test_what_is_no_message_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(read_fields(content))
