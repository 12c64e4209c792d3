"""Looks into a data directory from outside."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fleetlearn_coordinator.records import Task, read_status, read_tasks
from fleetlearn_coordinator.store import DATABASE, Store, StoreError


def test_the_tasks_of_a_round(tmp_path: Path) -> None:
    with closing(Store(tmp_path, "0" * 64)) as store:
        assert read_tasks(tmp_path) == (0, [])
        store.open_round(1, 0.0)
        store.assign("t1-1", 1, "a")
        store.assign("t1-2", 1, "b")
        store.end("t1-2", "lost")
        tasks = [Task("t1-1", "a", "assigned"), Task("t1-2", "b", "lost")]
        assert read_tasks(tmp_path) == (1, tasks)
        store.close_round(1, "abandoned", {}, 1.0)
        store.open_round(2, 2.0)
        assert read_tasks(tmp_path) == (2, [])
        assert read_tasks(tmp_path, 1) == (1, tasks)
        assert read_tasks(tmp_path, 9) == (9, [])
    assert read_tasks(tmp_path) == (2, [])


def test_a_folder_that_is_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"not a coordinator's data directory.*has no coordinator\.sqlite3"):
        read_tasks(tmp_path)


def test_a_database_without_its_tables_yet(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / DATABASE)) as db:
        db.execute("PRAGMA journal_mode=WAL")
    with pytest.raises(StoreError, match="is still being made by a coordinator that starts"):
        read_status(tmp_path)
