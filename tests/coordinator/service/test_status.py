"""Looks into a data directory from outside."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from fleetlearn_coordinator.service.status import TaskRecord, read_status, read_tasks
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.ledger import (
    Metadata,
    RoundClosed,
    RoundOpened,
    TaskEnded,
    TaskGiven,
)
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_coordinator.storage.store import open_store


def test_the_tasks_of_a_round(tmp_path: Path) -> None:
    with closing(open_store(tmp_path, "0" * 64)) as store:
        assert read_tasks(tmp_path) == (0, [])
        store.write([RoundOpened(1, 0.0)])
        store.write([TaskGiven("t1-1", 1, "a", 0)])
        store.write([TaskGiven("t1-2", 1, "b", 0)])
        store.write([TaskEnded("t1-2", "lost")])
        tasks = [TaskRecord("t1-1", "a", "assigned"), TaskRecord("t1-2", "b", "lost")]
        assert read_tasks(tmp_path) == (1, tasks)
        store.write([RoundClosed(1, "abandoned", {}, 1.0)])
        store.write([RoundOpened(2, 2.0)])
        assert read_tasks(tmp_path) == (2, [])
        assert read_tasks(tmp_path, 1) == (1, tasks)
        assert read_tasks(tmp_path, 9) == (9, [])
    assert read_tasks(tmp_path) == (2, [])


def test_a_dead_coordinator_does_not_run_whoever_has_its_process_id(tmp_path: Path) -> None:
    """In a container every coordinator has process id 1. So the lock says whether it runs, not the
    id."""
    store = open_store(tmp_path, "0" * 64)
    assert not read_status(tmp_path).running, "it does not answer devices yet"
    store.write([Metadata("live", f'{{"pid": {os.getpid()}}}')])
    assert read_status(tmp_path).running
    store.close()  # as a kill does, that leaves the process id
    assert not read_status(tmp_path).running
    with closing(open_store(tmp_path, "0" * 64)):
        assert not read_status(tmp_path).running, (
            "the next begins: what the one before said is over"
        )


def test_a_folder_that_is_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"not a coordinator's data directory.*has no coordinator\.sqlite3"
    ):
        read_tasks(tmp_path)


def test_a_database_without_its_tables_yet(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / DATABASE)) as db:
        db.execute("PRAGMA journal_mode=WAL")
    with pytest.raises(StoreError, match="is still being made by a coordinator that starts"):
        read_status(tmp_path)
