"""The ledger of a run in an SQL database: the rows that are written and read, whatever the database
is. sqlite_ledger.py and postgres_ledger.py open one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fleetlearn_protocol.stored_report import read_report

from fleetlearn_coordinator.storage import sql_exchanges
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
from fleetlearn_coordinator.storage.sql_database import SqlDatabase
from fleetlearn_coordinator.storage.stored_json import decode, read_json


def _put(table: str, keys: int, columns: str) -> str:
    """Return the statement that writes a row in place of one that has the same values in the first
    ``keys`` of these columns, which are the table's, in order."""
    names = columns.split()
    values = ", ".join("?" * len(names))
    changed = ", ".join(f"{name}=excluded.{name}" for name in names[keys:])
    return (
        f"INSERT INTO {table}({', '.join(names)}) VALUES({values}) "
        f"ON CONFLICT({', '.join(names[:keys])}) DO UPDATE SET {changed}"
    )


PUT_METADATA = _put("meta", 1, "key value")
PUT_MODEL = _put("models", 1, "version sha256 round created restores optimizer state_crc32")
PUT_DEVICE = _put("devices", 1, "device given tasks labels reported loss examples seconds")
PUT_TIED = _put("tied", 1, "device task")
ADD_PARTICIPATION = (
    "INSERT INTO participations(device, last, times, since) VALUES(?, ?, 1, ?) "
    "ON CONFLICT(device) DO UPDATE SET last=excluded.last, "
    "times=CASE participations.since WHEN excluded.since THEN participations.times + 1 ELSE 1 END, "
    "since=excluded.since"
)
_LATEST = ("seen", "runtime", "software", "tier", "tags", "error", "error_at")
_ADDED = ("done", "failed", "lost")
ADD_ACTIVITY = (
    f"INSERT INTO activity VALUES({', '.join('?' * len(DeviceActivity._fields))}) "
    "ON CONFLICT(device) DO UPDATE SET connected=excluded.connected"
    + "".join(f", {name}=COALESCE(excluded.{name}, activity.{name})" for name in _LATEST)
    + "".join(f", {name}=activity.{name}+excluded.{name}" for name in _ADDED)
)


class SqlLedger:
    """``Ledger``, without what opens and makes it."""

    def __init__(self, db: SqlDatabase, place: object) -> None:
        """``place``: where the tables are, for messages to people."""
        self._db, self._place = db, place

    def close(self) -> None:
        self._db.close()

    def write(self, rows: Sequence[Row]) -> None:
        with self._db.transaction():
            for row in rows:
                self._write(row)

    def _write(self, row: Row) -> None:
        execute = self._db.execute
        match row:
            case TaskGiven():
                execute(
                    "INSERT INTO tasks(task, round, device, state, version, member, region) "
                    "VALUES(?, ?, ?, 'assigned', ?, ?, ?)",
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
                execute("INSERT INTO rounds(number, opened, goal) VALUES(?, ?, ?)", row)
                self._put("sum", None)
            case RoundClosed():
                self._close_round(row)
            case ModelMade():
                execute(PUT_MODEL, row)
            case DeviceRemembered():
                execute(PUT_DEVICE, row._replace(labels=" ".join(row.labels)))
            case DeviceActivity():
                tags = None if row.tags is None else " ".join(row.tags)
                execute(ADD_ACTIVITY, row._replace(tags=tags))
            case TiedVectorsCounted():
                execute(PUT_TIED, row)
            case TiedVectorsForgotten():
                execute("DELETE FROM tied")
            case ParticipationCounted():
                execute(ADD_PARTICIPATION, row)
            case Metadata(key, value):
                self._put(key, value)
            case _:
                sql_exchanges.write(self._db, row)

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
                "DELETE FROM activity WHERE device NOT IN "
                "(SELECT device FROM activity ORDER BY seen DESC NULLS LAST, device LIMIT ?)",
                (DEVICES_KEPT,),
            )

    def _move(self, task: str, round: int | None) -> None:
        """Let the task's end count for another round than the one in which it was given."""
        if round is not None:
            self._db.execute("UPDATE tasks SET round=? WHERE task=?", (round, task))

    def _put(self, key: str, value: str | float | None) -> None:
        self._db.execute(PUT_METADATA, (key, self._db.to_column(value)))

    def get(self, key: str) -> Any:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return row and self._db.from_column(row[0])

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
        return decode(text, dict[str, Any], f"{self._place}: the summary of round {round}")

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
        return sql_exchanges.last_series(self._db, self._place, kind)

    def last_valid_exchange(self, kind: str, since: int = 0) -> tuple[int, dict[str, Any]] | None:
        return sql_exchanges.last_valid(self._db, self._place, kind, since)

    def unfinished(self, lost_since: int | None) -> Unfinished:
        number, goal = self._db.execute(
            "SELECT number, goal FROM rounds WHERE closed IS NULL"
        ).fetchone() or (None, None)
        found = Unfinished(number, [], [], [], [], goal)
        first = self.last_round() + 1 if found.round is None else found.round
        which = (
            "round>=?"
            if lost_since is None
            else "round>=? OR state='assigned' OR (state='lost' AND version>=?)"
        )
        tasks = self._db.execute(
            "SELECT task, device, version, round, state, report, weight, slot, staleness, norm, "
            f"trained_norm, member, region FROM tasks WHERE {which} ORDER BY version, task",
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
            region,
        ) in tasks:
            if state == "assigned":
                found.leases.append(SavedTask(task, device, version, member, region))
            elif state == "accepted":
                report = read_json(read_report, content, f"{self._place}: the report of {task}")
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
                        region,
                    )
                )
            elif round >= first:
                found.dropped.append((task, device, state))
            if state == "lost" and lost_since is not None:
                found.lost.append(SavedTask(task, device, version, member, region))
        return found
