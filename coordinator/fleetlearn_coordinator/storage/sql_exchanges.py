"""Writes and reads exchanges in the SQL tables of a run's ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import msgspec

from fleetlearn_coordinator.storage.ledger import (
    EXCHANGES_KEPT,
    KEPT_OF_KIND,
    AnswerAccepted,
    AnswerDropped,
    DeviceAsked,
    ExchangeBegun,
    ExchangeEnded,
    LastSeries,
    SavedAnswer,
    SavedPhase,
)
from fleetlearn_coordinator.storage.ledger_reader import EndedExchange
from fleetlearn_coordinator.storage.sql_database import SqlDatabase
from fleetlearn_coordinator.storage.stored_json import decode

ExchangeRow = ExchangeBegun | DeviceAsked | AnswerDropped | AnswerAccepted | ExchangeEnded


def write(db: SqlDatabase, row: ExchangeRow) -> None:
    """Write a row, in the transaction that is open."""
    match row:
        case ExchangeBegun(members=members):
            listed = None if members is None else json.dumps([*members])
            db.execute(
                "INSERT INTO exchanges(kind, number, phase, version, members, request, opened) "
                "VALUES(?, ?, ?, ?, ?, ?, ?)",
                row._replace(members=listed),
            )
        case DeviceAsked():
            db.execute("INSERT INTO answers VALUES(?, ?, ?, ?, ?, ?, 'assigned', NULL)", row)
        case AnswerDropped(task, cause):
            db.execute("UPDATE answers SET state=? WHERE task=?", (cause, task))
        case AnswerAccepted(task, content):
            db.execute(
                "UPDATE answers SET state='accepted', content=? WHERE task=?", (content, task)
            )
        case ExchangeEnded(kind, number, phase, outcome, summary, at):
            db.execute(
                "UPDATE exchanges SET closed=?, outcome=?, summary=? "
                "WHERE kind=? AND number=? AND phase=?",
                (at, outcome, msgspec.json.encode(summary).decode(), kind, number, phase),
            )
            db.execute(
                "DELETE FROM answers WHERE kind=? AND number<=?",
                (kind, number - KEPT_OF_KIND.get(kind, EXCHANGES_KEPT)),
            )


def last_series(db: SqlDatabase, where: object, kind: str) -> LastSeries | None:
    """Return the series of this kind that was opened last, or None. ``where``: the database, for
    messages. Raises StoreError (damaged)."""
    rows = db.execute(
        "SELECT number, version, request, phase, members, closed IS NULL, "
        "outcome='valid' FROM exchanges WHERE "
        "kind=? AND number=(SELECT MAX(number) FROM exchanges WHERE kind=?) ORDER BY phase",
        (kind, kind),
    ).fetchall()
    if not rows:
        return None
    number, version, request = rows[0][:3]
    answers = db.execute(
        "SELECT phase, task, device, note, state, content FROM answers WHERE kind=? AND number=? "
        "ORDER BY phase, task",
        (kind, number),
    )
    given = {
        phase: [SavedAnswer(*answer[1:]) for answer in group]
        for phase, group in groupby(answers, lambda answer: answer[0])
    }
    phases = []
    for _, _, _, phase, listed, is_open, is_valid in rows:
        what = f"{where}: the members of {kind} {number}"
        members = None if listed is None else decode(listed, list[str], what)
        here = given.get(phase, [])
        phases.append(SavedPhase(phase, members, bool(is_open), bool(is_valid), here))
    return LastSeries(number, version, request, phases)


def last_valid(
    db: SqlDatabase, where: object, kind: str, since: int
) -> tuple[int, dict[str, Any]] | None:
    """Return the version and the summary of the last valid exchange of this kind about version
    ``since`` or a newer one. Raises StoreError (damaged)."""
    row = db.execute(
        "SELECT version, summary, number FROM exchanges WHERE kind=? AND outcome='valid' AND "
        "version>=? ORDER BY number DESC, phase DESC LIMIT 1",
        (kind, since),
    ).fetchone()
    if row is None:
        return None
    return row[0], decode(row[1], dict[str, Any], f"{where}: the summary of {kind} {row[2]}")


def ended_exchanges(db: SqlDatabase, where: object, kind: str, tables: int) -> list[EndedExchange]:
    """Return the exchanges of this kind that are over, in order. ``tables``: their version, which
    may be an earlier one. Raises StoreError (damaged)."""
    rows: Iterable[Any] = ()
    if tables >= 7:
        rows = db.execute(
            "SELECT number, phase, version, outcome, closed, summary FROM exchanges "
            "WHERE kind=? AND closed IS NOT NULL ORDER BY number, phase",
            (kind,),
        )
    elif tables >= 3 and kind == "evaluation":
        rows = db.execute(
            "SELECT number, 1, version, outcome, closed, summary FROM evaluations "
            "WHERE closed IS NOT NULL ORDER BY number"
        )
    return [
        EndedExchange(
            number, version, outcome, closed,
            decode(summary, dict[str, Any], f"{where}: the summary of {kind} {number}"), phase,
        )
        for number, phase, version, outcome, closed, summary in rows
    ]  # fmt: skip
