"""Updates on disk, for aggregators that need each of them: a round of a large model may not fit in
memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import TemporaryFile

import numpy as np
from fleetlearn_protocol.vector import Vector

PART = 32768
"""Elements that are read at a time."""


class UpdateFile:
    """A temporary file with updates of ``size`` elements each. It is removed with this object."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0
        self._file = TemporaryFile()  # noqa: SIM115 - closed below
        self.descriptor = self._file.fileno()
        weakref.finalize(self, self._file.close)

    def keep(self, update: Vector) -> FiledUpdate:
        """Write an update, float32 of shape (size,), and return where it is. Raises OSError (the
        disk is full)."""
        update.tofile(self._file)
        self.count += 1
        return FiledUpdate(self, 4 * self.size * (self.count - 1))


@dataclass(frozen=True, slots=True, eq=False)
class FiledUpdate:
    """``aggregation.updates.Update`` in a file."""

    file: UpdateFile
    begin: int
    """Its first byte."""

    def __iter__(self) -> Iterator[Vector]:
        for start in range(0, self.file.size, PART):
            yield self.read(start, min(start + PART, self.file.size))

    def read(self, start: int, stop: int) -> Vector:
        found = np.empty(stop - start, np.float32)
        if os.preadv(self.file.descriptor, [found.data], self.begin + 4 * start) != found.nbytes:
            raise OSError("an update in a temporary file is shorter than it was written")
        return found
