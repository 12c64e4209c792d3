"""The ledger of a run in SQLite (WAL): ``coordinator.sqlite3`` in its data directory.

``kill -9`` loses nothing that was written, because the kernel keeps it. With ``power`` SQLite also
fsyncs, so that a power cut loses nothing either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.stored_report import read_report

from fleetlearn_coordinator.storage import sqlite_exchanges
from fleetlearn_coordinator.storage.database import connect
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.ledger import (
    DEVICES_KEPT,
    ROUNDS_KEPT,
    AggregatorSaved,
    DeviceActivity,
    DeviceRemembered,
    LastSeries,
    Metadata,
    ModelMade,
    ParticipationCounted,
    ReportAccepted,
    RoundClosed,
    RoundOpened,
    Row,
    SavedParticipations,
    SavedReport,
    SavedTask,
    TaskEnded,
    TaskGiven,
    TaskRevived,
    TiedVectorsCounted,
    TiedVectorsForgotten,
    Unfinished,
)
from fleetlearn_coordinator.storage.stored_json import decode, read_json
from fleetlearn_coordinator.storage.wal_check import check_wal

DATABASE = "coordinator.sqlite3"
SCHEMA_VERSION = 9

DEVICES = """
CREATE TABLE devices(
    device TEXT PRIMARY KEY, given INTEGER NOT NULL, tasks INTEGER NOT NULL, labels TEXT NOT NULL,
    reported INTEGER, loss REAL, examples INTEGER, seconds REAL
) WITHOUT ROWID"""
TIED = """
CREATE TABLE tied(device TEXT PRIMARY KEY, task TEXT NOT NULL) WITHOUT ROWID"""
ACTIVITY = """
CREATE TABLE activity(
    device TEXT PRIMARY KEY, seen REAL, connected REAL, runtime TEXT, software TEXT, tier TEXT,
    tags TEXT, done INTEGER NOT NULL, failed INTEGER NOT NULL, lost INTEGER NOT NULL,
    error TEXT, error_at REAL
) WITHOUT ROWID"""
PARTICIPATIONS = """
CREATE TABLE participations(
    device TEXT PRIMARY KEY, last INTEGER NOT NULL, times INTEGER NOT NULL, since INTEGER NOT NULL
) WITHOUT ROWID"""
ADD_PARTICIPATION = (
    "INSERT INTO participations(device, last, times, since) VALUES(?, ?, 1, ?) "
    "ON CONFLICT(device) DO UPDATE SET last=excluded.last, "
    "times=CASE since WHEN excluded.since THEN times + 1 ELSE 1 END, since=excluded.since"
)
_LATEST = ("seen", "runtime", "software", "tier", "tags", "error", "error_at")
_ADDED = ("done", "failed", "lost")
ADD_ACTIVITY = (
    f"INSERT INTO activity VALUES({', '.join('?' * len(DeviceActivity._fields))}) "
    "ON CONFLICT(device) DO UPDATE SET connected=excluded.connected"
    + "".join(f", {name}=COALESCE(excluded.{name}, {name})" for name in _LATEST)
    + "".join(f", {name}={name}+excluded.{name}" for name in _ADDED)
)
SCHEMA = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE models(
    version INTEGER PRIMARY KEY, sha256 TEXT NOT NULL, round INTEGER NOT NULL,
    created REAL NOT NULL, restores INTEGER, optimizer TEXT, state_crc32 INTEGER
);
CREATE TABLE rounds(
    number INTEGER PRIMARY KEY, opened REAL NOT NULL, closed REAL, outcome TEXT, summary TEXT
);
CREATE TABLE tasks(
    task TEXT PRIMARY KEY, round INTEGER NOT NULL, device TEXT NOT NULL,
    state TEXT NOT NULL,                    -- assigned, accepted, or the cause of its end
    report BLOB, weight INTEGER,
    slot INTEGER,                           -- the spool file, while the update is in it alone
    version INTEGER, member TEXT,           -- of the model, and which of a family's
    staleness INTEGER,
    norm REAL, trained_norm REAL            -- of the accepted update, where the plan needs them
) WITHOUT ROWID;
CREATE INDEX tasks_of_round ON tasks(round);{DEVICES};{TIED};{ACTIVITY};{PARTICIPATIONS};
"""
"""A task's round is the one in which it was given while it runs, and then the one that its end
counts for."""
MIGRATIONS = {
    1: (
        "ALTER TABLE tasks ADD COLUMN version INTEGER",
        "ALTER TABLE tasks ADD COLUMN staleness INTEGER",
    ),
    2: (DEVICES, *sqlite_exchanges.EVALUATION_TABLES),
    3: (
        TIED,
        "ALTER TABLE tasks ADD COLUMN norm REAL",
        "ALTER TABLE tasks ADD COLUMN trained_norm REAL",
    ),
    4: (
        "ALTER TABLE models ADD COLUMN restores INTEGER",
        "ALTER TABLE models ADD COLUMN optimizer TEXT",
        "ALTER TABLE models ADD COLUMN state_crc32 INTEGER",
    ),
    5: (ACTIVITY,),
    6: sqlite_exchanges.FROM_EVALUATIONS,
    7: (PARTICIPATIONS,),
    8: ("ALTER TABLE tasks ADD COLUMN member TEXT",),
}
"""Version of the tables -> what makes the next one of it."""


