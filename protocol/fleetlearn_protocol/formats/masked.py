"""Words of masked updates: uint32, any of which is valid, as they look random until the masks of
all devices are taken off their sum. They are no floats: nobody encodes or decodes them as such.

Where sums are modulo 2^24, the lower 3 bytes of each word travel, and the fourth is 0 again where
they are read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.rows import Bytes, Format
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.vector import Vector

_WORD = np.dtype("<u4")


def words_to_bytes(words: NDArray[np.uint32], width: int = _WORD.itemsize) -> memoryview:
    """Return the bytes that masked words, uint32, shape (n,), travel as: ``width``, 3 or 4, for
    each."""
    content = np.ascontiguousarray(words, _WORD)
    if width == _WORD.itemsize:
        return content.data.cast("B")
    lower = content.view(np.uint8).reshape(-1, _WORD.itemsize)[:, :width]
    return lower.reshape(-1).data  # a copy


def words_from_bytes(content: Buffer, width: int = _WORD.itemsize) -> NDArray[np.uint32]:
    """Return the masked words of these bytes, ``width`` to a word: uint32, shape (n,), which may be
    a view. Raises ProtocolError (wrong-length) where they are not whole words."""
    size = memoryview(content).nbytes
    if size % width:
        text = f"{size} bytes of masked words were given; each word takes {width}"
        raise ProtocolError(Code.WRONG_LENGTH, text)
    if width == _WORD.itemsize:
        return np.frombuffer(content, _WORD).astype(np.uint32, copy=False)
    found = np.zeros((size // width, _WORD.itemsize), np.uint8)
    found[:, :width] = np.frombuffer(content, np.uint8).reshape(-1, width)
    return found.view(_WORD).reshape(-1).astype(np.uint32, copy=False)


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


def _masked(width: int) -> Format:
    """Return the format of words of ``width`` bytes. Nobody knows how large masked elements are:
    their magnitude counts as 0."""
    return Format(
        size=lambda elements: width * elements,
        encode=_encode,
        decode=_decode,
        check=lambda content, elements: 0.0,
    )


MASKED = _masked(4)
"""Little-endian uint32, 4 bytes to an element."""
MASKED24 = _masked(3)
"""The lower 3 bytes of each, least significant first."""
MASKED64 = _masked(12)
"""Three words of 4 bytes to a whole number (``secure/whole_words.py``)."""
