"""A run whose rows are in PostgreSQL, and whose bytes are in files of a folder that every
coordinator of the run can reach."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.blobs import StoredModels
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_held_out import FileHeldOutResults
from fleetlearn_coordinator.storage.file_requests import EVALUATION, ROLL_BACK
from fleetlearn_coordinator.storage.held_out import HeldOutResults
from fleetlearn_coordinator.storage.lock import LOCK
from fleetlearn_coordinator.storage.lock import is_locked as is_file_locked
from fleetlearn_coordinator.storage.lock import lock as lock_file
from fleetlearn_coordinator.storage.postgres_database import PostgresDatabase, find_run
from fleetlearn_coordinator.storage.postgres_ledger import PostgresLedger, copy_to_sqlite
from fleetlearn_coordinator.storage.postgres_lock import (
    LEASE,
    PULSE,
    PostgresLock,
    has_schema,
    is_locked,
)
from fleetlearn_coordinator.storage.postgres_requests import (
    PostgresHeldOutResults,
    PostgresRequests,
    read_requests,
)
from fleetlearn_coordinator.storage.requests import Requests
from fleetlearn_coordinator.storage.run_storage import CopiedRun
from fleetlearn_coordinator.storage.sql_reader import SqlReader

if TYPE_CHECKING:
    from fleetlearn_coordinator.storage.file_blobs import FileBlobs
    from fleetlearn_coordinator.storage.file_copy import LedgerMoment

LEAST_VERSION = 140000
"""The server's first version that ends sessions which give no sign of life."""


def _touched(path: Path) -> float:
    """Touch a file. Returns what the clock of its file system says."""
    os.utime(path)
    return _touched_at(path)


def _touched_at(path: Path) -> float:
    return path.stat().st_mtime


class PostgresStorage:
    """``RunStorage`` in a database and a folder."""

    has_folder = True

    def __init__(self, folder: Path, url: str, name: str, objects: str | None = None) -> None:
        """``name``: of the run in the database of this URL. ``objects``: URL below which the blobs
        are; None: in the folder alone. Raises StoreError where the database's URL has a password,
        or is none."""
        self.folder, self.run, self._objects = folder, find_run(url, name), objects
        self.where = str(folder)
        self.requests: Requests = PostgresRequests(self.run, lambda: self._lock)
        self.held_out: HeldOutResults = PostgresHeldOutResults(self.run)
        self._lock: PostgresLock | None = None

    # What has tensors is imported late: who reads a ledger alone need not wait for numpy.

    @property
    def models(self) -> StoredModels:
        from fleetlearn_coordinator.storage.find_blobs import models_of

        return models_of(self.folder, self._objects)

    @contextmanager
    def lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        held = PostgresLock(self.run)
        try:
            with self._files_of(held):
                self._lock = held
                yield
        finally:
            self._lock = None
            held.release()

    @contextmanager
    def _files_of(self, held: PostgresLock) -> Iterator[None]:
        """Hold the bytes, until the block is left, for the process that has the run.

        A process whose connection broke finds that out within a moment, and changes bytes until
        then. So each one locks a file of its epoch, as far as the folder's file system can, and
        touches it with each sign of life. Where the one before is still there, this waits until its
        lease is over.
        """
        path = self.folder / f"{LOCK}-{held.epoch}"
        before = self.folder / f"{LOCK}-{held.epoch - 1}"
        descriptor = lock_file(path)
        try:
            with suppress(FileNotFoundError):
                while is_file_locked(before) and _touched(path) - _touched_at(before) <= LEASE:
                    held.check()
                    time.sleep(PULSE)
                before.unlink()
            held.beaten = partial(_touched, path)
            yield
        finally:
            held.beaten = None
            os.close(descriptor)

    def is_locked(self) -> bool:
        return is_locked(self.run)

    def open_ledger(self, *, power: bool, any_thread: bool) -> PostgresLedger:
        return PostgresLedger(self._held())

    def open_blobs(self, *, power: bool, spool_files: int) -> FileBlobs:
        from fleetlearn_coordinator.storage.find_blobs import blobs_of

        check = self._held().check
        return blobs_of(
            self.folder, self._objects, power=power, spool_files=spool_files, check=check
        )

    def _held(self) -> PostgresLock:
        assert self._lock is not None, "a run is opened under its lock"
        return self._lock

    @contextmanager
    def read_ledger(self) -> Iterator[SqlReader]:
        with self._reading() as (db, version):
            yield SqlReader(db, self.run.where, version)

    @contextmanager
    def _reading(self) -> Iterator[tuple[PostgresDatabase, int]]:
        """Yield a connection that reads one moment, and the version of the tables."""
        with closing(PostgresDatabase(self.run, application="fleetlearn reader")) as db:
            # Nobody waits for a reader, who may do much between two reads.
            db.set("idle_in_transaction_session_timeout", "1h")
            db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            version = 0
            if has_schema(db):
                version = db.execute("SELECT tables FROM owner").fetchone()[0]
            if not version:
                text = f"{self.run.where} has no run yet: serve the plan first"
                raise StoreError(Code.UNKNOWN_CONTENT, text)
            yield db, version

    def check_ledger(self) -> str:
        with closing(PostgresDatabase(self.run, application="fleetlearn reader")) as db:
            version, number, may_make = db.execute(
                "SELECT current_setting('server_version'), "
                "current_setting('server_version_num')::int, "
                "has_database_privilege(current_database(), 'CREATE')"
            ).fetchone()
            is_there = has_schema(db)
        found = f"{self.run.url}: PostgreSQL {version}"
        if number < LEAST_VERSION:
            raise StoreError(Code.BAD_VERSION, f"{found}; fleetlearn needs version 14 or newer")
        if not is_there and not may_make:
            text = f"{found}: this user may not make schemas there: GRANT CREATE ON DATABASE"
            raise StoreError(Code.BAD_MESSAGE, text)
        return f"{found}, schema {self.run.schema}{'' if is_there else ' is not there yet'}"

    def copy_to(self, folder: Path) -> CopiedRun:
        from fleetlearn_coordinator.storage.file_copy import copy_run
        from fleetlearn_coordinator.storage.find_blobs import complete_copy

        complete_copy(self.folder, self._objects)
        # Before the ledger: what was carried out by its moment is in it, and asked for no more.
        asked = read_requests(self.run)
        results = self.held_out.read_all()
        copied = copy_run(self.folder, folder, self._moment, self.is_locked)
        for name, text in zip((EVALUATION, ROLL_BACK), asked, strict=True):
            if text is not None:
                (folder / name).write_text(text, "ascii")
        for version, result in results.items():
            FileHeldOutResults(folder).write(version, result)
        return copied

    @contextmanager
    def _moment(self) -> Iterator[LedgerMoment]:
        from fleetlearn_coordinator.storage.file_copy import LedgerMoment

        with self._reading() as (db, _):
            newest = db.execute("SELECT MAX(version) FROM models").fetchone()[0]
            db.set("statement_timeout", "0")  # it is as long as there are rows
            yield LedgerMoment(newest, partial(copy_to_sqlite, db))
