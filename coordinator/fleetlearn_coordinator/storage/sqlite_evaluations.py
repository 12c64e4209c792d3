"""The tables of evaluations in a run's database, and the functions that write and read them."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec
from fleetlearn_protocol.messages import Evaluation

from fleetlearn_coordinator.storage.ledger import (
    EVALUATIONS_KEPT,
    EvaluationBegun,
    EvaluationEnded,
    LastEvaluation,
    MeasurementAccepted,
    MeasurementDropped,
    MeasurementGiven,
    SavedMeasurement,
)
from fleetlearn_coordinator.storage.stored_json import decode

TABLES = (
    """CREATE TABLE evaluations(
    number INTEGER PRIMARY KEY, version INTEGER NOT NULL, request TEXT, opened REAL NOT NULL,
    closed REAL, outcome TEXT, summary TEXT
)""",
    """CREATE TABLE measurements(
    task TEXT PRIMARY KEY, evaluation INTEGER NOT NULL, device TEXT NOT NULL, tier TEXT NOT NULL,
    state TEXT NOT NULL,                    -- assigned, accepted, or the cause of its end
    result BLOB
) WITHOUT ROWID""",
    "CREATE INDEX measurements_of_evaluation ON measurements(evaluation)",
)
EvaluationRow = (
    EvaluationBegun | MeasurementGiven | MeasurementDropped | MeasurementAccepted | EvaluationEnded
)


def write(db: sqlite3.Connection, row: EvaluationRow) -> None:
    """Write a row, in the transaction that is open."""
    match row:
        case EvaluationBegun():
            db.execute(
                "INSERT INTO evaluations(number, version, request, opened) VALUES(?, ?, ?, ?)", row
            )
        case MeasurementGiven():
            db.execute("INSERT INTO measurements VALUES(?, ?, ?, ?, 'assigned', NULL)", row)
        case MeasurementDropped(task, cause):
            db.execute("UPDATE measurements SET state=? WHERE task=?", (cause, task))
        case MeasurementAccepted(task, result):
            content = msgspec.json.encode(result)
            db.execute(
                "UPDATE measurements SET state='accepted', result=? WHERE task=?", (content, task)
            )
        case EvaluationEnded(number, outcome, summary, at):
            db.execute(
                "UPDATE evaluations SET closed=?, outcome=?, summary=? WHERE number=?",
                (at, outcome, msgspec.json.encode(summary).decode(), number),
            )
            db.execute("DELETE FROM measurements WHERE evaluation<=?", (number - EVALUATIONS_KEPT,))


def last_evaluation(db: sqlite3.Connection, where: object) -> LastEvaluation | None:
    """Return the evaluation that was opened last, or None. ``where``: the database, for messages.
    Raises StoreError (damaged)."""
    row = db.execute(
        "SELECT number, version, request, closed IS NULL FROM evaluations ORDER BY number DESC "
        "LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    number, version, request, is_open = row
    found = LastEvaluation(number, version, request, bool(is_open), [])
    if is_open:
        for task, device, tier, state, content in db.execute(
            "SELECT task, device, tier, state, result FROM measurements WHERE evaluation=? ORDER "
            "BY task",
            (number,),
        ):
            result = content and decode(content, Evaluation, f"{where}: the measurement of {task}")
            found.measurements.append(SavedMeasurement(task, device, tier, state, result))
    return found


def last_valid(
    db: sqlite3.Connection, where: object, since: int
) -> tuple[int, dict[str, Any]] | None:
    """Return the version and the summary of the last valid evaluation of version ``since`` or a
    newer one. Raises StoreError (damaged)."""
    row = db.execute(
        "SELECT version, summary, number FROM evaluations WHERE outcome='valid' AND version>=? "
        "ORDER BY number DESC LIMIT 1",
        (since,),
    ).fetchone()
    if row is None:
        return None
    return row[0], decode(row[1], dict[str, Any], f"{where}: the summary of evaluation {row[2]}")


def closed_evaluations(
    db: sqlite3.Connection, where: object
) -> list[tuple[int, int, str, float, dict[str, Any]]]:
    """Return (number, version, outcome, closed, summary) of each evaluation that is over, in order.
    Raises StoreError (damaged)."""
    rows = db.execute(
        "SELECT number, version, outcome, closed, summary FROM evaluations WHERE closed IS NOT "
        "NULL ORDER BY number"
    )
    return [
        (*row[:4], decode(row[4], dict[str, Any], f"{where}: the summary of evaluation {row[0]}"))
        for row in rows
    ]