class SqliteLedger:
    """``Ledger`` in one SQLite database."""

    is_slow = False

    def __init__(self, path: Path, *, power: bool = False, any_thread: bool = False) -> None:
        """Open the database. ``any_thread``: as for ``connect``. Raises StoreError where a newer
        version made it or its log is damaged, and as every method StoreUnavailableError."""
        self.path, self.where = path, path.name
        self.restore_advice = f"Put it back from a backup (with {path.name}-wal, if there is one)."
        check_wal(path)
        self._db = connect(path, any_thread=any_thread)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if power else 'OFF'}")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if not 0 <= version <= SCHEMA_VERSION:
                raise StoreError(
                    Code.BAD_VERSION,
                    f"{path.parent} has a database of version {version}; this fleetlearn reads "
                    f"version {SCHEMA_VERSION}",
                )
            if version:
                self._migrate(version)
        except BaseException:
            self._db.close()
            raise
        self.is_new = not version

    def close(self) -> None:
        self._db.close()

    def create(self, values: Mapping[str, str]) -> None:
        with self._db.transaction():
            for statement in (*SCHEMA.split(";\n"), *sqlite_exchanges.TABLES):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            for item in values.items():
                self._put(*item)
        self.is_new = False

    def _migrate(self, version: int) -> None:
        """Bring the tables of an earlier version up to this one, in one transaction."""
        if version == SCHEMA_VERSION:
            return
        with self._db.transaction():
            for before in range(version, SCHEMA_VERSION):
                for statement in MIGRATIONS[before]:
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def write(self, rows: Sequence[Row]) -> None:
        with self._db.transaction():
            for row in rows:
                self._write(row)

    def _write(self, row: Row) -> None:
        execute = self._db.execute
        match row:
            case TaskGiven():
                execute(
                    "INSERT INTO tasks(task, round, device, state, version, member) VALUES(?, ?, "
                    "?, 'assigned', ?, ?)",
                    row,
                )
            case TaskEnded(task, cause, counts_for):
                execute("UPDATE tasks SET state=? WHERE task=?", (cause, task))
                self._move(task, counts_for)
            case TaskRevived():
                execute("UPDATE tasks SET state='assigned' WHERE task=?", row)
            case ReportAccepted(report, weight, spool_file, staleness, counts_for, norms):
                execute(
                    "UPDATE tasks SET state='accepted', report=?, weight=?, slot=?, staleness=?, "
                    "norm=?, trained_norm=? WHERE task=?",
                    (
                        msgspec.json.encode(report),
                        weight,
                        spool_file,
                        staleness,
                        *(norms or (None, None)),
                        report.task,
                    ),
                )
                self._move(report.task, counts_for)
            case AggregatorSaved(turn, crc32, tasks, layout):
                self._put("sum", turn)
                self._put("sum_crc32", crc32)
                self._put("sum_layout", layout)
                self._db.executemany(
                    "UPDATE tasks SET slot=NULL WHERE task=?", [(task,) for task in tasks]
                )
            case RoundOpened():
                execute("INSERT INTO rounds(number, opened) VALUES(?, ?)", row)
                self._put("sum", None)
            case RoundClosed():
                self._close_round(row)
            case ModelMade():
                execute("INSERT OR REPLACE INTO models VALUES(?, ?, ?, ?, ?, ?, ?)", row)
            case DeviceRemembered():
                labels = " ".join(row.labels)
                execute(
                    "INSERT OR REPLACE INTO devices VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                    row._replace(labels=labels),
                )
            case DeviceActivity():
                tags = None if row.tags is None else " ".join(row.tags)
                execute(ADD_ACTIVITY, row._replace(tags=tags))
            case TiedVectorsCounted():
                execute("INSERT OR REPLACE INTO tied VALUES(?, ?)", row)
            case TiedVectorsForgotten():
                execute("DELETE FROM tied")
            case ParticipationCounted():
                execute(ADD_PARTICIPATION, row)
            case Metadata(key, value):
                self._put(key, value)
            case _:
                sqlite_exchanges.write(self._db, row)

    def _close_round(self, row: RoundClosed) -> None:
        self._db.execute(
            "UPDATE rounds SET closed=?, outcome=?, summary=? WHERE number=?",
            (row.at, row.outcome, msgspec.json.encode(row.summary).decode(), row.number),
        )
        self._db.execute("UPDATE tasks SET slot=NULL WHERE round=?", (row.number,))
        self._db.execute(
            "DELETE FROM tasks WHERE round<=? AND state<>'assigned'", (row.number - ROUNDS_KEPT,)
        )  # what runs may count for a later round
        if row.number % ROUNDS_KEPT == 0:
            self._forget_devices()
        self._put("sum", None)

    def _forget_devices(self) -> None:
        """Keep the activity of the devices that were seen last. Whoever may connect without an
        identity could else fill the disk with names."""
        if self._db.execute("SELECT COUNT(*) FROM activity").fetchone()[0] > DEVICES_KEPT:
            self._db.execute(
                "DELETE FROM activity WHERE device IN "
                "(SELECT device FROM activity ORDER BY seen DESC, device LIMIT -1 OFFSET ?)",
                (DEVICES_KEPT,),
            )

    def _move(self, task: str, round: int | None) -> None:
        """Let the task's end count for another round than the one in which it was given."""
        if round is not None:
            self._db.execute("UPDATE tasks SET round=? WHERE task=?", (round, task))

    def _put(self, key: str, value: str | float | None) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, value))

    def get(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return row and row[0]

    def newest_model(self) -> tuple[int, str] | None:
        row: tuple[int, str] | None = self._db.execute(
            "SELECT version, sha256 FROM models ORDER BY version DESC LIMIT 1"
        ).fetchone()
        return row

    def last_round(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM rounds").fetchone()[0])

    def last_committed(self) -> dict[str, Any] | None:
        row = self._db.execute(
            "SELECT number, summary FROM rounds WHERE outcome='committed' ORDER BY number DESC "
            "LIMIT 1"
        ).fetchone()
        return None if row is None else self._summary(*row)

    def committed_rounds(self, most: int) -> list[tuple[int, dict[str, Any]]]:
        rows = self._db.execute(
            "SELECT version, number, summary FROM models JOIN rounds ON number = round "
            "WHERE outcome='committed' ORDER BY version DESC LIMIT ?",
            (most,),
        )
        return [(version, self._summary(number, summary)) for version, number, summary in rows][
            ::-1
        ]

    def _summary(self, round: int, text: str) -> dict[str, Any]:
        return decode(text, dict[str, Any], f"{self.path}: the summary of round {round}")

    def remembered_devices(self) -> list[DeviceRemembered]:
        rows = self._db.execute("SELECT * FROM devices ORDER BY given, device")
        return [DeviceRemembered._make((*row[:3], row[3].split(), *row[4:])) for row in rows]

    def tied_tasks(self) -> dict[str, str]:
        return dict(self._db.execute("SELECT device, task FROM tied").fetchall())

    def participations(self) -> list[SavedParticipations]:
        rows = self._db.execute(
            "SELECT device, last, times, since FROM participations ORDER BY device"
        )
        return list(map(SavedParticipations._make, rows))

    def known_models(self) -> list[ModelMade]:
        rows = self._db.execute("SELECT * FROM models ORDER BY version").fetchall()
        return [ModelMade._make(row) for row in rows]

    def rolled_back(self) -> int:
        row = self._db.execute(
            "SELECT COALESCE(MAX(version), 0) FROM models WHERE restores IS NOT NULL"
        ).fetchone()
        return int(row[0])

    def accepted_updates(self) -> Sequence[tuple[int, str]]:
        return self._db.execute(
            "SELECT round, device FROM tasks WHERE state='accepted' ORDER BY round"
        ).fetchall()

    def last_series(self, kind: str) -> LastSeries | None:
        return sqlite_exchanges.last_series(self._db, self.path, kind)

    def last_valid_exchange(self, kind: str, since: int = 0) -> tuple[int, dict[str, Any]] | None:
        return sqlite_exchanges.last_valid(self._db, self.path, kind, since)

    def unfinished(self, lost_since: int | None) -> Unfinished:
        opened = self._db.execute("SELECT number FROM rounds WHERE closed IS NULL").fetchone()
        found = Unfinished(None if opened is None else int(opened[0]), [], [], [], [])
        first = self.last_round() + 1 if found.round is None else found.round
        which = (
            "round>=?"
            if lost_since is None
            else "round>=? OR state='assigned' OR (state='lost' AND version>=?)"
        )
        tasks = self._db.execute(
            "SELECT task, device, version, round, state, report, weight, slot, staleness, norm, "
            f"trained_norm, member FROM tasks WHERE {which} ORDER BY version, task",
            (first,) if lost_since is None else (first, lost_since),
        )
        for (
            task,
            device,
            version,
            round,
            state,
            content,
            weight,
            spool_file,
            staleness,
            norm,
            trained,
            member,
        ) in tasks:
            if state == "assigned":
                found.leases.append(SavedTask(task, device, version, member))
            elif state == "accepted":
                report = read_json(read_report, content, f"{self.path}: the report of {task}")
                norms = None if norm is None else (norm, trained)
                found.reports.append(
                    SavedReport(
                        task,
                        device,
                        report,
                        weight,
                        spool_file,
                        staleness or 0,
                        round,
                        norms,
                        version,
                        member,
                    )
                )
            elif round >= first:
                found.dropped.append((task, device, state))
            if state == "lost" and lost_since is not None:
                found.lost.append(SavedTask(task, device, version, member))
        return found
