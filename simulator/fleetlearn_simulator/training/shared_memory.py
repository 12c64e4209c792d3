"""Memory that two processes see: large models and updates need not go through the pipe between them, in small pieces
for each of which the other one has to be woken."""

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

PLACE = 2**25
"""Bytes of a place. One that is not written takes no memory."""


class Shared:
    """So many places, for a process and one that it starts. Nothing of it has a name or outlives both of them."""

    def __init__(self, places: int, file: int | None = None) -> None:
        """``file``: a descriptor of the memory, which is then its own; None: new memory. Raises OSError."""
        self.places = places
        self._file = os.memfd_create("fleetlearn") if file is None else file
        finalize(self, os.close, self._file)
        os.ftruncate(self._file, places * PLACE)
        self._memory = mmap.mmap(self._file, places * PLACE)

    def __reduce__(self) -> Any:
        return _attached, (self.places, reduction.DupFd(self._file))

    def array(self, place: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """What is in a place."""
        return self._flat(place, shape).reshape(shape)

    def lend(self, place: int, shape: tuple[int, ...], back: Callable[[int], None]) -> NDArray[np.float32]:
        """The same; ``back`` is called with the place when nobody has it or a part of it any more."""
        whole = self._flat(place, shape)
        finalize(whole, back, place).atexit = False
        return whole.reshape(shape)

    def _flat(self, place: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        # What is made of this array holds it, and not merely the memory.
        return np.frombuffer(self._memory, np.float32, prod(shape), place * PLACE)


def make_shared(places: int) -> Shared | None:
    """None where the system has no such memory, which so far is all but Linux."""
    try:
        return Shared(places)
    except (AttributeError, OSError):
        return None


def _attached(places: int, file: Any) -> Shared:
    return Shared(places, file.detach())
