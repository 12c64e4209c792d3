"""SQLite: batches of rows, and what a database is refused for."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.service.status import read_status, read_tasks
from fleetlearn_coordinator.storage import sqlite_ledger
from fleetlearn_coordinator.storage.errors import (
    DuplicateRowError,
    StoreError,
    StoreUnavailableError,
)
from fleetlearn_coordinator.storage.ledger import (
    Metadata,
    RoundClosed,
    RoundOpened,
    TaskEnded,
    TaskGiven,
)
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE, SqliteLedger


def open_ledger(folder: Path) -> SqliteLedger:
    ledger = SqliteLedger(folder / DATABASE)
    if ledger.is_new:
        ledger.create({"bundle": "b" * 64})
    return ledger


def test_the_tasks_of_old_rounds_go_and_their_summaries_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_ledger, "ROUNDS_KEPT", 2)
    ledger = open_ledger(tmp_path)
    for number in range(1, 5):
        ledger.write([RoundOpened(number, 0.0)])
        ledger.write([TaskGiven(f"t{number}-1", number, "a", 0), TaskEnded(f"t{number}-1", "lost")])
        ledger.write([RoundClosed(number, "committed", {"reports": number}, 1.0)])
    assert [len(read_tasks(tmp_path, number)[1]) for number in range(1, 5)] == [0, 0, 1, 1]
    assert [row.summary["reports"] for row in read_status(tmp_path).rounds] == [1, 2, 3, 4]


def test_a_batch_is_all_or_nothing(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    with pytest.raises(DuplicateRowError):
        ledger.write([Metadata("a", 1), RoundOpened(1, 0.0), RoundOpened(1, 0.0)])
    assert ledger.get("a") is None
    assert ledger.unfinished(None).round is None
    ledger.write([Metadata("a", 1)])
    assert ledger.get("a") == 1


def test_a_full_database_is_named_as_such(tmp_path: Path) -> None:
    """SQLite ends the transaction by itself; what comes out is the cause, not that there is nothing
    to roll back."""
    ledger = open_ledger(tmp_path)
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(
        StoreUnavailableError,
        match=r"coordinator\.sqlite3: database or disk is full; free some space",
    ):
        ledger.write([Metadata("a", "x" * 100_000)])
    ledger.write([Metadata("b", 1)])
    assert ledger.get("a") is None


def test_a_newer_database_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_ledger, "SCHEMA_VERSION", 6)
    open_ledger(tmp_path).close()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="version 6; this fleetlearn reads version 5"):
        open_ledger(tmp_path)
