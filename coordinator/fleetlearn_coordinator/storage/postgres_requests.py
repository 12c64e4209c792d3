"""What people ask of a run in PostgreSQL, and what its models measure on held-out data."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex
from typing import Any

import msgspec
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.postgres_database import PostgresDatabase, PostgresRun
from fleetlearn_coordinator.storage.postgres_lock import PostgresLock, has_schema
from fleetlearn_coordinator.storage.requests import RollBack, decode_roll_back, encode_roll_back
from fleetlearn_coordinator.storage.stored_json import decode

APPLICATION = "fleetlearn requests"


class PostgresRequests:
    """``Requests`` in a run's schema."""

    def __init__(self, run: PostgresRun, lock: Callable[[], PostgresLock | None]) -> None:
        """``lock``: returns the run's, where this process holds it. It then knows what is asked, a
        moment later than others, and the coordinator need not wait for the server."""
        self._run, self._lock = run, lock

    def ask_for_evaluation(self) -> None:
        self._put("evaluation", token_hex(8))

    def evaluation(self) -> str | None:
        return self._read()[0]

    def remove_evaluation(self) -> None:
        self._put("evaluation", None)

    def ask_for_roll_back(self, version: int, who: str) -> None:
        self._put("roll_back", encode_roll_back(RollBack(token_hex(8), version, who)))

    def roll_back(self) -> RollBack | None:
        text = self._read()[1]
        return None if text is None else decode_roll_back(text)

    def remove_roll_back(self) -> None:
        self._put("roll_back", None)

    def _read(self) -> tuple[str | None, str | None]:
        lock = self._lock()
        if lock is not None:
            return lock.requests
        return read_requests(self._run)

    def _put(self, column: str, value: str | None) -> None:
        lock = self._lock()
        db = lock.db if lock else PostgresDatabase(self._run, application=APPLICATION)
        try:
            if not has_schema(db):
                if value is None:
                    return
                text = f"{self._run.where} does not exist: serve the plan first"
                raise StoreError(Code.UNKNOWN_CONTENT, text)
            db.execute(f"UPDATE owner SET {column} = ?", (value,))
        finally:
            if lock is None:
                db.close()


def read_requests(run: PostgresRun) -> tuple[str | None, str | None]:
    """Return the requests for an evaluation and for a roll back, as texts."""
    db = PostgresDatabase(run, application=APPLICATION)
    try:
        if not has_schema(db):
            return None, None
        evaluation, roll_back = db.execute("SELECT evaluation, roll_back FROM owner").fetchone()
        return evaluation, roll_back
    finally:
        db.close()


class PostgresHeldOutResults:
    """``HeldOutResults`` in a run's schema."""

    def __init__(self, run: PostgresRun) -> None:
        self._run = run

    def write(self, version: int, result: dict[str, Any]) -> None:
        content = msgspec.json.encode(result).decode()
        statement = "INSERT INTO held_out VALUES(?, ?) ON CONFLICT DO NOTHING"
        db = PostgresDatabase(self._run, application=APPLICATION)
        try:
            db.execute(statement, (version, content))
        finally:
            db.close()

    def read(self, version: int) -> dict[str, Any] | None:
        return self._read("WHERE version = ?", version).get(version)

    def read_all(self) -> dict[int, dict[str, Any]]:
        return self._read("")

    def _read(self, which: str, *values: int) -> dict[int, dict[str, Any]]:
        db = PostgresDatabase(self._run, application=APPLICATION)
        try:
            if not has_schema(db):
                return {}
            statement = f"SELECT version, result FROM held_out {which} ORDER BY version"
            return {
                version: decode(text, dict[str, Any], f"{self._run.where}: held_out {version}")
                for version, text in db.execute(statement, values)
            }
        finally:
            db.close()
