"""Looks into a data directory from outside."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from fleetlearn_coordinator.service.status import Task, read_status, read_tasks
from fleetlearn_coordinator.storage.store import DATABASE, LOCK, Store, StoreError, is_locked, lock


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


def test_a_dead_coordinator_does_not_run_whoever_has_its_process_id(tmp_path: Path) -> None:
    """In a container it is 1, and so is this one's: the lock tells, not the number."""
    store = Store(tmp_path, "0" * 64)
    assert not read_status(tmp_path).running, "it does not answer devices yet"
    store.put("live", f'{{"pid": {os.getpid()}}}')
    assert read_status(tmp_path).running
    store.close()  # as a kill does, that leaves the process id
    assert not read_status(tmp_path).running
    with closing(Store(tmp_path, "0" * 64)):
        assert not read_status(tmp_path).running, "the next begins: what the one before said is over"


def test_looking_never_keeps_a_coordinator_from_starting(tmp_path: Path) -> None:
    """Processes look all the time; each start succeeds, and a second one beside it is refused all the same."""
    Store(tmp_path, "0" * 64).close()
    look = "import sys\nfrom pathlib import Path\nfrom fleetlearn_coordinator.storage.store import is_locked\n"
    loop = "print(flush=True)\nwhile True: is_locked(Path(sys.argv[1]))\n"
    lookers = [
        subprocess.Popen([sys.executable, "-c", look + loop, tmp_path / LOCK], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for process in lookers:
            assert process.stdout is not None
            process.stdout.readline()
        for _ in range(100):
            os.close(lock(tmp_path / LOCK))
        held = lock(tmp_path / LOCK)
        assert is_locked(tmp_path / LOCK)
        with pytest.raises(StoreError, match="in use by another coordinator"):
            lock(tmp_path / LOCK)
        os.close(held)
    finally:
        for process in lookers:
            process.kill()
            process.communicate()
    assert not is_locked(tmp_path / LOCK)


def test_a_folder_that_is_no_data_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"not a coordinator's data directory.*has no coordinator\.sqlite3"):
        read_tasks(tmp_path)


def test_a_database_without_its_tables_yet(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / DATABASE)) as db:
        db.execute("PRAGMA journal_mode=WAL")
    with pytest.raises(StoreError, match="is still being made by a coordinator that starts"):
        read_status(tmp_path)
