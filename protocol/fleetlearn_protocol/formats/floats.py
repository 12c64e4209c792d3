"""Floating-point formats: each element by itself, rounded to the nearest value (ties to even).

Bytes are decoded and checked in whatever shape they have.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.rows import Bytes, Format
from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.vector import Vector, check_finite

_FLOAT32 = np.dtype("<f4")
_LARGEST = {"float16": 65504.0, "bfloat16": float(np.uint32(0x7F7F0000).view(np.float32))}
_SIGN, _MAGNITUDE = np.uint32(0x8000), np.uint32(0x7FFF)


def _encode_float32(rows: Vector, fractions: Fractions) -> Bytes:
    return np.ascontiguousarray(rows, "<f4").view(np.uint8)


def _decode_float32(content: Bytes, elements: int) -> Vector:
    return content.view(_FLOAT32)


def _check_float32(content: Bytes, elements: int) -> float:
    return check_finite(content.view(_FLOAT32).reshape(-1))


def _encode_float16(rows: Vector, fractions: Fractions) -> Bytes:
    with np.errstate(over="ignore"):
        halves = rows.astype("<f2")
    _refuse_infinity("float16", rows, halves.view("<u2"), 0x7C00)
    return halves.view(np.uint8)


def _decode_float16(content: Bytes, elements: int) -> Vector:
    # numpy converts one element at a time on many processors. The same bits as a float32, 2^112
    # times too small, take a fifth of the time. All elements are finite here.
    halves = content.view("<u2").astype(np.uint32)
    signs = (halves & _SIGN) << np.uint32(16)
    halves &= _MAGNITUDE
    halves <<= np.uint32(13)
    magnitudes = halves.view(np.float32)
    magnitudes *= np.float32(2.0**112)
    halves |= signs
    return magnitudes


def _encode_bfloat16(rows: Vector, fractions: Fractions) -> Bytes:
    bits = np.ascontiguousarray(rows, "<f4").view("<u4")
    # Round to nearest, ties to even: half of the dropped bits' range is added, less one unless the
    # last bit that is kept is odd.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    halves: NDArray[np.uint16] = (rounded >> np.uint32(16)).astype("<u2")
    _refuse_infinity("bfloat16", rows, halves, 0x7F80)
    return halves.view(np.uint8)


def _decode_bfloat16(content: Bytes, elements: int) -> Vector:
    bits = content.view("<u2").astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def _check_halves(infinity: int, decode: Any, content: Bytes, elements: int) -> float:
    magnitudes = content.view("<u2") & np.uint16(0x7FFF)
    # Without their signs, the bits of halves are in the order of their magnitudes, and infinity and
    # NaN come last.
    largest = magnitudes.max(initial=0)
    if largest >= infinity:
        index = int(np.flatnonzero(magnitudes.reshape(-1) >= infinity)[0])
        what = "infinite" if magnitudes.reshape(-1)[index] == infinity else "NaN"
        raise ProtocolError(
            Code.NOT_FINITE, f"element {index} of the vector is {what}; it must be finite"
        )
    return float(decode(np.array([largest], "<u2").view(np.uint8), 1)[0])


def _refuse_infinity(name: str, rows: Vector, halves: NDArray[np.uint16], infinity: int) -> None:
    """Raise ProtocolError (out-of-range) if an element became infinity."""
    if (halves & np.uint16(0x7FFF)).max(initial=0) >= infinity:
        raise ProtocolError(
            Code.OUT_OF_RANGE,
            f"the vector's largest element is {np.abs(rows).max():g}; {name} holds up to "
            f"{_LARGEST[name]:g}. Training has probably diverged: lower the learning rate, or use "
            "the encoding float32",
        )


def _bytes_of(item: int, elements: int) -> int:
    return item * elements


FLOAT32 = Format(partial(_bytes_of, 4), _encode_float32, _decode_float32, _check_float32)
"""Little-endian IEEE 754 single precision, 4 bytes to an element."""
FLOAT16 = Format(
    partial(_bytes_of, 2),
    _encode_float16,
    _decode_float16,
    partial(_check_halves, 0x7C00, _decode_float16),
)
"""Little-endian IEEE 754 half precision: 11 significant bits, up to 65504; below 6e-5 with fewer
bits."""
BFLOAT16 = Format(
    partial(_bytes_of, 2),
    _encode_bfloat16,
    _decode_bfloat16,
    partial(_check_halves, 0x7F80, _decode_bfloat16),
)
"""The upper half of a float32: 8 significant bits, float32's range."""
