"""A sum of updates in a file: its tensors, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import checksum
from numpy.typing import NDArray

from fleetlearn_coordinator.storage.blobs import Tensors
from fleetlearn_coordinator.storage.errors import StoreError


def write_sum(path: Path, tensors: Tensors) -> int:
    """Write the tensors of a sum that no process needs after a restart: the file is there as a
    whole, or not at all. Returns its CRC-32. Raises OSError."""
    crc32, draft = 0, path.with_suffix(".draft")
    with draft.open("wb") as file:
        for tensor in tensors.values():
            content = np.ascontiguousarray(tensor).data.cast("B")
            crc32 = checksum(content, crc32)
            file.write(content)
    draft.replace(path)
    return crc32


def read_sum(path: Path, like: Tensors, crc32: int) -> dict[str, NDArray[Any]]:
    """Return the tensors of a saved sum, in new memory. ``like``: tensors of their names, dtypes
    and sizes, in the file's order. Raises StoreError (damaged), OSError."""
    place, found = 0, 0
    tensors: dict[str, NDArray[Any]] = {}
    for name, wanted in like.items():
        tensors[name] = np.fromfile(path, wanted.dtype, wanted.size, offset=place)
        if tensors[name].size != wanted.size:
            raise StoreError(
                Code.WRONG_LENGTH, f"{path} is shorter than the sum of a round: it is damaged"
            )
        place, found = place + wanted.nbytes, checksum(tensors[name].data.cast("B"), found)
    if found != crc32:
        raise StoreError(Code.WRONG_HASH, f"{path} was changed after it was written: it is damaged")
    return tensors
