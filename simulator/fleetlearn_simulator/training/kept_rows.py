"""The files in which a run holds what its simulated devices keep: one row of float32 for each device that has any.

The run's own process writes rows. All processes that train read them, each by its number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from weakref import finalize

import numpy as np
from fleetlearn_device.training.kept_state import kept_state_size
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.errors import SimulatorError

KEPT_STATES = "kept_states.f32"
"""The name of the file of kept states in a run's folder."""
NO_ROW = -1
"""In place of a row's number: the device keeps nothing yet."""


class RowReader(Protocol):
    """Where a process that trains finds rows."""

    def read(self, row: int) -> Vector:
        """Return a copy of a row, float32. Raises SimulatorError."""


class RowFile:
    """Rows of ``size`` float32 elements in a file, which grows with the highest row that is written."""

    def __init__(self, path: Path, size: int) -> None:
        """The file is opened, or made, at the first use."""
        self.path, self.size = path, size
        self._descriptor: int | None = None

    def read(self, row: int) -> Vector:
        found = np.empty(self.size, np.float32)
        if os.preadv(self._open(), [found.data], row * found.nbytes) != found.nbytes:
            raise SimulatorError(f"{self.path} is shorter than when it was written: run the scenario again")
        return found

    def write(self, row: int, values: Vector) -> None:
        """Write a row. Raises SimulatorError: the disk is full."""
        left, place = np.ascontiguousarray(values, np.float32).data.cast("B"), 4 * self.size * row
        try:
            while left:
                written = os.pwrite(self._open(), left, place)
                left, place = left[written:], place + written
        except OSError as error:
            raise SimulatorError(
                f"{self.path}: what the devices keep, {4 * self.size} bytes for each, cannot be written: {error}. Make "
                "room, and resume the run"
            ) from error

    def count(self) -> int:
        """Return the number of rows in the file."""
        return -(-os.fstat(self._open()).st_size // max(1, 4 * self.size))

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            finalize(self, os.close, self._descriptor)
        return self._descriptor


class RowsInMemory:
    """Rows that were sent to a process which cannot open the file."""

    def __init__(self, rows: Mapping[int, Vector]) -> None:
        self.rows = rows

    def read(self, row: int) -> Vector:
        return self.rows[row]


def kept_states_of(folder: Path, bundle: Bundle) -> RowFile | None:
    """Return the file of kept states in a run's folder. None: devices keep nothing for such a bundle."""
    size = kept_state_size(bundle.manifest)
    return RowFile(folder / KEPT_STATES, size) if size else None
