"""SQLite databases whose errors name the file and say what to do."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, NoReturn, Self

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import (
    DuplicateRowError,
    StoreError,
    StoreUnavailableError,
)
from fleetlearn_coordinator.storage.synced_names import sync_names

_ADVICE = {
    sqlite3.SQLITE_FULL: "free some space, and start again",
    sqlite3.SQLITE_IOERR: "check the disk and the room on it, and start again",
    sqlite3.SQLITE_READONLY: "its file system is read-only, or its permissions let nobody write",
    sqlite3.SQLITE_CANTOPEN: "check its folder, the permissions and the room on the disk",
    sqlite3.SQLITE_BUSY: "another process has it open",
    sqlite3.SQLITE_CORRUPT: (
        "it is damaged: put it back from a backup, with its -wal file if there is one"
    ),
    sqlite3.SQLITE_NOTADB: (
        "it is damaged: put it back from a backup, with its -wal file if there is one"
    ),
}
"""By SQLite's primary result code."""


class Database(sqlite3.Connection):
    """A connection that raises StoreUnavailableError in place of sqlite3's errors, and
    DuplicateRowError in place of its IntegrityError."""

    path: Path
    """Set by ``connect``."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all that the block writes, or nothing of it."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self.in_transaction:  # a full disk has ended it already
                self.execute("ROLLBACK")
            raise

    def execute(self, statement: str, values: Any = (), /) -> sqlite3.Cursor:
        return self.cursor(_Cursor).execute(statement, values)

    def executemany(self, statement: str, values: Iterable[Any], /) -> sqlite3.Cursor:
        return self.cursor(_Cursor).executemany(statement, values)

    def to_column(self, value: str | float | None) -> str | float | None:
        """Return what stands for a value of the metadata in its column, which has no type."""
        return value

    from_column = to_column

    def copy_to(self, path: Path) -> None:
        """Write what is committed now into a new database, one file, while others may write to this
        one. Raises StoreError where what was read is damaged."""
        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as copy:
                self.backup(copy)  # in one step: nobody waits for it, and nothing begins again
                copy.execute("PRAGMA journal_mode=DELETE")
                problem = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.Error as error:
            _refuse(self.path, error)
        if problem != "ok":
            text = f"{self.path} is damaged: {problem}. Put it back from a backup"
            raise StoreError(Code.WRONG_HASH, text)


class _Cursor(sqlite3.Cursor):
    connection: Database

    def execute(self, statement: str, values: Any = (), /) -> Self:
        try:
            return super().execute(statement, values)
        except sqlite3.Error as error:
            _refuse(self.connection.path, error)

    def executemany(self, statement: str, values: Iterable[Any], /) -> Self:
        try:
            return super().executemany(statement, values)
        except sqlite3.Error as error:
            _refuse(self.connection.path, error)

    def fetchone(self) -> Any:
        try:
            return super().fetchone()
        except sqlite3.Error as error:
            _refuse(self.connection.path, error)

    def fetchall(self) -> list[Any]:
        try:
            return super().fetchall()
        except sqlite3.Error as error:
            _refuse(self.connection.path, error)

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except sqlite3.Error as error:
            _refuse(self.connection.path, error)


def _refuse(path: Path, error: sqlite3.Error) -> NoReturn:
    if isinstance(error, sqlite3.IntegrityError):
        raise DuplicateRowError(Code.DUPLICATE, f"{path}: {error}") from error
    advice = _ADVICE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    text = f"{path}: {error}" + (f"; {advice}" if advice else "")
    raise StoreUnavailableError(Code.BUSY, text) from error


def connect(
    path: Path, *, timeout: float = 5.0, read_only: bool = False, any_thread: bool = False
) -> Database:
    """Open a database, without implicit transactions. ``timeout``: seconds to wait for another
    process's transaction. ``any_thread``: other threads than this one may use it, one at a time.
    Raises StoreUnavailableError."""
    where = f"{path.absolute().as_uri()}?mode=ro" if read_only else str(path)
    try:
        found = sqlite3.connect(
            where,
            timeout,
            isolation_level=None,
            check_same_thread=not any_thread,
            factory=Database,
            uri=read_only,
        )
    except sqlite3.Error as error:
        _refuse(path, error)
    assert isinstance(found, Database)
    found.path = path
    return found


class Tables(NamedTuple):
    """What a database consists of."""

    version: int
    made: tuple[str, ...]
    """Statements that make the tables in a new database."""
    added: tuple[str, ...]
    """Statements that make the tables which databases of earlier releases lack."""


def open_shared(path: Path, tables: Tables, *, timeout: float, mode: int) -> Database:
    """Open a database that several processes may have open, and whose transactions outlive a power
    cut.

    If there is none, a new one is made. mode: permissions of a new file. Raises StoreError where a
    newer version made the database or the file is empty, StoreUnavailableError where the disk is
    full or the file is no database.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _make(path, tables, mode)
        sync_names(path.parent)
    # Looked at, never opened: POSIX takes this process's locks on a file away when it closes a
    # descriptor of it, and an administrator's request opens the database beside the coordinator.
    # Another process would then delete the log that both still write to.
    if not path.stat().st_size:
        text = (
            f"{path} is empty: its content is lost. Put the file back from a backup, or remove it "
            "to start a new one"
        )
        raise StoreError(Code.WRONG_HASH, text)
    found = connect(path, timeout=timeout)
    try:
        found.execute("PRAGMA journal_mode=WAL")
        found.execute("PRAGMA synchronous=FULL")
        version = found.execute("PRAGMA user_version").fetchone()[0]
        if version > tables.version:
            text = (
                f"{path} is of version {version}; this fleetlearn reads version {tables.version}. "
                "Update it."
            )
            raise StoreError(Code.BAD_VERSION, text)
        with found.transaction():
            for statement in tables.added:
                found.execute(statement)
    except BaseException:
        found.close()
        raise
    return found


def _make(path: Path, tables: Tables, mode: int) -> None:
    """Make the file with its tables in one step. So a file that is found empty has lost its
    content."""
    draft = path.with_name(f"{path.name}.{token_hex(8)}.draft")
    os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode))
    try:
        with closing(connect(draft)) as made, made.transaction():
            for statement in tables.made:
                made.execute(statement)
            made.execute(f"PRAGMA user_version={tables.version}")
        try:
            os.link(draft, path)
        except FileExistsError:  # another process made it meanwhile
            pass
        except OSError:  # a file system without hard links
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
