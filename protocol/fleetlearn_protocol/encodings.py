"""How a vector of float32 becomes the bytes that travel, and becomes a vector again.

A task names the encoding of each vector that it sends and of each part that it asks for. To add an encoding, add it to
ENCODINGS and to section 4 of PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import Part, VectorReference
from fleetlearn_protocol.vector import Vector, check_finite, checksum, digest


class Encoding(NamedTuple):
    """One way to write a vector as bytes. Any run of whole elements can be encoded, decoded and checked by itself."""

    name: str
    """Its name on the wire."""
    size: Callable[[int], int]
    """Number of elements -> number of bytes."""
    encode: Callable[[Vector], memoryview]
    """float32 vector, shape (n,) -> its bytes."""
    decode: Callable[[Buffer], Vector]
    """Bytes -> float32 vector, shape (n,), which may be a view into them. Raises ProtocolError (wrong-length) if they
    are not whole elements."""
    check: Callable[[Buffer], float]
    """Bytes -> the greatest magnitude of their elements. Raises ProtocolError (wrong-length, not-finite)."""

    def reference(self, name: str, vector: Vector) -> VectorReference:
        """Return what a task says about a vector that it sends in this encoding."""
        content = self.encode(vector)
        return VectorReference(name, digest(content), content.nbytes, self.name)

    def part(self, name: str, content: Buffer) -> Part:
        """Return what a report says about a part whose bytes, in this encoding, are ``content``."""
        return Part(name, self.name, memoryview(content).nbytes, checksum(content))


def _float32_size(elements: int) -> int:
    return 4 * elements


def _encode_float32(vector: Vector) -> memoryview:
    return np.ascontiguousarray(vector, "<f4").data.cast("B")


def _decode_float32(content: Buffer) -> Vector:
    size = memoryview(content).nbytes
    if size % 4:
        raise ProtocolError(Code.WRONG_LENGTH, f"{size} bytes of float32 were given; expected a multiple of 4")
    return np.frombuffer(content, "<f4")


def _check_float32(content: Buffer) -> float:
    return check_finite(_decode_float32(content))


FLOAT32 = Encoding("float32", _float32_size, _encode_float32, _decode_float32, _check_float32)
"""Little-endian IEEE 754 single precision, 4 bytes to an element."""

ENCODINGS = {encoding.name: encoding for encoding in (FLOAT32,)}
"""Name on the wire -> encoding."""
