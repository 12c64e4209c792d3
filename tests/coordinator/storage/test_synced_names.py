"""Which folders are synced so that a name in the last of them survives a loss of power."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fleetlearn_coordinator.storage import synced_names
from fleetlearn_coordinator.storage.administrators import Administrators
from fleetlearn_coordinator.storage.stored_elsewhere import FILE, StoredElsewhere, write_stores
from fleetlearn_coordinator.storage.synced_names import sync_names


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes that are synced."""
    found: list[int] = []
    monkeypatch.setattr("os.fsync", lambda file: found.append(os.fstat(file).st_ino))
    return found


def test_a_folder_and_those_above_it(tmp_path: Path, synced: list[int]) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    sync_names(folder)
    assert synced[:3] == [path.stat().st_ino for path in (folder, folder.parent, tmp_path)]


def test_not_those_of_another_file_system(synced: list[int]) -> None:
    sync_names(Path("/proc/self"))
    assert Path("/").stat().st_ino not in synced
    assert Path("/proc").stat().st_ino in synced


def test_an_error_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(synced_names.os, "fsync", fail)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        sync_names(tmp_path)


def test_where_a_run_is_stored_survives_as_its_file(tmp_path: Path, synced: list[int]) -> None:
    write_stores(tmp_path / "run", StoredElsewhere("name", blobs="s3://bucket"))
    inodes = [(tmp_path / "run" / FILE).stat().st_ino, (tmp_path / "run").stat().st_ino]
    assert synced[:3] == [*inodes, tmp_path.stat().st_ino]


def test_so_does_a_new_database_of_several_processes(tmp_path: Path, synced: list[int]) -> None:
    Administrators(tmp_path / "new").close()
    assert synced[:2] == [path.stat().st_ino for path in (tmp_path / "new", tmp_path)]
