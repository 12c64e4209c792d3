"""Arrays of a batch on the wire: what a message says of each, and their bytes one after the
other."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.manifest import Input, TensorName
from fleetlearn_protocol.messages import Checksum, Identifier
from fleetlearn_protocol.vector import Vector, check_finite, checksum

PLAIN = "plain"
"""The encoding of arrays that are not float32: their elements as they are in memory,
little-endian."""
MOST_BYTES = 2**28
"""Most bytes of a message's arrays."""


class ArrayPart(msgspec.Struct, frozen=True):
    """One array that follows a message: n rows of an array of the bundle."""

    name: TensorName
    """As in the bundle's batch; `gradient` for a gradient."""
    encoding: Identifier
    """An encoding of section 4 for float32, `plain` for other types."""
    size: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    """Bytes."""
    crc32: Checksum
    """Of these bytes."""


def encode_arrays(
    arrays: Sequence[tuple[str, NDArray[Any]]], encoding: str, seed: int = 0
) -> tuple[tuple[ArrayPart, ...], bytes]:
    """Return what a message says of arrays, and their bytes. Raises ProtocolError (not-finite)."""
    parts, contents = [], []
    for name, array in arrays:
        if array.dtype == np.float32:
            flat = np.ascontiguousarray(array).reshape(-1)
            check_finite(flat)
            content, used = bytes(find_encoding(encoding).encode(flat, seed)), encoding
        else:
            little = array.dtype.newbyteorder("<")
            content, used = np.ascontiguousarray(array, little).tobytes(), PLAIN
        parts.append(ArrayPart(name, used, len(content), checksum(content)))
        contents.append(content)
    return tuple(parts), b"".join(contents)


def decode_arrays(
    parts: Sequence[ArrayPart],
    content: bytes | memoryview,
    expected: Sequence[Input],
    rows: int,
    encoding: str,
) -> list[NDArray[Any]]:
    """Return the arrays, of ``rows`` rows each, in the order of ``expected``. Raises ProtocolError:
    other arrays, sizes or encodings than expected, other bytes than their checksum says, NaN."""
    names = [part.name for part in parts]
    if names != [row.name for row in expected]:
        raise ProtocolError(
            Code.BAD_MESSAGE,
            f"the arrays {names} were sent; expected {[row.name for row in expected]}",
        )
    view, place, found = memoryview(content), 0, []
    for part, row in zip(parts, expected, strict=True):
        piece = view[place : place + part.size]
        place += part.size
        elements = rows * prod(row.shape)
        is_float = row.dtype == "float32"
        wanted = encoding if is_float else PLAIN
        if part.encoding != wanted:
            raise ProtocolError(
                Code.BAD_ENCODING, f"{part.name} is {part.encoding}; expected {wanted}"
            )
        size = (
            find_encoding(wanted).size(elements)
            if is_float
            else elements * np.dtype(row.dtype).itemsize
        )
        if part.size != size or len(piece) != size:
            raise ProtocolError(
                Code.WRONG_LENGTH,
                f"{part.name} has {part.size} bytes; {rows} rows of it have {size}",
            )
        if checksum(piece) != part.crc32:
            raise ProtocolError(
                Code.WRONG_HASH, f"{part.name} has another CRC-32 than the message says"
            )
        if is_float:
            find_encoding(wanted).check(piece, elements)
            array: NDArray[Any] = find_encoding(wanted).decode(piece, elements)
        else:
            array = np.frombuffer(piece, np.dtype(row.dtype).newbyteorder("<"))
        found.append(array.reshape(rows, *row.shape))
    if place != len(view):
        raise ProtocolError(
            Code.WRONG_LENGTH, f"{len(view)} bytes were sent; the parts have {place}"
        )
    return found


def read_bottom(content: bytes | memoryview, size: int) -> Vector:
    """Return a bottom that was sent: float32, shape (size,). Raises ProtocolError: another length,
    NaN or infinity."""
    if len(content) != 4 * size:
        raise ProtocolError(
            Code.WRONG_LENGTH,
            f"a bottom of {len(content)} bytes was sent; this model's has {4 * size}",
        )
    vector: Vector = np.frombuffer(content, "<f4").astype(np.float32)
    check_finite(vector)
    return vector
