"""Rewrites a graph where ONNX Runtime's CUDA provider refuses an operator that it has: batch statistics.

Its kernel of BatchNormalization takes given statistics only. With ``training_mode`` it ends the session: "Training mode
does not support BN opset 14 (or higher) yet" (onnxruntime-gpu 1.31.1, core/providers/cuda/nn/batch_norm.h). On the CPU
that operator is three times as fast as sums, so bundles have it, and it becomes sums here (of opset 18, as bundles).

Devices have no package onnx. The few fields that are read and written are of onnx.proto3: ModelProto.graph = 7;
GraphProto.node = 1; NodeProto.input = 1, output = 2, op_type = 4, attribute = 5; AttributeProto.name = 1, f = 2, i = 3,
g = 6, ints = 8, graphs = 11, type = 20 (FLOAT = 1, INT = 2, INTS = 7). How they are encoded:
protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
"""How a field's value is encoded: protobuf's wire types."""


class Field(NamedTuple):
    number: int
    value: bytes
    """Of a varint: its bytes."""
    whole: bytes
    """The field with its key, as it stands in the message."""


def sums_for_batch_statistics(model: bytes) -> bytes | None:
    """Return the graph (an encoded ModelProto) with BatchNormalization on batch statistics written out; None if it has
    none. Raises ValueError if ``model`` is no encoded message.
    """
    if b"training_mode" not in model:
        return None
    return b"".join(_graph(field) if field.number == 7 else field.whole for field in _fields(model))


def _graph(field: Field) -> bytes:
    """Return a field that is a graph, with other nodes."""
    return _bytes(field.number, b"".join(_nodes(row) for row in _fields(field.value)))


def _nodes(field: Field) -> bytes:
    """Return a field of a graph, or the nodes in its place."""
    if field.number != 1 or b"training_mode" not in field.value:
        return field.whole
    node = list(_fields(field.value))
    (operator,) = (row.value for row in node if row.number == 4)
    inputs, outputs = ([row.value.decode() for row in node if row.number == number] for number in (1, 2))
    attributes = {}
    for attribute in (row.value for row in node if row.number == 5):
        parts = {row.number: row.value for row in _fields(attribute)}
        attributes[parts[1]] = parts
    # Numbers that are 0 need not be written. With another momentum the outputs are not the batch's own statistics.
    training = attributes.get(b"training_mode", {}).get(3, b"\0") != b"\0"
    momentum = struct.unpack("<f", attributes.get(b"momentum", {2: struct.pack("<f", 0.9)}).get(2, b"\0\0\0\0"))[0]
    if operator != b"BatchNormalization":
        return _bytes(1, b"".join(_with_other_graphs(row) if row.number == 5 else row.whole for row in node))
    if not training or momentum or len(outputs) != 3:
        return field.whole
    epsilon: float = struct.unpack("<f", attributes.get(b"epsilon", {2: struct.pack("<f", 1e-5)})[2])[0]
    x, scale, shift = inputs[:3]
    result, mean, variance = outputs
    return b"".join(_sums(x, scale, shift, result, mean, variance, epsilon))


def _with_other_graphs(attribute: Field) -> bytes:
    """Return an attribute of an If or a Loop with other nodes in its graphs."""
    return _bytes(5, b"".join(_graph(row) if row.number in (6, 11) else row.whole for row in _fields(attribute.value)))


def _sums(x: str, scale: str, shift: str, result: str, mean: str, variance: str, epsilon: float) -> Iterator[bytes]:
    """Yield nodes that give the result and the batch's mean and variance. ``x`` is (examples, channels, ...)."""
    name = f"{result}.sums."
    three, axes, one = name + "three", name + "axes", name + "one"
    flat, middle, centred, squared = name + "flat", name + "middle", name + "centred", name + "squared"
    yield _node("Constant", [], [three], _ints("value_ints", [0, 0, -1]))  # 0: as it is
    yield _node("Constant", [], [axes], _ints("value_ints", [0, 2]))
    yield _node("Constant", [], [one], _ints("value_ints", [-1]))
    yield _node("Reshape", [x, three], [flat])
    yield _node("ReduceMean", [flat, axes], [middle], _int("keepdims", 1))
    yield _node("Sub", [flat, middle], [centred])
    yield _node("Mul", [centred, centred], [squared])
    yield _node("ReduceMean", [squared, axes], [variance], _int("keepdims", 0))
    yield _node("Reshape", [middle, one], [mean])
    yield _node("BatchNormalization", [x, scale, shift, mean, variance], [result], _float("epsilon", epsilon))


def _fields(message: bytes) -> Iterator[Field]:
    place = 0
    while place < len(message):
        start = place
        key, place = _varint(message, place)
        kind, value = key & 7, place
        if kind == VARINT:
            _, place = _varint(message, place)
        elif kind == BYTES:
            size, value = _varint(message, place)
            place = value + size
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            place += 8 if kind == EIGHT_BYTES else 4
        else:
            raise ValueError(f"a field of the unknown kind {kind}: this is no encoded message")
        if place > len(message):
            raise ValueError(f"a field ends at byte {place} of {len(message)}: this is no encoded message")
        yield Field(key >> 3, message[value:place], message[start:place])


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return the number at ``place``, and where it ends."""
    number = shift = 0
    while place < len(message):
        byte = message[place]
        number |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return number, place
    raise ValueError("a number has no end: this is no encoded message")


def _number(value: int) -> bytes:
    """Return a varint. Negative numbers are encoded as their 64 bits."""
    value &= 2**64 - 1
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _bytes(field: int, content: bytes) -> bytes:
    return _number(field << 3 | BYTES) + _number(len(content)) + content


def _node(operator: str, inputs: list[str], outputs: list[str], *attributes: bytes) -> bytes:
    texts = [(1, name) for name in inputs] + [(2, name) for name in outputs] + [(4, operator)]
    content = b"".join(_bytes(number, text.encode()) for number, text in texts)
    return _bytes(1, content + b"".join(_bytes(5, attribute) for attribute in attributes))


def _int(name: str, value: int) -> bytes:
    return _bytes(1, name.encode()) + _number(3 << 3) + _number(value) + _number(20 << 3) + _number(2)


def _ints(name: str, values: list[int]) -> bytes:
    numbers = b"".join(_number(8 << 3) + _number(value) for value in values)
    return _bytes(1, name.encode()) + numbers + _number(20 << 3) + _number(7)


def _float(name: str, value: float) -> bytes:
    number = _number(2 << 3 | FOUR_BYTES) + struct.pack("<f", value)
    return _bytes(1, name.encode()) + number + _number(20 << 3) + _number(1)
