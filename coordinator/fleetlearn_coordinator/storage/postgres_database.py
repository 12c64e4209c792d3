"""Connections to PostgreSQL. Their errors name the server and say what to do, and no call waits for
ever.

Each run has a schema of its own in the database. Its tables and statements are those of SQLite
(sql_tables.py, sql_ledger.py): this module says how PostgreSQL names their types and writes their
values.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import parse_qsl, urlsplit

import msgspec
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import DuplicateRowError, StoreAwayError, StoreError

if TYPE_CHECKING:
    import psycopg

ROWS_AT_A_TIME = 1000
"""Rows that are fetched together where they may be many."""
SCHEME = "postgresql"
SCHEMA_PREFIX = "fleetlearn_"
MOST_BYTES = 63
"""Bytes of a name in PostgreSQL."""
CONNECT_TIMEOUT = 5
"""Seconds to wait for a connection, for each address that the server's name has."""
ANSWER_TIMEOUT = 30.0
"""Seconds to wait for the answer to a statement."""
LATER = 2.0
"""Seconds more that this process waits than it lets the server take: the server's own words are
better."""
LOCK_TIMEOUT = 10.0
"""Seconds that the server lets a statement wait for another transaction."""
IDLE_IN_TRANSACTION = 10.0
"""Seconds after which the server ends a session that leaves a transaction open and says nothing:
its process is paused or cut off, and others may wait for its rows."""

ADVICE = {
    "password authentication failed": "check the user and the password: it is taken from a file "
    "that PGPASSFILE names (by default ~/.pgpass, readable by its owner alone) or from PGPASSWORD",
    "no password supplied": "give a password in a file that PGPASSFILE names (by default "
    "~/.pgpass, readable by its owner alone) or in PGPASSWORD",
    "does not exist": "make it first: `createdb`, `createuser`",
    "permission denied for database": "let the user make schemas there: GRANT CREATE ON DATABASE "
    "... TO ...",
    "read-only transaction": "this server is a standby: connect to the primary, or add "
    "target_session_attrs=read-write to the address",
    "no space left on device": "free some space on the server's disk, and start again",
    "connection refused": "check that the server runs, and the address",
    "server closed the connection": "the server was stopped or died: start it, and then this "
    "coordinator again. Nothing that was acknowledged is lost",
    "idle_session_timeout": "fleetlearn needs PostgreSQL 14 or newer",
    "timeout": "check that the server runs, the address, and what is between",
}
"""What is in an error's text, in lower case -> what to do."""

TYPES = {
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "TEXT": 'TEXT COLLATE "C"',  # in the order of their bytes, as in SQLite
    "BLOB": "BYTEA",
}
"""SQLite's name of a type -> PostgreSQL's."""


class PostgresRun(NamedTuple):
    """A run in a database."""

    url: str
    """Of the database, without a password."""
    schema: str
    """Of the run's tables."""

    @property
    def where(self) -> str:
        """For messages to people."""
        return f"{self.url} (schema {self.schema})"

    @property
    def quoted(self) -> str:
        """The schema's name in a statement."""
        return '"' + self.schema.replace('"', '""') + '"'

    @property
    def lock_key(self) -> int:
        """Of the advisory lock: a signed number of 64 bits."""
        content = hashlib.sha256(self.schema.encode()).digest()
        return int.from_bytes(content[:8], "big", signed=True)


