"""A mixing matrix from a file, with checks that name the row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.peers.mixing import MixingMatrix, from_weights
from fleetlearn_device.peers.spectrum import reached_from_first

_TOLERANCE = 1e-6
"""What a file's sums and pairs may differ by: weights that were written with seven digits."""


def from_file(path: Path) -> MixingMatrix:
    """Read W, n rows of n weights: CSV with commas, or numpy's .npy.

    W must not be negative, must be symmetric, each row must add up to 1, and all peers must be
    connected. Differences of up to 1e-6 are taken for rounding. Raises ValueError, which says the
    first row that fails, counted from 0 as peers are, and OSError.
    """
    matrix = np.load(path, allow_pickle=False) if path.suffix == ".npy" else _read_csv(path)
    return from_dense(np.asarray(matrix, np.float64), str(path))


def from_dense(matrix: NDArray[np.float64], name: str = "W") -> MixingMatrix:
    """Check a matrix, shape (n, n), and return its rows. ``name``: what errors call it."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"{name} has the shape {matrix.shape}; expected n rows of n weights")
    bad = ~np.isfinite(matrix) | (matrix < 0)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"{name}: row {row} has {matrix[row, column]:g} in column {column}; "
            "weights are 0 or more"
        )
    sums = matrix.sum(axis=1)
    if (bad := np.abs(sums - 1) > _TOLERANCE).any():
        row = int(bad.argmax())
        raise ValueError(f"{name}: row {row} adds up to {sums[row]:.9g}; each row must add up to 1")
    if (bad := np.abs(matrix - matrix.T) > _TOLERANCE).any():
        row, column = np.argwhere(bad)[0].tolist()
        raise ValueError(
            f"{name}: row {row} has {matrix[row, column]:g} in column {column}, and row {column} "
            f"has {matrix[column, row]:g} in column {row}; W must be symmetric"
        )
    even = (matrix + matrix.T) / 2
    np.fill_diagonal(even, 0.0)
    rows, columns = np.nonzero(even)
    found = from_weights(len(matrix), rows, columns, even[rows, columns])
    reached = reached_from_first(found)
    if not (connected := reached.any(axis=1)).all():
        row = int((~connected).argmax())
        raise ValueError(
            f"{name}: row {row} has no way to row 0, over any neighbours; all peers must be "
            "connected"
        )
    if not reached.all():
        raise ValueError(
            f"{name}: no row has a weight for its own model, and the peers are two groups that "
            "only swap their models, which never become alike. Give row 0 a weight in column 0"
        )
    return found


def _read_csv(path: Path) -> NDArray[np.float64]:
    rows: list[list[float]] = []
    for line in path.read_text("utf-8").splitlines():
        if not line.strip():
            continue
        try:
            rows.append([float(field) for field in line.split(",")])
        except ValueError as error:
            raise ValueError(f"{path}: row {len(rows)} is not numbers: {error}") from None
        if len(rows[-1]) != len(rows[0]):
            raise ValueError(
                f"{path}: row {len(rows) - 1} has {len(rows[-1])} weights, and row 0 has "
                f"{len(rows[0])}"
            )
    return np.array(rows)
