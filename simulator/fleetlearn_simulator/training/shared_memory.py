"""Memory that two processes share.

Large models and updates then need not go through the pipe between them, which takes small pieces
and wakes the other process for each.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from math import prod
from multiprocessing import reduction
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

ARRAY_BYTES = 2**25
"""The size of the space for one array. Space that is not written takes no memory."""


class SharedArrays:
    """Space for ``count`` float32 arrays, shared by a process and one that it starts. It has no
    name, and ends with the two processes."""

    def __init__(self, count: int, file: int | None = None) -> None:
        """``file``: a descriptor of the memory, which this object closes. Default: new memory.
        Raises OSError."""
        self.count = count
        # Memory with a name in /dev/shm would stay behind where the process is killed.
        self._file = os.memfd_create("fleetlearn") if file is None else file
        finalize(self, os.close, self._file)
        os.ftruncate(self._file, count * ARRAY_BYTES)
        self._memory = mmap.mmap(self._file, count * ARRAY_BYTES)

    def __reduce__(self) -> Any:
        return _attached, (self.count, reduction.DupFd(self._file))

    def array(self, index: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return the array with this index."""
        return self._flat(index, shape).reshape(shape)

    def lend(
        self, index: int, shape: tuple[int, ...], give_back: Callable[[int], None]
    ) -> NDArray[np.float32]:
        """Return the array with this index. Calls ``give_back`` with the index when nobody holds
        the array or a part of it any more."""
        flat = self._flat(index, shape)
        # At the end of the process nobody is there to be given it back.
        finalize(flat, give_back, index).atexit = False
        return flat.reshape(shape)

    def _flat(self, index: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        # Views of this array keep this array alive, and not only the memory below it.
        return np.frombuffer(self._memory, np.float32, prod(shape), index * ARRAY_BYTES)


def make_shared_arrays(count: int) -> SharedArrays | None:
    """Return None if the system has no such memory. So far only Linux has it."""
    try:
        return SharedArrays(count)
    except (AttributeError, OSError):
        return None


def _attached(count: int, file: Any) -> SharedArrays:
    return SharedArrays(count, file.detach())
