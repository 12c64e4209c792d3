"""Writes ONNX files without the onnx package, which neither devices nor coordinators have: the few
messages of ONNX's onnx.proto that a computation's model needs, in protobuf's encoding
(protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IR_VERSION = 8
OPSETS = {"": 13, "ai.onnx.ml": 3}
"""Operators that the files use: of ONNX 1.8 and later."""
DTYPES = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float64": 11}
"""Name of a dtype -> onnx.proto's number of it."""


class OnnxNode(NamedTuple):
    """An operator's call."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = {}
    """int, float or text, or a list of one of these, by name."""
    domain: str = ""


class OnnxValue(NamedTuple):
    """An input or an output of a graph; its first axis counts the rows."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    """Of one row."""


def onnx_model(
    name: str,
    inputs: Sequence[OnnxValue],
    outputs: Sequence[OnnxValue],
    nodes: Sequence[OnnxNode],
    constants: Mapping[str, NDArray[Any]],
) -> bytes:
    """Return an ONNX file. constants: arrays that nodes take by name."""
    graph = b"".join(
        [
            *(_message(1, _node(node)) for node in nodes),
            _text(2, name),
            *(_message(5, _tensor(*item)) for item in constants.items()),
            *(_message(11, _value(value)) for value in inputs),
            *(_message(12, _value(value)) for value in outputs),
        ]
    )
    opsets = (_text(1, domain) + _number(2, version) for domain, version in OPSETS.items())
    return b"".join(
        [
            _number(1, IR_VERSION),
            _text(2, "fleetlearn"),
            _message(7, graph),
            *(_message(8, opset) for opset in opsets),
        ]
    )


def _node(node: OnnxNode) -> bytes:
    return b"".join(
        [
            *(_text(1, name) for name in node.inputs),
            *(_text(2, name) for name in node.outputs),
            _text(4, node.operator),
            *(_message(5, _attribute(*item)) for item in node.attributes.items()),
            _text(7, node.domain) if node.domain else b"",
        ]
    )


def _attribute(name: str, value: Any) -> bytes:
    several = isinstance(value, list)
    one = value[0] if several else value
    if isinstance(one, str):
        number, kind, fields = (9, 8, value) if several else (4, 3, [value])
        content = b"".join(_text(number, text) for text in fields)
    elif isinstance(one, float):
        number, kind, fields = (7, 6, value) if several else (2, 1, [value])
        content = b"".join(_key(number, 5) + struct.pack("<f", real) for real in fields)
    else:
        number, kind, fields = (8, 7, value) if several else (3, 2, [value])
        content = b"".join(_number(number, whole) for whole in fields)
    return _text(1, name) + content + _number(20, kind)


def _tensor(name: str, array: NDArray[Any]) -> bytes:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return b"".join(
        [
            *(_number(1, size) for size in array.shape),
            _number(2, DTYPES[array.dtype.name]),
            _text(8, name),
            _message(9, little.tobytes()),
        ]
    )


def _value(value: OnnxValue) -> bytes:
    sizes: Iterable[bytes] = (_number(1, size) for size in value.shape)
    axes = [_text(2, "n"), *sizes]
    shape = b"".join(_message(1, axis) for axis in axes)
    tensor = _number(1, DTYPES[value.dtype]) + _message(2, shape)
    return _text(1, value.name) + _message(2, _message(1, tensor))


def _text(number: int, text: str) -> bytes:
    return _message(number, text.encode())


def _message(number: int, content: bytes) -> bytes:
    return _key(number, 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _key(number, 0) + _varint(value)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers are as in two's complement
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
