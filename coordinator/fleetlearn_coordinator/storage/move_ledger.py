"""A run's ledger goes from its data directory into a database, where it is from then on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_held_out import FileHeldOutResults
from fleetlearn_coordinator.storage.file_storage import FileStorage
from fleetlearn_coordinator.storage.find_storage import find_storage, storage_elsewhere
from fleetlearn_coordinator.storage.postgres_storage import PostgresStorage
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_coordinator.storage.stored_elsewhere import (
    StoredElsewhere,
    read_stores,
    write_stores,
)

MOVED = f"{DATABASE}.moved"
"""What the database in the data directory is called once its rows are elsewhere."""


def move_ledger(folder: Path, run: str, url: str) -> str:
    """Move the ledger of a run that is not served. Returns where it is now.

    ``run``: its name in the database of this URL. All rows are there in one transaction, and then
    the data directory says so. Killed before that, the run is where it was. Raises StoreError (the
    run is served, has not begun, or is in a database already; the database has a run of this name).
    """
    storage = find_storage(folder)
    if not isinstance(storage, FileStorage):
        raise StoreError(Code.DUPLICATE, f"{folder}: the run's ledger is in a database already")
    if not storage.has_ledger():
        text = f"{folder} has no run yet: one that begins under a service file with ledger is there"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    known = read_stores(folder)
    place = StoredElsewhere(run, url) if known is None else known._replace(ledger=url)
    target = storage_elsewhere(folder, place)
    assert isinstance(target, PostgresStorage)
    with storage.lock(), target.lock():
        storage.open_ledger(power=True, any_thread=False).close()  # its tables are up to date now
        with closing(target.open_ledger(power=True, any_thread=False)) as ledger:
            if not ledger.is_new:
                raise StoreError(
                    Code.DUPLICATE,
                    f"{target.run.where} has a run already: give the plan another name; or, if "
                    "that is left of an earlier try, remove it: DROP SCHEMA "
                    f"{target.run.quoted} CASCADE",
                )
            ledger.copy_from_sqlite(folder / DATABASE)
        for version, result in FileHeldOutResults(folder).read_all().items():
            target.held_out.write(version, result)
        asked = storage.requests.roll_back()
        if asked is not None:
            target.requests.ask_for_roll_back(asked.version, asked.who)
        if storage.requests.evaluation() is not None:
            target.requests.ask_for_evaluation()
        write_stores(folder, place)
        (folder / DATABASE).rename(folder / MOVED)
    return target.run.where
