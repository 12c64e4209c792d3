"""A vector as its difference from another that the receiver has: lossless, and smaller where the
two are alike.

The bytes of both vectors are combined by exclusive or, sorted by their place in their element
(first the lowest byte of each element, at last the highest, where the sign and most of the exponent
are: mostly zeros), and compressed by zlib (RFC 1950), which every language and every browser has.
"""

from __future__ import annotations

import zlib

import numpy as np

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.vector import Vector

LEVEL = 1
"""zlib's level: higher ones take several times the CPU, and make the mantissas' noise no
smaller."""


def encode_delta(base: Vector, vector: Vector) -> bytes:
    """Return ``vector`` as its difference from ``base``, both float32, shape (n,)."""
    return zlib.compress(_planes(base, vector).T.tobytes(), LEVEL)


def apply_delta(base: Buffer, delta: Buffer) -> bytes:
    """Return the vector's bytes, made of the bytes of ``base``. Raises ProtocolError
    (bad-encoding)."""
    size = memoryview(base).nbytes
    reader = zlib.decompressobj()
    try:
        # a small delta must not become a huge vector
        difference = reader.decompress(delta, size + 1)
    except zlib.error as error:
        raise ProtocolError(
            Code.BAD_ENCODING, f"the difference cannot be decompressed: {error}"
        ) from None
    # Without `eof` a stream that is cut off, or goes on beyond the size, would pass.
    if len(difference) != size or size % 4 or not reader.eof:
        text = f"the difference is of {len(difference)} bytes or more; the base has {size}"
        raise ProtocolError(Code.BAD_ENCODING, text)
    planes = np.frombuffer(difference, np.uint8).reshape(4, -1)
    return (np.ascontiguousarray(planes.T).reshape(-1) ^ np.frombuffer(base, np.uint8)).tobytes()


def _planes(base: Vector, vector: Vector) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return (base.view(np.uint32) ^ vector.view(np.uint32)).view(np.uint8).reshape(-1, 4)
