"""Which store a run is in: the one place that knows the stores by name.

A store is an implementation of ``run_storage.RunStorage``. Another one is a line of STORES, or of
LEDGERS where a data directory has the run's bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
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
    scheme = place.ledger.partition("://")[0]
    if scheme not in LEDGERS:
        raise StoreError(
            Code.UNKNOWN_CONTENT,
            f"{folder / FILE}: there is no ledger at an address that begins with {scheme}://; "
            f"known are: {', '.join(f'{name}://' for name in LEDGERS)}",
        )
    return LEDGERS[scheme](folder, place)


def begin_elsewhere(place: str | os.PathLike[str], ledger: str | None, run: str) -> None:
    """Let a run that has not begun keep its ledger at this URL, under the name ``run``, and its
    bytes in the folder ``place``. A run that has begun goes on where it is.

    ``ledger``: None: wherever it is or would be. Raises StoreError where the run's ledger is
    somewhere else, or the URL cannot be used.
    """
    if ledger is None:
        return
    folder = Path(place)
    storage = find_storage(folder)
    known = read_ledger_place(folder)
    begun = _elsewhere(folder, LedgerPlace(ledger, run))  # before the URL is in any message
    if known is not None and known.ledger != ledger:
        raise StoreError(
            Code.BAD_MESSAGE,
            f"{folder}: the run's ledger is in {known.ledger} ({folder / FILE}), and the service "
            f"file says ledger = {ledger!r}. A run stays where it began: put that address into the "
            f"service file; or, if the database has moved, the new one into {folder / FILE}",
        )
    if known is not None:
        return
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
    with suppress(StoreError), begun.read_ledger():
        raise StoreUnavailableError(
            Code.BUSY,
            f"{ledger} has a run called {run} already, and {folder} is not its data directory: it "
            f"has no {FILE}. Put the run's data directory back, or give the plan another name",
        )
    write_ledger_place(folder, LedgerPlace(ledger, run))


def is_folder(storage: RunStorage) -> bool:
    """Return whether the run is in a folder of this machine."""
    return isinstance(storage, FileStorage)
