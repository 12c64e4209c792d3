"""The files in which a run holds what its simulated devices keep: one row of float32 for each
device that has any.

The run's own process writes rows. All processes that train read them, each by its number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import finalize

import numpy as np
from fleetlearn_coordinator.plan.encoding_section import EncodingSection
from fleetlearn_device.training.algorithms import ALGORITHMS, personal_size
from fleetlearn_device.training.kept_state import kept_state_size
from fleetlearn_protocol.computations.settings import KIND_NAMES
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.errors import SimulatorError

KEPT_STATES = "kept_states.f32"
TIED_VECTORS = "tied_vectors.f32"
RESIDUALS = "residuals.f32"
PEER_MODELS = "peer_models.f32"
"""The names of the files in a run's folder."""
NO_ROW = -1
"""In place of a row's number: the device keeps nothing yet."""


class RowReader(Protocol):
    """Where a process that trains finds rows."""

    def read(self, row: int) -> Vector:
        """Return a copy of a row, float32. Raises SimulatorError."""


class RowFile:
    """Rows of ``size`` float32 elements in a file, which grows with the highest row that is
    written."""

    def __init__(self, path: Path, size: int) -> None:
        """The file is opened, or made, at the first use."""
        self.path, self.size = path, size
        self._descriptor: int | None = None

    def __reduce__(self) -> tuple[type[RowFile], tuple[Path, int]]:
        return RowFile, (self.path, self.size)  # another process opens the file by itself

    def read(self, row: int) -> Vector:
        found = np.empty(self.size, np.float32)
        if os.preadv(self._open(), [found.data], row * found.nbytes) != found.nbytes:
            raise SimulatorError(
                f"{self.path} is shorter than when it was written: run the scenario again"
            )
        return found

    def write(self, row: int, values: Vector) -> None:
        """Write a row, or its first elements, before zeros. Raises SimulatorError: the disk is
        full."""
        if len(values) < self.size:
            values = np.append(values, np.zeros(self.size - len(values), np.float32))
        left, offset = np.ascontiguousarray(values, np.float32).data.cast("B"), 4 * self.size * row
        try:
            while left:
                written = os.pwrite(self._open(), left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            raise SimulatorError(
                f"{self.path}: what the devices keep, {4 * self.size} bytes for each, cannot be "
                f"written: {error}. Make room, and resume the run"
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


R_co = TypeVar("R_co", bound=RowReader, covariant=True)


class KeptRows(NamedTuple, Generic[R_co]):
    """Where the rows of devices are; None where devices have no such rows."""

    states: R_co | None = None
    """Kept states (personal parameters, kept rows of the step's state, the previous model), each
    with the device's personal model after it, if the algorithm has one."""
    tied: R_co | None = None
    """The algorithm's tied vectors, such as SCAFFOLD's c_k, one after the other."""


NOTHING_KEPT: KeptRows[RowReader] = KeptRows()
NO_FILES: KeptRows[RowFile] = KeptRows()


class RowSizes(NamedTuple):
    """The elements of a device's rows; 0 where it has none."""

    states: int
    tied: int


def row_sizes(manifest: Manifest, algorithm: str) -> RowSizes:
    """Return what a device keeps of such a bundle's tasks by this algorithm."""
    if algorithm in KIND_NAMES:  # a computation keeps nothing
        return RowSizes(0, 0)
    return RowSizes(
        kept_state_size(manifest) + personal_size(algorithm, manifest),
        manifest.size * len(ALGORITHMS[algorithm].tied),
    )


def row_files(folder: Path, manifests: Sequence[Manifest], algorithm: str) -> KeptRows[RowFile]:
    """Return the files of rows in a run's folder. ``manifests``: of the run's bundles. A row has
    room for what the largest of them leaves, and begins with what its device keeps."""
    sizes = [row_sizes(manifest, algorithm) for manifest in manifests]
    states, tied = (max(column) for column in zip(*sizes, strict=True))
    return KeptRows(
        RowFile(folder / KEPT_STATES, states) if states else None,
        RowFile(folder / TIED_VECTORS, tied) if tied else None,
    )


def residual_file(folder: Path, manifest: Manifest, encoding: EncodingSection) -> RowFile | None:
    """Return the file of what the updates' encoding leaves out; None: it leaves nothing."""
    return RowFile(folder / RESIDUALS, manifest.size) if encoding.leaves_residual else None