def find_run(url: str, name: str) -> PostgresRun:
    """Return where the run of this name is in the database of this URL. Raises StoreError where the
    URL has a password, or is none."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
    except ValueError:  # its words may have the password
        text = "ledger = ... is no address of a database, such as postgresql://user@host/database"
        raise StoreError(Code.BAD_MESSAGE, text) from None
    if parts.password is not None or any("password" in key for key in options):
        shown = f"{SCHEME}://...@{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise StoreError(
            Code.BAD_MESSAGE,
            f"{shown}: this address has a password, which would stand in files and logs. Leave it "
            "out, and put the password into a file that PGPASSFILE names (by default ~/.pgpass, "
            "readable by its owner alone) or into PGPASSWORD",
        )
    schema = SCHEMA_PREFIX + name
    if len(schema.encode()) > MOST_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        start = schema.encode()[: MOST_BYTES - 17].decode(errors="ignore")
        schema = f"{start}_{digest}"
    return PostgresRun(url, schema)


class PostgresDatabase:
    """A connection to a run's schema. Several threads may call it; each waits for the others'
    statements, but transactions are for one thread at a time."""

    def __init__(self, run: PostgresRun, *, application: str, answer: float = ANSWER_TIMEOUT):
        """Connect. ``application``: what the server calls this session. ``answer``: seconds to wait
        for an answer. Raises StoreError (psycopg is not installed), StoreAwayError."""
        self.run = run
        with _named(run):
            self._connection = _connection_class(answer + LATER).connect(
                run.url,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT,
                application_name=application,
                keepalives=1,
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=int(answer * 1000),
            )
        settings = {
            "search_path": run.quoted,
            "statement_timeout": f"{answer:.0f}s",
            "lock_timeout": f"{min(LOCK_TIMEOUT, answer):.0f}s",
            "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION:.0f}s",
        }
        try:
            parts = ", ".join(["set_config(?, ?, false)"] * len(settings))
            self.execute(f"SELECT {parts}", [each for item in settings.items() for each in item])
        except BaseException:
            self.close()
            raise

    def set(self, name: str, value: str) -> None:
        """Set a parameter of this session."""
        self.execute("SELECT set_config(?, ?, false)", (name, value))

    def close(self) -> None:
        """Close the connection. Safe to call again, and in any thread."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all that the block writes, or nothing of it. Statements are sent without waiting
        for the answers to those before."""
        with _named(self.run), self._connection.pipeline(), self._connection.transaction():
            yield

    def execute(self, statement: str, values: Any = (), /) -> PostgresRows:
        with _named(self.run):
            cursor = self._connection.execute(_statement(statement), _values(values))
        return PostgresRows(self.run, cursor)

    def stream(self, statement: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows that a statement finds, as the server sends them: they may be many."""
        with _named(self.run), self._connection.cursor() as cursor:
            yield from cursor.stream(_statement(statement), size=ROWS_AT_A_TIME)

    def executemany(self, statement: str, values: Iterable[Any], /) -> None:
        for each in values:
            self.execute(statement, each)

    def to_column(self, value: str | float | None) -> str:
        """Return what stands for a value of the metadata in its column: JSON."""
        return msgspec.json.encode(value).decode()

    def from_column(self, value: str) -> Any:
        """Return the value that ``to_column`` was given."""
        return msgspec.json.decode(value)


class PostgresRows:
    """What a statement found."""

    def __init__(self, run: PostgresRun, cursor: psycopg.Cursor[Any]) -> None:
        self._run, self._cursor = run, cursor

    def fetchone(self) -> Any:
        with _named(self._run):
            return self._cursor.fetchone()

    def fetchall(self) -> list[Any]:
        with _named(self._run):
            rows: list[Any] = self._cursor.fetchall()
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())


def statement_of(sqlite: str) -> str:
    """Return a statement that makes or changes tables, with PostgreSQL's types."""
    changed = sqlite.replace(" WITHOUT ROWID", "").replace("value)", "value TEXT)")
    names = "|".join(TYPES)
    return re.sub(rf"\b({names})\b", lambda found: TYPES[found[1]], changed)


@lru_cache(maxsize=256)
def _statement(text: str) -> str:
    return text.replace("?", "%s")


def _values(values: Iterable[Any]) -> list[Any]:
    """Return values as PostgreSQL takes them: its texts have no NUL, which a device may say."""
    return [
        value.replace("\0", "\N{REPLACEMENT CHARACTER}")
        if type(value) is str and "\0" in value
        else value
        for value in values
    ]


@lru_cache(maxsize=8)
def _connection_class(answer: float) -> type[psycopg.Connection[Any]]:
    """Return the class of connections that wait ``answer`` seconds for an answer. Raises StoreError
    where psycopg is not installed."""
    # Imported late: who has no run in PostgreSQL needs none of it.
    try:
        import psycopg
    except ImportError as error:
        text = f"{SCHEME}:// needs: pip install 'fleetlearn[postgres]' ({error})"
        raise StoreError(Code.BAD_MESSAGE, text) from None

    # What it says there is raised as well.
    logging.getLogger("psycopg").setLevel(logging.CRITICAL)

    class LimitedConnection(psycopg.Connection[Any]):  # type: ignore[misc]  # it may be missing
        """The server's own time-outs end nothing where the server's machine is paused or cut
        off."""

        def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
            return super().wait(limited(gen), *args, **kwargs)

    def limited(steps: Any) -> Any:
        until = time.monotonic() + answer
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > until:
                    raise psycopg.OperationalError(f"timeout: no answer within {answer:.0f} s")
                wanted = steps.send(ready)
        except StopIteration as end:
            return end.value

    return LimitedConnection


@contextmanager
def _named(run: PostgresRun) -> Iterator[None]:
    """Raise this package's errors in place of psycopg's."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        # psycopg is imported here at the latest: errors of others are not its own
        import psycopg

        if not isinstance(error, psycopg.Error):
            raise
        _refuse(run, error)


def _refuse(run: PostgresRun, error: psycopg.Error) -> NoReturn:
    import psycopg

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # the first one says it; of several addresses the others do
    said = " ".join(lines if lines and lines[0].endswith(":") else lines[:1])
    said = said or type(error).__name__
    if isinstance(error, psycopg.errors.UniqueViolation):
        raise DuplicateRowError(Code.DUPLICATE, f"{run.where}: {said}") from error
    lower = said.lower()
    advice = next((do for part, do in ADVICE.items() if part in lower), "")
    text = f"{run.where}: {said}" + (f"; {advice}" if advice else "")
    raise StoreAwayError(Code.BUSY, text) from None
