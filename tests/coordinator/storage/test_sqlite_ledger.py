"""SQLite: batches of rows, and what a database is refused for."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from earlier_tables import make_version_6
from fleetlearn_coordinator.service.status import read_status, read_tasks
from fleetlearn_coordinator.storage import sql_ledger, sqlite_ledger
from fleetlearn_coordinator.storage.errors import (
    DuplicateRowError,
    StoreError,
    StoreUnavailableError,
)
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import (
    AnswerAccepted,
    DeviceActivity,
    ExchangeEnded,
    Metadata,
    ParticipationCounted,
    RoundClosed,
    RoundOpened,
    SavedAnswer,
    TaskEnded,
    TaskGiven,
)
from fleetlearn_coordinator.storage.ledger_reader import EndedExchange
from fleetlearn_coordinator.storage.sql_tables import SCHEMA_VERSION
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE, SqliteLedger

VERSION_5 = Path(__file__).with_name("version_5.sql")
"""What ``sqlite3``'s dump says of a database that the code of that version wrote: one evaluation is
over and one is open."""


def open_ledger(folder: Path) -> SqliteLedger:
    ledger = SqliteLedger(folder / DATABASE)
    if ledger.is_new:
        ledger.create({"bundle": "b" * 64})
    return ledger


def test_the_tasks_of_old_rounds_go_and_their_summaries_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_ledger, "ROUNDS_KEPT", 2)
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
    newer = SCHEMA_VERSION + 1
    monkeypatch.setattr(sqlite_ledger, "SCHEMA_VERSION", newer)
    open_ledger(tmp_path).close()
    monkeypatch.undo()
    expected = f"version {newer}; this fleetlearn reads version {SCHEMA_VERSION}"
    with pytest.raises(StoreError, match=expected):
        open_ledger(tmp_path)


def test_the_tables_before_devices_were_remembered_go_on(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.close()
    make_version_6(tmp_path / DATABASE)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("DROP TABLE activity")
        database.execute("PRAGMA user_version=5")
    with find_storage(tmp_path).read_ledger() as reader:
        assert reader.device_activity() == []
    ledger = open_ledger(tmp_path)
    ledger.write([DeviceActivity("a", 5.0, 5.0, done=1), DeviceActivity("a", 7.0, done=1)])
    with find_storage(tmp_path).read_ledger() as reader:
        assert reader.device_activity() == [DeviceActivity("a", 7.0, None, tags=[], done=2)]


def test_devices_that_were_seen_long_ago_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever may connect without an identity fills the disk with names."""
    monkeypatch.setattr(sql_ledger, "ROUNDS_KEPT", 2)
    monkeypatch.setattr(sql_ledger, "DEVICES_KEPT", 3)
    ledger = open_ledger(tmp_path)
    ledger.write([DeviceActivity(f"d{number}", float(-number)) for number in range(9)])
    for number in range(1, 3):
        ledger.write([RoundOpened(number, 0.0), RoundClosed(number, "abandoned", {}, 1.0)])
    with find_storage(tmp_path).read_ledger() as reader:
        assert [row.device for row in reader.device_activity()] == ["d0", "d1", "d2"]


def test_who_took_part_in_a_private_run_is_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a device could take part more often than its noise was computed for."""
    monkeypatch.setattr(sql_ledger, "ROUNDS_KEPT", 2)
    monkeypatch.setattr(sql_ledger, "DEVICES_KEPT", 3)
    ledger = open_ledger(tmp_path)
    for number in range(1, 9):
        counted = [ParticipationCounted(f"d{number}", number, 1), DeviceActivity(f"d{number}", 1.0)]
        closed = RoundClosed(number, "committed", {}, 1.0)
        ledger.write([RoundOpened(number, 0.0), *counted, closed])
    ledger.write([ParticipationCounted("d1", 9, 1), ParticipationCounted("d2", 10, 10)])
    assert len(ledger.participations()) == 8
    assert ledger.participations()[:2] == [("d1", 9, 2, 1), ("d2", 10, 1, 10)]
    with find_storage(tmp_path).read_ledger() as reader:
        assert len(reader.device_activity()) == 3


def test_evaluations_of_a_version_that_knew_no_other_exchange_go_on(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.executescript(VERSION_5.read_text())
        database.execute("PRAGMA user_version=5")
    over = EndedExchange(1, 1, "valid", 13.0, {"devices": 1, "metrics": {"loss": 0.25}}, 1)
    with find_storage(tmp_path).read_ledger() as reader:
        assert reader.exchanges("evaluation") == [over], "before a coordinator brings it up"
        assert reader.valid_exchanges("evaluation", [1, 2]) == {1: over.summary}
        assert reader.exchanges("roll-call") == []
    ledger = open_ledger(tmp_path)
    last = ledger.last_series("evaluation")
    assert last is not None
    ((*phase, answers),) = last.phases
    assert (last[:3], phase) == ((2, 1, None), [1, None, True, False])
    measured = b'{"examples":5,"loss_sum":2.0,"metric_sums":{"accuracy":4.0}}'
    assert answers == [
        SavedAnswer("r-e2-1", "a", "phone", "accepted", measured),
        SavedAnswer("r-e2-2", "b", "", "lost", None),
        SavedAnswer("r-e2-3", "c", "", "assigned", None),
    ]
    assert ledger.last_valid_exchange("evaluation") == (1, over.summary)
    ended = ExchangeEnded("evaluation", 2, 1, "invalid", {"devices": 2}, 15.0)
    ledger.write([AnswerAccepted("r-e2-3", measured), ended])
    with find_storage(tmp_path).read_ledger() as reader:
        rows = reader.exchanges("evaluation")
        assert rows == [over, EndedExchange(2, 1, "invalid", 15.0, {"devices": 2}, 1)]
    ledger.close()
