"""A run in a folder, its data directory: rows in SQLite, bytes, requests and results in files, and
a lock."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.blobs import StoredModels
from fleetlearn_coordinator.storage.database import connect
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_held_out import HELD_OUT, FileHeldOutResults
from fleetlearn_coordinator.storage.file_requests import EVALUATION, ROLL_BACK, FileRequests
from fleetlearn_coordinator.storage.held_out import HeldOutResults
from fleetlearn_coordinator.storage.lock import LOCK, is_locked, lock
from fleetlearn_coordinator.storage.requests import Requests
from fleetlearn_coordinator.storage.run_storage import CopiedRun
from fleetlearn_coordinator.storage.sql_reader import SqlReader
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE, SqliteLedger
from fleetlearn_coordinator.storage.sqlite_reader import read_ledger
from fleetlearn_coordinator.storage.wal_check import check_wal

if TYPE_CHECKING:
    from fleetlearn_coordinator.storage.file_blobs import FileBlobs
    from fleetlearn_coordinator.storage.file_copy import LedgerMoment


class FileStorage:
    """``RunStorage`` in a data directory."""

    has_folder = True

    def __init__(self, folder: str | os.PathLike[str], objects: str | None = None) -> None:
        """``objects``: URL below which the blobs are; None: in the folder alone."""
        self.folder, self._objects = Path(folder), objects
        self.where = str(self.folder)
        self.requests: Requests = FileRequests(self.folder)
        self.held_out: HeldOutResults = FileHeldOutResults(self.folder)

    # What has tensors is imported late: who reads a ledger alone need not wait for numpy.

    @property
    def models(self) -> StoredModels:
        from fleetlearn_coordinator.storage.find_blobs import models_of

        return models_of(self.folder, self._objects)

    @contextmanager
    def lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = lock(self.folder / LOCK)
        try:
            yield
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        return is_locked(self.folder / LOCK)

    def check_ledger(self) -> str:
        return ""

    def has_ledger(self) -> bool:
        """Return whether the folder has a ledger, of any state."""
        return (self.folder / DATABASE).exists()

    def open_ledger(self, *, power: bool, any_thread: bool) -> SqliteLedger:
        # Where blobs are slow, rows are written in a thread of their own.
        any_thread = any_thread or self._objects is not None
        return SqliteLedger(self.folder / DATABASE, power=power, any_thread=any_thread)

    def open_blobs(self, *, power: bool, spool_files: int) -> FileBlobs:
        from fleetlearn_coordinator.storage.find_blobs import blobs_of

        return blobs_of(self.folder, self._objects, power=power, spool_files=spool_files)

    def read_ledger(self) -> AbstractContextManager[SqlReader]:
        return read_ledger(self.folder)

    def copy_to(self, folder: Path) -> CopiedRun:
        from fleetlearn_coordinator.storage.file_blobs import model_versions
        from fleetlearn_coordinator.storage.file_copy import copy_run
        from fleetlearn_coordinator.storage.find_blobs import complete_copy

        path = self.folder / DATABASE
        if not path.is_file():
            lost = model_versions(self.folder)
            text = f"{self.folder} is not a coordinator's data directory: it has no {DATABASE}"
            raise StoreError(Code.WRONG_HASH if lost else Code.UNKNOWN_CONTENT, text)
        check_wal(path)
        complete_copy(self.folder, self._objects)
        # Before the ledger: what was carried out by its moment is in it, and asked for no more.
        folder.mkdir(parents=True, exist_ok=True)
        for request in (EVALUATION, ROLL_BACK):
            with suppress(FileNotFoundError):
                shutil.copyfile(self.folder / request, folder / request)
        for result in (self.folder / HELD_OUT).glob("v*.json"):
            (folder / HELD_OUT).mkdir(exist_ok=True)
            shutil.copyfile(result, folder / HELD_OUT / result.name)
        return copy_run(self.folder, folder, self._moment, self.is_locked)

    @contextmanager
    def _moment(self) -> Iterator[LedgerMoment]:
        from fleetlearn_coordinator.storage.file_copy import LedgerMoment

        path = self.folder / DATABASE
        with closing(connect(path, timeout=10.0, read_only=True)) as db:
            db.execute("BEGIN")
            if not db.execute("PRAGMA user_version").fetchone()[0]:
                text = f"{self.folder} is still being made by a coordinator that starts; try again"
                raise StoreError(Code.BUSY, text)
            newest = db.execute("SELECT MAX(version) FROM models").fetchone()[0]
            yield LedgerMoment(newest, db.copy_to)
