"""Files of rows: what is written is read, by any process, and a full disk is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.kept_rows import KEPT_STATES, TIED_VECTORS, RowFile, row_files
from full_disk import largest_file
from line_bundle import write_line_bundle


def row_of(number: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.arange(5, dtype=np.float32) + 10 * number


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    """In any order, over what was there, and by another object."""
    file, other = RowFile(tmp_path / "rows", 5), RowFile(tmp_path / "rows", 5)
    for number in (3, 0, 1):
        file.write(number, row_of(number))
    file.write(0, row_of(7))
    for reader in (file, other):
        assert [reader.read(row).tolist() for row in (0, 1, 3)] == [
            row_of(row).tolist() for row in (7, 1, 3)
        ]
    assert file.count() == 4
    file.read(1)[:] = 0
    assert file.read(1).tolist() == row_of(1).tolist(), "a row that is read is a copy"


def test_a_row_that_is_not_there(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows", 5)
    file.write(0, row_of(0))
    with pytest.raises(SimulatorError, match="is shorter than when it was written"):
        file.read(1)


def test_a_full_disk(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows", 5)
    file.write(0, row_of(0))
    with largest_file(50):
        file.write(1, row_of(1))
        with pytest.raises(
            SimulatorError, match=r"rows: .* 20 bytes for each.* Make room, and resume"
        ):
            file.write(2, row_of(2))
    assert file.read(1).tolist() == row_of(1).tolist()


def test_only_where_devices_keep_something(tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle")
    assert row_files(tmp_path, [bundle.manifest], "plain") == (None, None)
    keeping = write_line_bundle(tmp_path / "keeping.bundle", personal=True, state=True)
    file, none = row_files(tmp_path, [keeping.manifest], "plain")
    assert none is None
    assert file is not None
    assert (file.path, file.size) == (tmp_path / KEPT_STATES, 2)
    assert not file.path.exists()
    for algorithm in ("scaffold", "feddyn"):
        none, file = row_files(tmp_path, [bundle.manifest], algorithm)
        assert none is None
        assert file is not None
        assert (file.path, file.size) == (tmp_path / TIED_VECTORS, 5)
