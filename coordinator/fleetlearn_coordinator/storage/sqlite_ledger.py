"""The ledger of a run in SQLite (WAL): ``coordinator.sqlite3`` in its data directory.

``kill -9`` loses nothing that was written, because the kernel keeps it. With ``power`` SQLite also
fsyncs, so that a power cut loses nothing either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.database import connect
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.sql_ledger import SqlLedger
from fleetlearn_coordinator.storage.sql_tables import MIGRATIONS, SCHEMA_VERSION, STATEMENTS
from fleetlearn_coordinator.storage.wal_check import check_wal

DATABASE = "coordinator.sqlite3"


class SqliteLedger(SqlLedger):
    """``Ledger`` in one SQLite database."""

    is_slow = False

    def __init__(self, path: Path, *, power: bool = False, any_thread: bool = False) -> None:
        """Open the database. ``any_thread``: as for ``connect``. Raises StoreError where a newer
        version made it or its log is damaged, and as every method StoreUnavailableError."""
        self.path, self.where = path, path.name
        self.restore_advice = f"Put it back from a backup (with {path.name}-wal, if there is one)."
        check_wal(path)
        super().__init__(connect(path, any_thread=any_thread), path)
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

    def create(self, values: Mapping[str, str]) -> None:
        with self._db.transaction():
            for statement in STATEMENTS:
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
