"""What the SQL of a ledger needs of a database. database.py is SQLite's, postgres_database.py is
PostgreSQL's.

Statements are written so that both understand them, with ``?`` for each value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol


class SqlRows(Protocol):
    """What a statement found. Every method may raise StoreUnavailableError."""

    def fetchone(self) -> Any:
        """Return the next row, or None where there is none."""

    def fetchall(self) -> list[Any]:
        """Return all further rows, as tuples."""

    def __iter__(self) -> Iterator[Any]: ...


class SqlDatabase(Protocol):
    """A connection to a database. Statements outside of a transaction count at once. Every method
    may raise StoreUnavailableError."""

    def transaction(self) -> AbstractContextManager[None]:
        """Write all that the block writes, or nothing of it. Raises DuplicateRowError where a row
        has the key of another."""

    def execute(self, statement: str, values: Any = (), /) -> SqlRows:
        """Carry out a statement with these values."""

    def executemany(self, statement: str, values: Iterable[Any], /) -> object:
        """Carry out a statement with each of these sequences of values."""

    def to_column(self, value: str | float | None) -> Any:
        """Return what stands for a value of the metadata in its column."""

    def from_column(self, value: Any) -> Any:
        """Return the value that ``to_column`` was given."""

    def close(self) -> None:
        """Close the connection. May be called again."""
