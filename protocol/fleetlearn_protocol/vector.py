"""The model as one flat vector in memory: contiguous float32, tensors in manifest order, each a
view into it.

encodings.py says how such a vector becomes bytes on the wire.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Buffer

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError(
        "fleetlearn keeps parameters as little-endian float32 views; this machine is big-endian"
    )

Vector = NDArray[np.float32]


class TableRow(Protocol):
    """A row of the manifest's parameter or state table: a tensor's place in the vector."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...


def views(vector: Vector, table: Sequence[TableRow]) -> dict[str, Vector]:
    """Return name -> float32 array of the table's shape, each a view into ``vector`` (shape (P,)),
    not a copy.

    ``table`` may be a part of the manifest's. Raises ValueError on a vector too short for it, or
    not flat.
    """
    end = max((entry.offset + prod(entry.shape) for entry in table), default=0)
    if vector.ndim != 1 or vector.size < end:
        raise ValueError(
            f"a vector of shape {vector.shape} was given; the table needs {end} elements"
        )
    return {
        entry.name: vector[entry.offset : entry.offset + prod(entry.shape)].reshape(entry.shape)
        for entry in table
    }


def flatten(tensors: Mapping[str, NDArray[np.generic]], table: Sequence[TableRow]) -> Vector:
    """Return the tensors as one vector. Raises ValueError on a missing, surplus or wrongly shaped
    tensor."""
    vector = empty_vector({name: tensor.shape for name, tensor in tensors.items()}, table)
    for name, view in views(vector, table).items():
        view[...] = tensors[name]
    return vector


def empty_vector(shapes: Mapping[str, tuple[int, ...]], table: Sequence[TableRow]) -> Vector:
    """Return a vector for tensors of these shapes, with any values. Raises ValueError as
    ``flatten`` does."""
    missing = [entry.name for entry in table if entry.name not in shapes]
    surplus = sorted(set(shapes) - {entry.name for entry in table})
    if missing or surplus:
        raise ValueError(
            f"the tensors do not fit the table: missing {missing}, not in it {surplus}"
        )
    for row in table:
        if shapes[row.name] != row.shape:
            raise ValueError(
                f"tensor {row.name} has shape {shapes[row.name]}; the table says {row.shape}"
            )
    return np.empty(sum(prod(entry.shape) for entry in table), np.float32)


def gather(vector: NDArray[Any], places: Sequence[slice]) -> NDArray[Any]:
    """Return a copy of the elements in these places, one place after the other. ``vector`` may have
    axes before the last."""
    return np.concatenate([vector[..., :0], *(vector[..., part] for part in places)], axis=-1)


def scatter(vector: NDArray[Any], places: Sequence[slice], values: NDArray[Any] | float) -> None:
    """Undo ``gather``: write the values into these places of ``vector``. A number goes into all of
    them."""
    begin = 0
    for part in places:
        end = begin + part.stop - part.start
        vector[..., part] = values[..., begin:end] if isinstance(values, np.ndarray) else values
        begin = end


def digest(content: Buffer | Vector) -> str:
    """Return the SHA-256 of the bytes (an array's in C order), in lower-case hexadecimal."""
    return hashlib.sha256(_bytes(content)).hexdigest()


def stream_digest(stream: IO[bytes]) -> str:
    """Return the SHA-256 of what is left of a stream, in hexadecimal. Raises OSError."""
    found = hashlib.sha256()  # hashlib.file_digest is not in Python 3.10
    while block := stream.read(2**20):
        found.update(block)
    return found.hexdigest()


def checksum(content: Buffer | Vector, before: int = 0) -> int:
    """Return the CRC-32 of the bytes. ``before`` is the CRC-32 of the bytes before them, 0 if there
    are none.

    It guards updates against damage, and against chunks of another update when an upload is
    resumed. A cryptographic hash would protect no better, since the device itself computes it, and
    would cost four times the CPU: it would be the coordinator's largest cost of an update.
    """
    return zlib.crc32(_bytes(content), before)


def _bytes(content: Buffer | Vector) -> Buffer:
    return np.ascontiguousarray(content).data if isinstance(content, np.ndarray) else content


def check_finite(vector: Vector) -> float:
    """Return the largest magnitude in ``vector`` (0 if it is empty). Raises ProtocolError
    (not-finite), naming the first place."""
    if not vector.size:
        return 0.0
    # NaN passes through min and max both, so two passes without a temporary see everything.
    largest = max(-float(vector.min()), float(vector.max()))
    if not isfinite(largest):
        index = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise ProtocolError(
            Code.NOT_FINITE, f"element {index} of the vector is {vector[index]}; it must be finite"
        )
    return largest
