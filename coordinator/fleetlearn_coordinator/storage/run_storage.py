"""Where one run is stored, as an interface: all that a store has to offer. find_storage.py says
which store it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from fleetlearn_coordinator.storage.blobs import Blobs, StoredModels
from fleetlearn_coordinator.storage.held_out import HeldOutResults
from fleetlearn_coordinator.storage.ledger import Ledger
from fleetlearn_coordinator.storage.ledger_reader import LedgerReader
from fleetlearn_coordinator.storage.requests import Requests


class CopiedRun(NamedTuple):
    """What a copy of a run has."""

    version: int | None
    """Of its newest model. None: there is none yet."""
    sha256: str | None
    """Of that model's parameter vector."""
    round: int | None
    """The round that was open. None: none was."""
    updates: int
    """Accepted updates that are in spool files alone."""
    given_up: bool
    """Whether a start gives up the open round: its updates came and went faster than they could be
    copied."""
    releases: int | None = None
    """How many releases a private run had made. None: the run is not private."""


class RunStorage(Protocol):
    """The place of one run. To make one changes nothing; nothing need be there yet.

    The coordinator holds the lock, and then opens the ledger and the blobs. All else is for any
    process, with or without a coordinator.
    """

    where: str
    """The place, for messages to people."""
    requests: Requests
    """What people ask of the run."""
    held_out: HeldOutResults
    """What its models measure on held-out data."""
    has_folder: bool
    """Whether its bytes are in a folder of this machine, the run's data directory."""

    @property
    def models(self) -> StoredModels:
        """The models, to be read from outside."""

    def lock(self) -> AbstractContextManager[None]:
        """Hold the run as its one coordinator until the context is left. Makes the place if it does
        not exist.

        The death of the process frees the lock too, without anybody's doing. From then on nothing
        that the dead process had under way changes anything here. Raises StoreError (busy) at once
        where another coordinator holds it, in any process or container.
        """

    def is_locked(self) -> bool:
        """Return whether a coordinator holds the run. Never keeps a coordinator from starting."""

    def open_ledger(self, *, power: bool, any_thread: bool) -> Ledger:
        """Open the ledger, under the lock, once. ``power``: each batch also survives the machine's
        loss of power. ``any_thread``: other threads than this one may use it, one at a time.

        Raises StoreError where a newer version made it, or what was written last is damaged or
        lost.
        """

    def open_blobs(self, *, power: bool, spool_files: int) -> Blobs:
        """Open the blobs, under the lock, once. ``power``: as for ``open_ledger``. ``spool_files``:
        how many may be in use before there is no room for another."""

    def read_ledger(self) -> AbstractContextManager[LedgerReader]:
        """Read the ledger at this moment, in any process. Raises StoreError (unknown-content) where
        there is none yet."""

    def check_ledger(self) -> str:
        """Return what the ledger's store is, for people, once it was reached. Empty: it is in the
        data directory. Raises StoreError, StoreUnavailableError where a run cannot be served."""

    def copy_to(self, folder: Path) -> CopiedRun:
        """Write a copy of the run at one moment, in any process, also while a coordinator writes
        it: a data directory, which ``find_storage`` opens. Makes the folder.

        Raises StoreError where there is no run, what is stored is damaged, or this store's own
        tools make its copies; OSError.
        """
