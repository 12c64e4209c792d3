"""The ledger of a run in PostgreSQL: the tables of sql_tables.py in a schema of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.database import Database, connect
from fleetlearn_coordinator.storage.errors import StoreAwayError, StoreError
from fleetlearn_coordinator.storage.ledger import Row
from fleetlearn_coordinator.storage.postgres_database import (
    PostgresDatabase,
    statement_of,
)
from fleetlearn_coordinator.storage.postgres_lock import PostgresLock, lost_text
from fleetlearn_coordinator.storage.sql_ledger import SqlLedger
from fleetlearn_coordinator.storage.sql_tables import MIGRATIONS, SCHEMA_VERSION, STATEMENTS
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger

FIRST_VERSION = 9
"""The first version of the tables that PostgreSQL had: no run there needs earlier migrations."""


class PostgresLedger(SqlLedger):
    """``Ledger`` in a schema of a database."""

    is_slow = True

    def __init__(self, lock: PostgresLock) -> None:
        """``lock``: the run's, which this process holds. Raises StoreError where a newer version
        made the tables, and as every method StoreUnavailableError."""
        self._lock = lock
        self.where = f"schema {lock.run.schema}"
        self.restore_advice = "Put it back from a dump of the database."
        # The one that takes the run over ends this session, which it knows by its name.
        db = PostgresDatabase(lock.run, application=lock.run.schema)
        super().__init__(db, lock.run.where)
        try:
            # A server that answers before its log is on the disk would lose what was promised.
            self._db.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
            version = self._db.execute("SELECT tables FROM owner").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise StoreError(
                    Code.BAD_VERSION,
                    f"{lock.run.where} has tables of version {version}; this fleetlearn reads "
                    f"version {SCHEMA_VERSION}. Update it.",
                )
            if version:
                self._migrate(version)
        except BaseException:
            self._db.close()
            raise
        self.is_new = not version

    def create(self, values: Mapping[str, str]) -> None:
        with self._owned():
            for statement in STATEMENTS:
                self._db.execute(statement_of(statement))
            self._db.execute("UPDATE owner SET tables = ?", (SCHEMA_VERSION,))
            for item in values.items():
                self._put(*item)
        self.is_new = False

    def copy_from_sqlite(self, path: Path) -> None:
        """Make all tables, with the rows of a database of SQLite whose tables are up to date. All
        of them are there, or none."""
        with closing(connect(path)) as source, self._owned():
            for statement in STATEMENTS:
                self._db.execute(statement_of(statement))
            for table, names in _tables(source):
                rows: Iterable[Any] = source.execute(f"SELECT {', '.join(names)} FROM {table}")
                if table == "meta":
                    rows = ((key, self._db.to_column(value)) for key, value in rows)
                places = ", ".join("?" * len(names))
                statement = f"INSERT INTO {table}({', '.join(names)}) VALUES({places})"
                self._db.executemany(statement, rows)
            self._db.execute("UPDATE owner SET tables = ?", (SCHEMA_VERSION,))
        self.is_new = False

    def _migrate(self, version: int) -> None:
        if version == SCHEMA_VERSION:
            return
        with self._owned():
            for before in range(max(version, FIRST_VERSION), SCHEMA_VERSION):
                for statement in MIGRATIONS[before]:
                    self._db.execute(statement_of(statement))
            self._db.execute("UPDATE owner SET tables = ?", (SCHEMA_VERSION,))

    def write(self, rows: Sequence[Row]) -> None:
        with self._owned():
            for row in rows:
                self._write(row)

    @contextmanager
    def _owned(self) -> Iterator[None]:
        """Write all that the block writes, or nothing of it where this process has lost the run."""
        self._lock.check()
        try:
            with self._db.transaction():
                # Whoever takes the run over changes this row, and waits until this batch is over.
                owner = self._db.execute("SELECT epoch FROM owner FOR SHARE")
                yield
                if owner.fetchone()[0] != self._lock.epoch:
                    why = "another coordinator took it over"
                    raise StoreAwayError(Code.BUSY, lost_text(self._lock.run, why))
        except StoreAwayError:
            self._lock.check()  # who took the run over has ended this session: say that
            raise


def _tables(db: Database) -> list[tuple[str, list[str]]]:
    """Return each table of a database of SQLite, with the names of its columns."""
    tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return [
        (table, [row[1] for row in db.execute(f"PRAGMA table_info({table})").fetchall()])
        for (table,) in tables
    ]


def copy_to_sqlite(db: PostgresDatabase, path: Path) -> None:
    """Write the rows that ``db`` reads into a new database of SQLite."""
    with closing(SqliteLedger(path)) as ledger:
        ledger.create({})
    with closing(connect(path)) as target, target.transaction():
        for table, names in _tables(target):
            rows = db.stream(f"SELECT {', '.join(names)} FROM {table}")
            if table == "meta":
                rows = ((key, db.from_column(value)) for key, value in rows)
            places = ", ".join("?" * len(names))
            target.executemany(f"INSERT INTO {table} VALUES({places})", rows)
    with closing(connect(path)) as target:
        target.execute("PRAGMA journal_mode=DELETE")  # one file
