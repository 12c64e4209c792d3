"""What a format is: a way to write rows of float32, all of one length, as rows of bytes, all of one
length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.vector import Vector

Bytes: TypeAlias = NDArray[np.uint8]


class Format(NamedTuple):
    """A way to write rows of n elements. The elements are finite wherever rows are encoded or
    decoded."""

    size: Callable[[int], int]
    """n -> bytes of a row."""
    encode: Callable[[Vector, Fractions], Bytes]
    """float32, shape (rows, n) -> bytes, shape (rows, size(n)). Draws what it needs in the
    elements' order. Raises ProtocolError (out-of-range): an element is larger than the format can
    hold."""
    decode: Callable[[Bytes, int], Vector]
    """Bytes, n -> float32, shape (rows, n), which may be a view into them."""
    check: Callable[[Bytes, int], float]
    """Bytes, n -> the greatest magnitude of their elements. Raises ProtocolError (not-finite,
    bad-encoding)."""


def joined(*columns: NDArray[Any]) -> Bytes:
    """Return the rows' bytes of these arrays, each of shape (rows, any), side by side."""
    return np.concatenate(
        [np.ascontiguousarray(column).view(np.uint8) for column in columns], axis=1
    )
