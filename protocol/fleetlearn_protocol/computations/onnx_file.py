"""Writes ONNX files without the onnx package, which neither devices nor coordinators have: the few
messages of ONNX's onnx.proto that a computation's model needs."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.protobuf import write_key, write_message, write_number, write_text

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
            *(write_message(1, _node(node)) for node in nodes),
            write_text(2, name),
            *(write_message(5, _tensor(*item)) for item in constants.items()),
            *(write_message(11, _value(value)) for value in inputs),
            *(write_message(12, _value(value)) for value in outputs),
        ]
    )
    opsets = (
        write_text(1, domain) + write_number(2, version) for domain, version in OPSETS.items()
    )
    return b"".join(
        [
            write_number(1, IR_VERSION),
            write_text(2, "fleetlearn"),
            write_message(7, graph),
            *(write_message(8, opset) for opset in opsets),
        ]
    )


def _node(node: OnnxNode) -> bytes:
    return b"".join(
        [
            *(write_text(1, name) for name in node.inputs),
            *(write_text(2, name) for name in node.outputs),
            write_text(4, node.operator),
            *(write_message(5, _attribute(*item)) for item in node.attributes.items()),
            write_text(7, node.domain) if node.domain else b"",
        ]
    )


def _attribute(name: str, value: Any) -> bytes:
    several = isinstance(value, list)
    one = value[0] if several else value
    if isinstance(one, str):
        at, kind, fields = (9, 8, value) if several else (4, 3, [value])
        content = b"".join(write_text(at, one) for one in fields)
    elif isinstance(one, float):
        at, kind, fields = (7, 6, value) if several else (2, 1, [value])
        content = b"".join(write_key(at, 5) + struct.pack("<f", real) for real in fields)
    else:
        at, kind, fields = (8, 7, value) if several else (3, 2, [value])
        content = b"".join(write_number(at, whole) for whole in fields)
    return write_text(1, name) + content + write_number(20, kind)


def _tensor(name: str, array: NDArray[Any]) -> bytes:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return b"".join(
        [
            *(write_number(1, size) for size in array.shape),
            write_number(2, DTYPES[array.dtype.name]),
            write_text(8, name),
            write_message(9, little.tobytes()),
        ]
    )


def _value(value: OnnxValue) -> bytes:
    sizes: Iterable[bytes] = (write_number(1, size) for size in value.shape)
    axes = [write_text(2, "n"), *sizes]
    shape = b"".join(write_message(1, axis) for axis in axes)
    tensor = write_number(1, DTYPES[value.dtype]) + write_message(2, shape)
    return write_text(1, value.name) + write_message(2, write_message(1, tensor))
