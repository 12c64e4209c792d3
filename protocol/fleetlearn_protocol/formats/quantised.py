"""Integer formats: each row has a scale, a float32, and then a small integer for each element.

An element x becomes floor(x / scale + u) with a random fraction u: the integer above x / scale with
the probability of its distance from the integer below. So the expected value of what is decoded,
integer * scale, is x (stochastic rounding; Alistarh et al., "QSGD: Communication-Efficient SGD via
Gradient Quantization and Encoding", arXiv 1610.02132, section 3.1, here with the row's largest
magnitude in place of its norm).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.rows import Bytes, Format, joined
from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.vector import Vector

SCALE = 4
"""Bytes of a row's scale."""
_NIBBLES = ((np.arange(256)[:, None] >> np.array([0, 4])) & 15).astype(np.int8)
_INTEGERS = np.where(_NIBBLES > 7, _NIBBLES - 16, _NIBBLES)
_PAIRS = _INTEGERS.astype(np.float32).view(np.uint64)[:, 0]
"""Byte -> the bits of the two integers in it as float32."""
_GREATEST = np.abs(_INTEGERS).max(axis=1).astype(np.uint8)
"""Byte -> the greater magnitude of the two."""


def quantise(rows: Vector, levels: int, fractions: Fractions) -> tuple[Vector, NDArray[np.int8]]:
    """Return the rows' scales, shape (rows, 1), and integers from -levels to levels, (rows, n)."""
    largest = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64)
    scales = (largest / levels).astype(np.float32)
    # No integer may be beyond the levels: the scale is the smallest float32 that is not below
    # largest / levels.
    scales = np.where(
        scales * np.float64(levels) < largest, np.nextafter(scales, np.float32(np.inf)), scales
    )
    # In float64: a quotient that float32 had rounded would no longer be right on average.
    ratios = rows / np.where(scales == 0, 1.0, scales.astype(np.float64))
    ratios += fractions.next(rows.size).reshape(rows.shape)
    return scales, np.floor(ratios, out=ratios).astype(np.int8)


def _scales(content: Bytes) -> Vector:
    return np.ascontiguousarray(content[:, :SCALE]).view("<f4")


def _largest(content: Bytes, greatest: NDArray[np.generic]) -> float:
    """Return the greatest magnitude: of scales times the rows' greatest integers."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.abs(_scales(content)[:, 0]) * greatest.astype(np.float32)
    largest = float(products.max(initial=0.0))
    if not np.isfinite(largest):
        row = int(np.flatnonzero(~np.isfinite(products))[0])
        raise ProtocolError(
            Code.NOT_FINITE,
            f"the scale of block {row} is {_scales(content)[row, 0]}; it and the block's elements "
            "must be finite",
        )
    return largest


def _size_int8(elements: int) -> int:
    return SCALE + elements


def _encode_int8(rows: Vector, fractions: Fractions) -> Bytes:
    return joined(*quantise(rows, 127, fractions))


def _decode_int8(content: Bytes, elements: int) -> Vector:
    decoded = content[:, SCALE:].view(np.int8).astype(np.float32)
    decoded *= _scales(content)
    return decoded


def _check_int8(content: Bytes, elements: int) -> float:
    integers = content[:, SCALE:].view(np.int8)
    # As int16, since 128 is no int8: an encoder of somebody else may send -128.
    greatest = np.maximum(
        integers.max(axis=1).astype(np.int16), -integers.min(axis=1).astype(np.int16)
    )
    return _largest(content, greatest)


def _size_int4(elements: int) -> int:
    return SCALE + (elements + 1) // 2


def _encode_int4(rows: Vector, fractions: Fractions) -> Bytes:
    scales, integers = quantise(rows, 7, fractions)
    nibbles = np.zeros((len(rows), 2 * (_size_int4(rows.shape[1]) - SCALE)), np.uint8)
    nibbles[:, : rows.shape[1]] = integers.view(np.uint8) & np.uint8(15)
    return joined(scales, nibbles[:, ::2] | nibbles[:, 1::2] << np.uint8(4))


def _decode_int4(content: Bytes, elements: int) -> Vector:
    # "clip" is the quickest; no byte is beyond the table
    pairs = np.take(_PAIRS, content[:, SCALE:], mode="clip")
    decoded = pairs.view(np.float32)[:, :elements]
    decoded *= _scales(content)
    return decoded


def _check_int4(content: Bytes, elements: int) -> float:
    if elements % 2 and (content[:, -1] > 15).any():
        row = int(np.flatnonzero(content[:, -1] > 15)[0])
        raise ProtocolError(
            Code.BAD_ENCODING, f"the last half byte of block {row} has no element and must be 0"
        )
    return _largest(content, np.take(_GREATEST, content[:, SCALE:], mode="clip").max(axis=1))


INT8 = Format(_size_int8, _encode_int8, _decode_int8, _check_int8)
"""A scale, and 8 bits in two's complement for each element; encoders use -127 to 127."""
INT4 = Format(_size_int4, _encode_int4, _decode_int4, _check_int4)
"""A scale, and 4 bits in two's complement for each element, the first of two in the lower half of
their byte; encoders use -7 to 7."""
