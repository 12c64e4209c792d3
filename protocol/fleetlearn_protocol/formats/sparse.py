"""Top-k: of each row only the elements of the greatest magnitudes travel, with their places; the
others count as 0.

Alistarh et al., "The Convergence of Sparsified Gradient Methods", arXiv 1809.10505. What did not
travel is to be added to the device's next update (error feedback), since the mean of such updates
is not the mean of the whole ones.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.rows import Bytes, Format, joined
from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.vector import Vector

PLACE = 2
"""Bytes of an element's place in its row."""


def top_k(share: Fraction, values: Format) -> Format:
    """Return the format that keeps this share of each row, rounded up, and writes it as
    ``values``."""

    def size(elements: int) -> int:
        return (PLACE * kept(elements)) + values.size(kept(elements))

    def kept(elements: int) -> int:
        return -(-elements * share.numerator // share.denominator)

    def encode(rows: Vector, fractions: Fractions) -> Bytes:
        places = greatest(rows, kept(rows.shape[1]))
        chosen = np.take_along_axis(rows, places, axis=1)
        return joined(places.astype("<u2"), values.encode(chosen, fractions))

    def decode(content: Bytes, elements: int) -> Vector:
        count = kept(elements)
        rows = np.zeros((len(content), elements), np.float32)
        places = _places(content, count).astype(np.int64)
        places += elements * np.arange(len(content))[:, None]
        rows.reshape(-1)[places] = values.decode(content[:, PLACE * count :], count)
        return rows

    def check(content: Bytes, elements: int) -> float:
        count = kept(elements)
        places = _places(content, count)
        good = (places[:, 1:] > places[:, :-1]).all(axis=1) & (places[:, -1] < elements)
        if not good.all():
            row = int(np.flatnonzero(~good)[0])
            text = f"the places in block {row} must ascend and be below {elements}"
            raise ProtocolError(Code.BAD_ENCODING, text)
        return values.check(content[:, PLACE * count :], count)

    return Format(size, encode, decode, check)


def greatest(rows: Vector, count: int) -> NDArray[np.int64]:
    """Return the places of the elements with the greatest magnitudes, ascending: shape (rows,
    count). Of equal ones the first count."""
    length = rows.shape[1]
    # The bits of a positive float32 are in its order. With the place below them no two keys are
    # equal.
    keys = (np.ascontiguousarray(rows).view(np.uint32) & np.uint32(0x7FFFFFFF)).astype(
        np.uint64
    ) << np.uint64(16)
    keys |= np.arange(length, 0, -1, dtype=np.uint64)
    chosen = np.partition(keys, length - count, axis=1)[:, length - count :] & np.uint64(0xFFFF)
    places: NDArray[np.int64] = length - chosen.astype(np.int64)
    places.sort(axis=1)
    return places


def _places(content: Bytes, count: int) -> NDArray[np.uint16]:
    return np.ascontiguousarray(content[:, : PLACE * count]).view("<u2")
