"""The runs of a host: what each is to do, and why one failed. In SQLite, ``runs.db`` in the host's
folder of runs.

Whoever operates the host (its commands, its HTTP API) writes here what is wanted. The host reads it
within a second and makes it so. So an operation survives ``kill -9`` on either side, and works
while no host runs. The audit log is another database: an operation's row of it is written here
first, with the operation, and stays until it is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage import canaries
from fleetlearn_coordinator.storage.canaries import Canaries, CanaryRow, Split
from fleetlearn_coordinator.storage.database import Tables, connect, open_shared
from fleetlearn_coordinator.storage.errors import DuplicateRowError, StoreError
from fleetlearn_coordinator.storage.lock import LOCK, is_locked, lock

DATABASE = "runs.db"
BUSY_TIMEOUT = 1.0
"""Seconds to wait for another process's transaction."""
State: TypeAlias = Literal["running", "paused", "draining", "stopped"]
"""What a run is to do. paused: no new task and no new round, and what is out still counts.
draining: the open round goes to its end, then the run is stopped. stopped: it is left as a stopped
process leaves it, and can go on later."""
# AUTOINCREMENT: a run that is removed and added again under its name is another one.
_TABLES = Tables(
    1,
    (
        "CREATE TABLE runs(number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, "
        "plan TEXT NOT NULL, population TEXT NOT NULL, wanted TEXT NOT NULL, asked INTEGER NOT "
        "NULL, failed TEXT NOT NULL)",
    ),
    (
        "CREATE TABLE IF NOT EXISTS to_log(number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT "
        "NULL, what TEXT NOT NULL, about TEXT NOT NULL)",
        canaries.TABLE,
    ),
)


class Population(NamedTuple):
    """Which devices serve a run. Default: all."""

    tags: tuple[str, ...] = ()
    """Tags that a device must have."""
    tiers: tuple[str, ...] = ()
    """A device's tier must be one of these. Empty: any."""
    runtimes: tuple[str, ...] = ()
    """First words of the runtimes that may train, such as "onnx". Empty: any."""
    share: float = 1.0
    """Share of all devices, above 0 and up to 1: always the same devices."""


class WantedRun(NamedTuple):
    """A run, and what it is to do."""

    number: int
    """Of the run: no other run of this database has or had it."""
    name: str
    plan: Path
    """Its plan's file."""
    population: Population
    wanted: State
    asked: int
    """How many times something was asked of the run. A run that ended is begun again when it is
    asked for once more."""
    failed: str
    """Why the run was stopped by an error; empty: it was not."""
    split: Split | None = None
    """Which part of its devices serve it, while it has a canary or is one."""


class Operation(NamedTuple):
    """A row of the audit log that may not be there yet."""

    number: int
    at: float
    """Unix time."""
    what: str
    about: dict[str, Any]


