"""Reads the SQL tables of a run's ledger from outside, whatever the database is. Nothing here
writes. sqlite_reader.py and postgres_storage.py open one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from fleetlearn_coordinator.storage import sql_exchanges
from fleetlearn_coordinator.storage.ledger import DeviceActivity, ModelMade
from fleetlearn_coordinator.storage.ledger_reader import EndedExchange
from fleetlearn_coordinator.storage.sql_database import SqlDatabase
from fleetlearn_coordinator.storage.stored_json import decode


class SqlReader:
    """``LedgerReader`` of a database."""

    def __init__(self, db: SqlDatabase, place: object, version: int) -> None:
        """``db``: in a transaction that reads one moment. ``place``: as for ``SqlLedger``.
        ``version``: of the tables; earlier versions lack some."""
        self._db, self._place, self._version = db, place, version

    def metadata(self) -> dict[str, Any]:
        rows = self._db.execute("SELECT key, value FROM meta")
        return {key: self._db.from_column(value) for key, value in rows}

    def models(self) -> dict[int, str]:
        return dict(self._db.execute("SELECT version, sha256 FROM models").fetchall())

    def closed_rounds(self, since: int) -> list[tuple[int, str, float, float, dict[str, Any]]]:
        rows = self._db.execute(
            "SELECT number, outcome, opened, closed, summary FROM rounds "
            "WHERE closed IS NOT NULL AND number >= ? ORDER BY number",
            (since,),
        )
        return [
            (
                *row[:4],
                decode(row[4], dict[str, Any], f"{self._place}: the summary of round {row[0]}"),
            )
            for row in rows
        ]

    def exchanges(self, kind: str) -> list[EndedExchange]:
        return sql_exchanges.ended_exchanges(self._db, self._place, kind, self._version)

    def valid_exchanges(self, kind: str, versions: Iterable[int]) -> dict[int, dict[str, Any]]:
        wanted = {*versions}
        rows = [row for row in self.exchanges(kind) if row.outcome == "valid"]
        return {row.version: row.summary for row in rows if row.version in wanted}

    def known_models(self) -> list[ModelMade]:
        # earlier versions: fewer columns
        rows = self._db.execute("SELECT * FROM models ORDER BY version").fetchall()
        return [ModelMade(*row) for row in rows]

    def measured_in_rounds(self, versions: Iterable[int]) -> dict[int, dict[str, Any]]:
        found = {}
        for version in versions:
            row = self._db.execute(
                "SELECT rounds.summary, rounds.number FROM models JOIN rounds ON "
                "rounds.number=models.round WHERE models.version=? AND rounds.outcome='committed'",
                (version + 1,),
            ).fetchone()
            if row is not None:
                found[version] = decode(
                    row[0], dict[str, Any], f"{self._place}: the summary of round {row[1]}"
                )
        return found

    def last_round(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(number), 0) FROM rounds").fetchone()[0])

    def open_round(self) -> int | None:
        row = self._db.execute("SELECT number FROM rounds WHERE closed IS NULL").fetchone()
        return row and int(row[0])

    def newest_model(self) -> ModelMade | None:
        row = self._db.execute("SELECT * FROM models ORDER BY version DESC LIMIT 1").fetchone()
        return None if row is None else ModelMade(*row)

    def round_outcomes(self) -> dict[str, int]:
        return dict(
            self._db.execute(
                "SELECT outcome, COUNT(*) FROM rounds WHERE closed IS NOT NULL GROUP BY outcome "
                "ORDER BY outcome"
            )
        )

    def goal(self, round: int) -> int | None:
        if self._version < 11:
            return None
        row = self._db.execute("SELECT goal FROM rounds WHERE number=?", (round,)).fetchone()
        return None if row is None or row[0] is None else int(row[0])

    def opened(self, round: int) -> float | None:
        row = self._db.execute("SELECT opened FROM rounds WHERE number=?", (round,)).fetchone()
        return None if row is None else float(row[0])

    def task_states(self, round: int) -> dict[str, int]:
        return dict(
            self._db.execute(
                "SELECT state, COUNT(*) FROM tasks WHERE round=? GROUP BY state ORDER BY state",
                (round,),
            )
        )

    def device_activity(
        self, since: float | None = None, only: Collection[str] | None = None
    ) -> list[DeviceActivity]:
        if self._version < 6:
            return []
        which, values = "", list[Any]()
        if only is not None:
            which, values = f"WHERE device IN ({', '.join('?' * len(only))})", [*only]
        elif since is not None:
            which, values = "WHERE seen>=?", [since]
        rows = self._db.execute(f"SELECT * FROM activity {which} ORDER BY device", values)
        found = map(DeviceActivity._make, rows)
        return [row._replace(tags=(row.tags or "").split()) for row in found]  # type: ignore[attr-defined]

    def searched_devices(self) -> list[tuple[str, float | None, int, str]]:
        if self._version < 6:
            return []
        return self._db.execute(
            "SELECT device, connected, CASE WHEN error IS NULL THEN 0 ELSE 1 END, "
            "lower(COALESCE(tags, '') || ' ' || COALESCE(tier, '') || ' ' || "
            "COALESCE(runtime, '')) FROM activity"
        ).fetchall()

    @property
    def _member(self) -> str:
        """The column of a task's member, or what stands for it in tables without families."""
        return "member" if self._version >= 9 else "NULL"

    def tasks_of(self, device: str, most: int) -> list[tuple[str, int, str, str | None]]:
        return self._db.execute(
            f"SELECT task, round, state, {self._member} FROM tasks WHERE device=? "
            "ORDER BY round DESC, task LIMIT ?",
            (device, most),
        ).fetchall()

    def tasks(self, round: int) -> list[tuple[str, str, str, str | None]]:
        return self._db.execute(
            f"SELECT task, device, state, {self._member} FROM tasks WHERE round=? ORDER BY task",
            (round,),
        ).fetchall()
