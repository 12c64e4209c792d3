"""Reads and writes the nodes of an encoded ONNX model, since devices have no package onnx.

The few fields that are read and written are of onnx.proto3: ModelProto.graph = 7; GraphProto.node =
1, initializer = 5, input = 11, output = 12, value_info = 13; ValueInfoProto.name = 1, type = 2;
TypeProto.tensor_type = 1, its shape = 2; TensorShapeProto.dim = 1, its dim_value = 1;
NodeProto.input = 1, output = 2, op_type = 4, attribute = 5; AttributeProto.name = 1, f = 2, i = 3,
t = 5, g = 6, ints = 8, graphs = 11, type = 20 (FLOAT = 1, INT = 2, TENSOR = 4); TensorProto.dims =
1, data_type = 2 (FLOAT = 1, INT32 = 6, INT64 = 7, DOUBLE = 11), int32_data = 5, int64_data = 7,
name = 8, raw_data = 9, double_data = 10.
How they are encoded: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
"""How a field's value is encoded: protobuf's wire types."""
DTYPES: dict[int, Any] = {1: np.float32, 6: np.int32, 7: np.int64, 11: np.float64}
"""TensorProto's data types that are read and written."""


class Field(NamedTuple):
    number: int
    value: bytes
    """The field's content; the bytes of the number itself for a varint."""
    whole: bytes
    """The field with its key, as it stands in the message."""


class Node:
    """A node of a graph, decoded when it is first asked for a part."""

    def __init__(self, field: Field) -> None:
        self.field = field

    @cached_property
    def rows(self) -> list[Field]:
        return list(fields(self.field.value))

    @cached_property
    def operator(self) -> str:
        return next(field.value.decode() for field in self.rows if field.number == 4)

    @cached_property
    def inputs(self) -> list[str]:
        return [field.value.decode() for field in self.rows if field.number == 1]

    @cached_property
    def outputs(self) -> list[str]:
        return [field.value.decode() for field in self.rows if field.number == 2]

    @cached_property
    def attributes(self) -> dict[str, list[Field]]:
        """The fields of each attribute."""
        found = {}
        for attribute in (field for field in self.rows if field.number == 5):
            parts = list(fields(attribute.value))
            found[next(part.value.decode() for part in parts if part.number == 1)] = parts
        return found

    def integer(self, name: str, default: int) -> int:
        found = [row.value for row in self.attributes.get(name, []) if row.number == 3]
        # Numbers that are 0 need not be written.
        return (
            signed(varint(found[0], 0)[0]) if found else (0 if name in self.attributes else default)
        )

    def number(self, name: str, default: float) -> float:
        found = [row.value for row in self.attributes.get(name, []) if row.number == 2]
        return (
            struct.unpack("<f", found[0])[0]
            if found
            else (0.0 if name in self.attributes else default)
        )

    def integers(self, name: str, default: list[int]) -> list[int]:
        found = [row for row in self.attributes.get(name, []) if row.number == 8]
        return [number for row in found for number in packed(row)] or default


def tensor(message: bytes) -> tuple[str, NDArray[Any] | None]:
    """Return the name and the values of a TensorProto; no values if they have another dtype, lie in
    a file, or are float32 that is not in ``raw_data``."""
    parts = list(fields(message))
    name = next((part.value.decode() for part in parts if part.number == 8), "")
    shape = [number for part in parts if part.number == 1 for number in packed(part)]
    dtype = DTYPES.get(next(varint(part.value, 0)[0] for part in parts if part.number == 2))
    raw = next((part.value for part in parts if part.number == 9), None)
    if dtype is None:
        return name, None
    if raw is not None:
        return name, np.frombuffer(raw, dtype).reshape(shape)
    integers = [number for part in parts if part.number in (5, 7) for number in packed(part)]
    doubles = b"".join(part.value for part in parts if part.number == 10)
    if dtype in (np.int32, np.int64) and integers:
        return name, np.array(integers, dtype).reshape(shape)
    return name, np.frombuffer(doubles, dtype).reshape(
        shape
    ) if dtype is np.float64 and doubles else None


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message. Raises ValueError if it is none."""
    cursor = 0
    while cursor < len(message):
        start = cursor
        key, cursor = varint(message, cursor)
        kind, value = key & 7, cursor
        if kind == VARINT:
            _, cursor = varint(message, cursor)
        elif kind == BYTES:
            size, value = varint(message, cursor)
            cursor = value + size
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            cursor += 8 if kind == EIGHT_BYTES else 4
        else:
            raise ValueError(f"a field of the unknown kind {kind}: this is no encoded message")
        if cursor > len(message):
            raise ValueError(
                f"a field ends at byte {cursor} of {len(message)}: this is no encoded message"
            )
        yield Field(key >> 3, message[value:cursor], message[start:cursor])


def varint(message: bytes, cursor: int) -> tuple[int, int]:
    """Return the number at ``cursor``, and where it ends."""
    number = shift = 0
    while cursor < len(message):
        byte = message[cursor]
        number |= (byte & 127) << shift
        cursor, shift = cursor + 1, shift + 7
        if byte < 128:
            return number, cursor
    raise ValueError("a number has no end: this is no encoded message")


def signed(number: int) -> int:
    """Return the integer whose 64 bits these are."""
    return number - 2**64 if number >= 2**63 else number


def packed(row: Field) -> list[int]:
    """Return the integers of a repeated field, whether they share one field or each has one."""
    if row.whole[0] & 7 == VARINT:
        return [signed(varint(row.value, 0)[0])]
    cursor, numbers = 0, []
    while cursor < len(row.value):
        number, cursor = varint(row.value, cursor)
        numbers.append(signed(number))
    return numbers


def encoded(value: int) -> bytes:
    """Return a varint. Negative numbers are encoded as their 64 bits."""
    value &= 2**64 - 1
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def framed(number: int, content: bytes) -> bytes:
    """Return a field that holds bytes."""
    return encoded(number << 3 | BYTES) + encoded(len(content)) + content


def node(operator: str, inputs: Iterable[str], outputs: Iterable[str], *attributes: bytes) -> bytes:
    """Return a node, as a field of a graph."""
    texts = [*((1, name) for name in inputs), *((2, name) for name in outputs), (4, operator)]
    content = b"".join(framed(number, text.encode()) for number, text in texts)
    return framed(1, content + b"".join(framed(5, attribute) for attribute in attributes))


def given(name: str, tensor: bytes) -> bytes:
    """Return a node that gives the array of a TensorProto."""
    value = framed(1, b"value") + framed(5, tensor) + encoded(20 << 3) + encoded(4)
    return node("Constant", [], [name], value)


def constant(name: str, values: NDArray[Any]) -> bytes:
    """Return a node that gives an array, of one of DTYPES."""
    (kind,) = (number for number, dtype in DTYPES.items() if values.dtype == dtype)
    shape = b"".join(encoded(1 << 3) + encoded(size) for size in values.shape)
    content = shape + encoded(2 << 3) + encoded(kind) + framed(9, values.tobytes())
    return given(name, content)


def integer(name: str, value: int) -> bytes:
    """Return an attribute."""
    return (
        framed(1, name.encode()) + encoded(3 << 3) + encoded(value) + encoded(20 << 3) + encoded(2)
    )


def floating(name: str, value: float) -> bytes:
    """Return an attribute."""
    number = encoded(2 << 3 | FOUR_BYTES) + struct.pack("<f", value)
    return framed(1, name.encode()) + number + encoded(20 << 3) + encoded(1)