class Runs:
    """The database. All calls are synchronous and take well below a millisecond. Raises StoreError
    where the database is a newer version's, StoreUnavailableError where the disk is full or the
    file is no database."""

    def __init__(self, folder: Path) -> None:
        """Open the folder's database, which is made if there is none."""
        self.path = folder / DATABASE
        self._db = open_shared(self.path, _TABLES, timeout=BUSY_TIMEOUT, mode=0o666)
        self.canaries = Canaries(self._db)
        for run in self.runs():  # an earlier release wrote absolute paths
            if (kept := self._kept_path(run.plan)) != str(run.plan):
                self._db.execute(
                    "UPDATE runs SET plan=? WHERE number=? AND plan=?",
                    (kept, run.number, str(run.plan)),
                )
        self._seen = self._data_version()

    def close(self) -> None:
        self._db.close()

    def copy_to(self, folder: Path, plans: Mapping[str, Path]) -> None:
        """Write a copy of the database, as it is now, into another folder, whose plans are
        elsewhere: name of a run -> its plan there. Raises StoreError (damaged), OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._db.copy_to(folder / DATABASE)
        with closing(connect(folder / DATABASE)) as db:
            for name, plan in plans.items():
                kept = os.path.relpath(_plain(plan), _plain(folder))
                db.execute("UPDATE runs SET plan=? WHERE name=?", (kept, name))

    # Who serves them

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold these runs as the one host that serves them, until the block is left or this process
        dies. Raises StoreError where another host does."""
        descriptor = lock(self.path.parent / LOCK)
        try:
            yield
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Return whether a host serves these runs."""
        return is_locked(self.path.parent / LOCK)

    def _kept_path(self, plan: Path) -> str:
        """Return a plan's path as it is written: relative to the folder of runs, if the plan is
        beside the folder or in it. A copy of all of it, such as a restored backup, then has its own
        plans, and not the originals."""
        home, plan = _plain(self.path.parent), _plain(plan)
        near = plan.is_relative_to(home.parent) and home.parent != Path(home.anchor)
        return os.path.relpath(plan, home) if near else str(plan)

    def _plan_path(self, kept: str) -> Path:
        """Undo ``_kept_path``."""
        return _plain(self.path.parent / kept)

    # What is wanted

    def add(self, name: str, plan: Path, population: Population = Population()) -> None:  # noqa: B008
        """Add a run, which is to be running. Raises StoreError if there is one of this name."""
        row = (name, self._kept_path(plan), msgspec.json.encode(population).decode())
        try:
            self._db.execute(
                "INSERT INTO runs(name, plan, population, wanted, asked, failed) VALUES(?, ?, ?, "
                "'running', 0, '')",
                row,
            )
        except DuplicateRowError:
            text = f"there is a run called {name} already: take another name, or remove that one"
            raise StoreError(Code.DUPLICATE, text) from None

    def want(self, name: str, state: State) -> None:
        """From now on the run is to be in this state. A failure is forgotten: a run that is to be
        running tries again. Raises StoreError if there is no such run."""
        assert state in get_args(State)
        self._change(
            name, "UPDATE runs SET wanted=?, failed='', asked=asked+1 WHERE name=?", state, name
        )

    def ask_again(self, name: str) -> None:
        """Begin the run again if it has ended and is to be running. Raises StoreError if there is
        no such run."""
        self._change(name, "UPDATE runs SET asked=asked+1 WHERE name=?", name)

    def remove(self, name: str) -> None:
        """Forget the run. Its data directory stays. Raises StoreError if there is no such run."""
        self.canaries.forget(run.number for run in self.runs() if run.name == name)
        self._change(name, "DELETE FROM runs WHERE name=?", name)

    def _change(self, name: str, statement: str, *values: object) -> None:
        if not self._db.execute(statement, values).rowcount:
            names = ", ".join(run.name for run in self.runs()) or "none"
            raise StoreError(
                Code.UNKNOWN_CONTENT, f"there is no run called {name}; there are: {names}"
            )

    # The audit log

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write all that the block changes, or nothing of it."""
        with self._db.transaction():
            yield

    @contextmanager
    def logged(self, at: float, what: str, about: Mapping[str, Any]) -> Iterator[None]:
        """Write what the block changes together with its row of the audit log, or nothing of it."""
        with self._db.transaction():
            yield
            row = (at, what, msgspec.json.encode(about).decode())
            self._db.execute("INSERT INTO to_log(at, what, about) VALUES(?, ?, ?)", row)

    def to_log(self) -> list[Operation]:
        """Return the rows that may not be in the audit log yet, the oldest first."""
        rows = self._db.execute("SELECT number, at, what, about FROM to_log ORDER BY number")
        return [
            Operation(number, at, what, msgspec.json.decode(about))
            for number, at, what, about in rows
        ]

    def is_logged(self, operation: Operation) -> None:
        """The row is in the audit log."""
        self._db.execute("DELETE FROM to_log WHERE number=?", (operation.number,))

    # What the host found. Where somebody asked for something else meanwhile, that is what counts.

    def failed(self, run: WantedRun, why: str) -> None:
        """The run was stopped by an error."""
        self._db.execute(
            "UPDATE runs SET failed=? WHERE number=? AND asked=?", (why, run.number, run.asked)
        )

    def drained(self, run: WantedRun) -> None:
        """The round of a run that is drained is over: it is stopped."""
        statement = (
            "UPDATE runs SET wanted='stopped' WHERE number=? AND asked=? AND wanted='draining'"
        )
        self._db.execute(statement, (run.number, run.asked))

    # What is known

    def runs(self) -> list[WantedRun]:
        """Return all runs, in the order in which they were added, with what follows from their
        canaries."""
        rows = self._db.execute(
            "SELECT number, name, plan, population, wanted, asked, failed FROM runs ORDER BY number"
        )
        found = {
            number: WantedRun(
                number,
                name,
                self._plan_path(plan),
                msgspec.json.decode(population, type=Population),
                *rest,
            )
            for number, name, plan, population, *rest in rows
        }
        for row in self.canaries.rows():
            _apply(row, found)
        return list(found.values())

    def changed(self) -> bool:
        """Return whether another process, or another ``Runs``, has changed something since the last
        call."""
        before, self._seen = self._seen, self._data_version()
        return before != self._seen

    def _data_version(self) -> int:
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])


def _apply(row: CanaryRow, runs: dict[int, WantedRun]) -> None:
    """Let the two runs of a canary be what they are to be in its step."""
    canary, old = runs.get(row.run), runs.get(row.of)
    if canary is None or old is None or row.phase == "finished":
        return
    if row.phase == "back":
        runs[row.run] = canary._replace(wanted="stopped")
        return
    splits = canaries.splits_of(row, {number: run.name for number, run in runs.items()})
    runs[row.run] = canary._replace(population=old.population, split=splits[row.run])
    wanted = old.wanted
    if row.share >= 1 and wanted in ("running", "draining"):
        wanted = "paused"  # until the canary takes its place, it can still go on
    runs[row.of] = old._replace(wanted=wanted, split=splits[row.of])


def _plain(path: Path) -> Path:
    """Return the absolute path without ``..``. Links stay as they are."""
    return Path(os.path.normpath(path.absolute()))
