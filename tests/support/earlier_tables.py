"""Databases as earlier versions left them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from fleetlearn_coordinator.storage.sql_tables import EVALUATION_TABLES


def make_version_6(database: Path) -> None:
    """Make the tables of exchanges what they were when evaluations were the only ones."""
    with closing(sqlite3.connect(database)) as db, db:
        for table in EVALUATION_TABLES:
            db.execute(table)
        db.execute(
            "INSERT INTO evaluations SELECT number, version, request, opened, closed, outcome, "
            "summary FROM exchanges"
        )
        db.execute(
            "INSERT INTO measurements SELECT task, number, device, note, state, content "
            "FROM answers"
        )
        db.execute("DROP TABLE exchanges")
        db.execute("DROP TABLE answers")
        db.execute("DROP TABLE participations")
        db.execute("ALTER TABLE tasks DROP COLUMN member")
        db.execute("ALTER TABLE tasks DROP COLUMN region")
        db.execute("ALTER TABLE rounds DROP COLUMN goal")
        db.execute("PRAGMA user_version=6")
