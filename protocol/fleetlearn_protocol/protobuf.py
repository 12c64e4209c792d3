"""Protobuf's encoding (protobuf.dev/programming-guides/encoding), as far as ONNX files need it:
fields written, and the fields of a message read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""The wire types."""
_SIZES = {FIXED64: 8, FIXED32: 4}


def write_text(field: int, content: str) -> bytes:
    """Return a field that is a text."""
    return write_message(field, content.encode())


def write_message(field: int, content: bytes) -> bytes:
    """Return a field that is a message, or bytes."""
    return write_key(field, BYTES) + varint(len(content)) + content


def write_number(field: int, value: int) -> bytes:
    """Return a field that is a whole number."""
    return write_key(field, VARINT) + varint(value)


def write_key(field: int, wire_type: int) -> bytes:
    """Return what stands before a field's value."""
    return varint(field << 3 | wire_type)


def varint(value: int) -> bytes:
    """Return a whole number of 64 bits, seven bits a byte."""
    value &= 2**64 - 1  # negative numbers are as in two's complement
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


class ReadField(NamedTuple):
    """A field of a message."""

    number: int
    raw: bytes
    """Its key and value, as they are in the message."""
    content: bytes = b""
    """Of a text, bytes or a message."""
    value: int = 0
    """Of a whole number."""


def read_fields(content: bytes) -> Iterator[ReadField]:
    """Yield the fields of a message, in their order. Raises ValueError where it is none."""
    view, place = memoryview(content), 0
    while place < len(view):
        begin = place
        head, place = _read_varint(view, place)
        field, wire_type = head >> 3, head & 7
        if wire_type == VARINT:
            value, place = _read_varint(view, place)
            yield ReadField(field, bytes(view[begin:place]), value=value)
            continue
        if wire_type == BYTES:
            size, place = _read_varint(view, place)
        elif wire_type in _SIZES:
            size = _SIZES[wire_type]
        else:
            raise ValueError(f"field {field} has the wire type {wire_type}, which is not known")
        start, place = place, place + size
        if place > len(view):
            raise ValueError(f"field {field} has {size} bytes; {len(view) - start} are there")
        yield ReadField(field, bytes(view[begin:place]), bytes(view[start:place]))


def _read_varint(view: memoryview, place: int) -> tuple[int, int]:
    """Return a whole number, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(view):
            raise ValueError("the message ends in the middle of a whole number")
        byte = view[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a whole number has more than ten bytes")
