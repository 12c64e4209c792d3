"""Words of masked updates: uint32, any of which is valid, as they look random until the masks of
all devices are taken off their sum. They are no floats: nobody encodes or decodes them as such."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.rows import Bytes, Format
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.vector import Vector

_WORD = np.dtype("<u4")


def words_to_bytes(words: NDArray[np.uint32]) -> memoryview:
    """Return the bytes that masked words, uint32, shape (n,), travel as."""
    return np.ascontiguousarray(words, _WORD).data.cast("B")


def words_from_bytes(content: Buffer) -> NDArray[np.uint32]:
    """Return the masked words of these bytes: uint32, shape (n,), which may be a view. Raises
    ProtocolError (wrong-length) where they are not whole words."""
    size = memoryview(content).nbytes
    if size % _WORD.itemsize:
        text = f"{size} bytes of masked words were given; each word takes {_WORD.itemsize}"
        raise ProtocolError(Code.WRONG_LENGTH, text)
    return np.frombuffer(content, _WORD).astype(np.uint32, copy=False)


def _encode(rows: Vector, fractions: Fractions) -> Bytes:
    raise ProtocolError(
        Code.BAD_ENCODING,
        "floats were given for the encoding masked; it takes words to which a mask was added",
    )


def _decode(content: Bytes, elements: int) -> Vector:
    raise ProtocolError(
        Code.BAD_ENCODING,
        "masked words have no floats in them: they are added up, and the masks' sum is taken off",
    )


MASKED = Format(
    size=lambda elements: _WORD.itemsize * elements,
    encode=_encode,
    decode=_decode,
    check=lambda content, elements: 0.0,
)
"""Little-endian uint32, 4 bytes to an element. Nobody knows the magnitude of what is masked: it
counts as 0."""
