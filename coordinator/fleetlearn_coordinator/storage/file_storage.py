"""A run in a folder, its data directory: rows in SQLite, bytes, requests and results in files, and
a lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fleetlearn_coordinator.storage.blobs import StoredModels
from fleetlearn_coordinator.storage.file_held_out import FileHeldOutResults
from fleetlearn_coordinator.storage.file_requests import FileRequests
from fleetlearn_coordinator.storage.held_out import HeldOutResults
from fleetlearn_coordinator.storage.lock import LOCK, is_locked, lock
from fleetlearn_coordinator.storage.requests import Requests
from fleetlearn_coordinator.storage.run_storage import CopiedRun
from fleetlearn_coordinator.storage.sql_reader import SqlReader
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE, SqliteLedger
from fleetlearn_coordinator.storage.sqlite_reader import read_ledger

if TYPE_CHECKING:
    from fleetlearn_coordinator.storage.file_blobs import FileBlobs


class FileStorage:
    """``RunStorage`` in a data directory."""

    has_folder = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.where = str(self.folder)
        self.requests: Requests = FileRequests(self.folder)
        self.held_out: HeldOutResults = FileHeldOutResults(self.folder)

    # What has tensors is imported late: who reads a ledger alone need not wait for numpy.

    @property
    def models(self) -> StoredModels:
        from fleetlearn_coordinator.storage.file_blobs import FileModels

        return FileModels(self.folder)

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
        return SqliteLedger(self.folder / DATABASE, power=power, any_thread=any_thread)

    def open_blobs(self, *, power: bool, spool_files: int) -> FileBlobs:
        from fleetlearn_coordinator.storage.file_blobs import FileBlobs

        return FileBlobs(self.folder, power=power, spool_files=spool_files)

    def read_ledger(self) -> AbstractContextManager[SqlReader]:
        return read_ledger(self.folder)

    def copy_to(self, folder: Path) -> CopiedRun:
        from fleetlearn_coordinator.storage.file_copy import copy_run

        return copy_run(self.folder, folder)
