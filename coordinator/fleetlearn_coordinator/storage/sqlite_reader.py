"""Reads the database of a data directory, also while its coordinator runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.database import connect
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.sql_reader import SqlReader
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE


@contextmanager
def read_ledger(folder: Path) -> Iterator[SqlReader]:
    """Open the database of a data directory. All reads show the same moment. Raises StoreError
    (there is none, or it is being made), StoreUnavailableError."""
    path = folder / DATABASE
    if not path.is_file():
        text = f"{folder} is not a coordinator's data directory: it has no {DATABASE}"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    with closing(connect(path, timeout=10.0, read_only=True)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if not version:  # it is written together with the tables
            raise StoreError(
                Code.UNKNOWN_CONTENT,
                f"{folder} is still being made by a coordinator that starts; ask again",
            )
        db.execute("BEGIN")
        yield SqlReader(db, path, version)
