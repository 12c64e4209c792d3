"""Which store a run is in: the one place that knows the stores by name.

A store is an implementation of ``run_storage.RunStorage``. Another one is a line of STORES, or of
LEDGERS where a data directory has the run's bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_storage import FileStorage
from fleetlearn_coordinator.storage.ledger_place import (
    FILE,
    LedgerPlace,
    read_ledger_place,
    write_ledger_place,
)
from fleetlearn_coordinator.storage.run_storage import RunStorage

STORES: dict[str, Callable[[str], RunStorage]] = {}
"""Scheme of a URL -> what makes the storage from the whole URL. What is no URL is a folder."""


def _in_postgresql(folder: Path, place: LedgerPlace) -> RunStorage:
    # Imported late: who has no run in PostgreSQL need not wait for it.
    from fleetlearn_coordinator.storage.postgres_storage import PostgresStorage

    return PostgresStorage(folder, place.ledger, place.run)


LEDGERS: dict[str, Callable[[Path, LedgerPlace], RunStorage]] = {
    "postgresql": _in_postgresql,
    "postgres": _in_postgresql,
}
"""Scheme of a ledger's URL -> what makes the storage of a data directory whose ledger is there."""


def find_storage(place: str | os.PathLike[str]) -> RunStorage:
    """Return the storage at a place: a folder, which says where the run's ledger is if that is not
    there, or a URL ``SCHEME://...`` of a store in STORES. Opens no store. Raises StoreError where
    there is no such store."""
    text = os.fspath(place)
    scheme = re.match("([a-z][a-z0-9+.-]+):/+", text)  # a Path of a URL has one slash of the two
    if scheme is None:
        found = read_ledger_place(Path(text))
        return FileStorage(text) if found is None else _elsewhere(Path(text), found)
    text = f"{scheme[1]}://{text[scheme.end() :]}"
    if scheme[1] not in STORES:
        known = ", ".join(f"{name}://" for name in sorted(STORES)) or "folders alone"
        raise StoreError(
            Code.UNKNOWN_CONTENT,
            f"{text}: there is no store called {scheme[1]}; a run's data can be in: {known}",
        )
    return STORES[scheme[1]](text)


def _elsewhere(folder: Path, place: LedgerPlace) -> RunStorage:
    scheme, found, _ = place.ledger.partition("://")
    if not found or scheme not in LEDGERS:
        # The address is not shown: it may have a password.
        known = " or ".join(f"{name}://" for name in LEDGERS)
        text = f"{folder}: the address of a ledger (ledger = ...) has to begin with {known}"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    return LEDGERS[scheme](folder, place)


def storage_for(place: str | os.PathLike[str], ledger: str | None, run: str) -> RunStorage:
    """Return the storage in which a run begins or goes on. Changes nothing.

    ``ledger``: the URL of the database where a run that has not begun keeps its ledger, under the
    name ``run``, while its bytes are in the folder ``place``. None: all is in the folder. A run
    that has begun goes on where it is. Raises StoreError where that is another place than
    ``ledger``, the database has another run of this name, or the URL cannot be used;
    StoreUnavailableError where the database cannot be asked.
    """
    return _storage_for(place, ledger, run)[0]


def begin_elsewhere(place: str | os.PathLike[str], ledger: str | None, run: str) -> None:
    """Write down where a run keeps its ledger, if it has not begun. As for ``storage_for``."""
    new = _storage_for(place, ledger, run)[1]
    if new is not None:
        write_ledger_place(Path(place), new)


def _storage_for(
    place: str | os.PathLike[str], ledger: str | None, run: str
) -> tuple[RunStorage, LedgerPlace | None]:
    """Return the storage, and what its folder does not say yet."""
    storage = find_storage(place)
    if ledger is None:
        return storage, None
    folder = Path(place)
    known, new = read_ledger_place(folder), LedgerPlace(ledger, run)
    begun = _elsewhere(folder, new)  # before the URL is in any message
    if known is not None and known.ledger != ledger:
        raise StoreError(
            Code.BAD_MESSAGE,
            f"{folder}: the run's ledger is in {known.ledger} ({folder / FILE}), and the service "
            f"file says ledger = {ledger!r}. A run stays where it began: put that address into the "
            f"service file; or, if the database has moved, the new one into {folder / FILE}",
        )
    if known is not None:
        return storage, None
    if not isinstance(storage, FileStorage):
        text = f"{storage.where} is a store of its own: leave ledger out of the service file"
        raise StoreError(Code.BAD_MESSAGE, text)
    if storage.has_ledger():
        raise StoreError(
            Code.BAD_MESSAGE,
            f"{folder}: the run's ledger is in this folder, and the service file says ledger = "
            f"{ledger!r}. A run stays where it began: leave ledger out of the service file, or "
            "give the plan another data_dir",
        )
    if _is_there(begun):
        raise StoreError(
            Code.BAD_MESSAGE,
            f"{ledger} has a run called {run} already, and {folder} is not its data directory: it "
            f"has no {FILE}. Put the run's data directory back, or give the plan another name",
        )
    return begun, new


def _is_there(storage: RunStorage) -> bool:
    try:
        with storage.read_ledger():
            return True
    except StoreError:
        return False
