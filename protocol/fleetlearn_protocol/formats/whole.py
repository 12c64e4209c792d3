"""Whole numbers, little-endian: sums as int64, numbers of rows as uint32. They are no floats:
nobody encodes or decodes them as such."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.rows import Bytes, Format
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.vector import Vector

_WHOLE = np.dtype("<i8")


def sums_to_bytes(sums: NDArray[np.int64]) -> memoryview:
    """Return the bytes that sums, int64, shape (n,), travel as: 8 for each up to the last that is
    not 0, and at least one."""
    filled = np.flatnonzero(sums)
    sums = sums[: filled[-1] + 1 if len(filled) else 1]
    return np.ascontiguousarray(sums, _WHOLE).data.cast("B")


def sums_from_bytes(content: Buffer, size: int | None = None) -> NDArray[np.int64]:
    """Return the sums of these bytes: int64, which may be a view. size: how many there are with the
    zeros at the end that did not come; None: without those. Raises ProtocolError
    (wrong-length) where they are not whole numbers of 8 bytes."""
    given = memoryview(content).nbytes
    if given % _WHOLE.itemsize:
        raise ProtocolError(
            Code.WRONG_LENGTH, f"{given} bytes of sums were given; each sum takes 8"
        )
    sums = np.frombuffer(content, _WHOLE).astype(np.int64, copy=False)
    return sums if size is None else np.pad(sums, (0, size - len(sums)))


def _encode(rows: Vector, fractions: Fractions) -> Bytes:
    raise ProtocolError(
        Code.BAD_ENCODING, "floats were given for the encoding int64; it takes whole numbers"
    )


def _decode(content: Bytes, elements: int) -> Vector:
    raise ProtocolError(Code.BAD_ENCODING, "sums were given; floats were expected")


def _check(content: Bytes, elements: int) -> float:
    sums = content.reshape(-1).view(_WHOLE)
    # As floats: the magnitude of -2^63 is no int64.
    return max(-float(sums.min()), float(sums.max()), 0.0) if sums.size else 0.0


INT64 = Format(size=lambda elements: 8 * elements, encode=_encode, decode=_decode, check=_check)
"""8 bytes to a number."""


_ROW = np.dtype("<u4")


def rows_to_bytes(rows: NDArray[np.int64]) -> memoryview:
    """Return the bytes that numbers of rows, ascending, shape (n,), travel as: 4 for each."""
    return np.ascontiguousarray(rows, _ROW).data.cast("B")


def rows_from_bytes(content: Buffer) -> NDArray[np.int64]:
    """Return the numbers of rows of these bytes, int64. Raises ProtocolError (wrong-length; bad-
    encoding: they do not ascend)."""
    size = memoryview(content).nbytes
    if size % _ROW.itemsize:
        text = f"{size} bytes of numbers of rows were given; each takes {_ROW.itemsize}"
        raise ProtocolError(Code.WRONG_LENGTH, text)
    rows = np.frombuffer(content, _ROW).astype(np.int64)
    if (rows[1:] <= rows[:-1]).any():
        place = int((rows[1:] <= rows[:-1]).argmax())
        raise ProtocolError(
            Code.BAD_ENCODING,
            f"row {rows[place + 1]} comes after row {rows[place]}; numbers of rows must ascend",
        )
    return rows


def _encode_rows(rows: Vector, fractions: Fractions) -> Bytes:
    raise ProtocolError(
        Code.BAD_ENCODING, "floats were given for the encoding uint32; it takes numbers of rows"
    )


def _decode_rows(content: Bytes, elements: int) -> Vector:
    raise ProtocolError(Code.BAD_ENCODING, "numbers of rows were given; floats were expected")


def _check_rows(content: Bytes, elements: int) -> float:
    return float(content.reshape(-1).view(_ROW).max(initial=0))


UINT32 = Format(
    size=lambda elements: 4 * elements,
    encode=_encode_rows,
    decode=_decode_rows,
    check=_check_rows,
)
"""4 bytes to a number."""
