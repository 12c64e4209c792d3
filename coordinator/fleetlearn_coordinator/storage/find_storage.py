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
from fleetlearn_coordinator.storage.run_storage import RunStorage
from fleetlearn_coordinator.storage.stored_elsewhere import (
    FILE,
    StoredElsewhere,
    objects_of,
    read_stores,
    write_stores,
)

STORES: dict[str, Callable[[str], RunStorage]] = {}
"""Scheme of a URL -> what makes the storage from the whole URL. What is no URL is a folder."""


def _in_postgresql(folder: Path, place: StoredElsewhere) -> RunStorage:
    # Imported late: who has no run in PostgreSQL need not wait for it.
    from fleetlearn_coordinator.storage.postgres_storage import PostgresStorage

    assert place.ledger is not None
    return PostgresStorage(folder, place.ledger, place.run, objects_of(place))


LEDGERS: dict[str, Callable[[Path, StoredElsewhere], RunStorage]] = {
    "postgresql": _in_postgresql,
    "postgres": _in_postgresql,
}
"""Scheme of a ledger's URL -> what makes the storage of a data directory whose ledger is there."""


def find_storage(place: str | os.PathLike[str]) -> RunStorage:
    """Return the storage at a place: a folder, which says where the run is if that is not all
    there, or a URL ``SCHEME://...`` of a store in STORES. Opens no store. Raises StoreError where
    there is no such store."""
    text = os.fspath(place)
    scheme = re.match("([a-z][a-z0-9+.-]+):/+", text)  # a Path of a URL has one slash of the two
    if scheme is None:
        found = read_stores(Path(text))
        return FileStorage(text) if found is None else storage_elsewhere(Path(text), found)
    text = f"{scheme[1]}://{text[scheme.end() :]}"
    if scheme[1] not in STORES:
        known = ", ".join(f"{name}://" for name in sorted(STORES)) or "folders alone"
        raise StoreError(
            Code.UNKNOWN_CONTENT,
            f"{text}: there is no store called {scheme[1]}; a run's data can be in: {known}",
        )
    return STORES[scheme[1]](text)


def storage_elsewhere(folder: Path, place: StoredElsewhere) -> RunStorage:
    """Return the storage of a data directory whose run is in these places. Raises StoreError where
    one of them is no store that is known."""
    if place.ledger is None:
        return FileStorage(folder, objects_of(place))
    scheme, found, _ = place.ledger.partition("://")
    if not found or scheme not in LEDGERS:
        # The address is not shown: it may have a password.
        known = " or ".join(f"{name}://" for name in LEDGERS)
        text = f"{folder}: the address of a ledger (ledger = ...) has to begin with {known}"
        text += ": change ledger in the service file, or in stores.toml of a run that has begun"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    return LEDGERS[scheme](folder, place)


def storage_for(place: str | os.PathLike[str], wanted: StoredElsewhere) -> RunStorage:
    """Return the storage in which a run begins or goes on. Changes nothing.

    ``wanted``: where a run that has not begun keeps its ledger, its blobs or both; the rest is in
    the folder ``place``. A run that has begun goes on where it is. Raises StoreError where that is
    another place, there is another run of this name, or a URL cannot be used;
    StoreUnavailableError where the database or the object store cannot be asked.
    """
    return _storage_for(place, wanted)[0]


def begin_elsewhere(place: str | os.PathLike[str], wanted: StoredElsewhere) -> None:
    """Write down where a run is, if it has not begun. As for ``storage_for``."""
    new = _storage_for(place, wanted)[1]
    if new is not None:
        write_stores(Path(place), new)


def _storage_for(
    place: str | os.PathLike[str], wanted: StoredElsewhere
) -> tuple[RunStorage, StoredElsewhere | None]:
    """Return the storage, and what its folder does not say yet."""
    storage = find_storage(place)
    urls = {key: getattr(wanted, key) for key in ("ledger", "blobs") if getattr(wanted, key)}
    if not urls:
        return storage, None
    folder = Path(place)
    known = read_stores(folder)
    begun = storage_elsewhere(folder, wanted)  # before a URL is in any message
    if known is None and not isinstance(storage, FileStorage):
        keys = " and ".join(urls)
        text = f"{storage.where} is a store of its own: leave {keys} out of the service file"
        raise StoreError(Code.BAD_MESSAGE, text)
    for key, url in urls.items():
        _check_place(folder, known, key, url)
    if known is not None:
        return storage, None
    for key, is_there in (("ledger", _has_ledger), ("blobs", _has_models)):
        if key in urls and is_there(begun):
            raise StoreError(
                Code.BAD_MESSAGE,
                f"{urls[key]} has a run called {wanted.run} already, and {folder} is not its data "
                f"directory: it has no {FILE}. Put the run's data directory back, or give the plan "
                "another name",
            )
    return begun, wanted


def _check_place(folder: Path, known: StoredElsewhere | None, key: str, url: str) -> None:
    """Raise StoreError where a run that has begun has its ``key``, ledger or blobs, elsewhere."""
    place = None if known is None else getattr(known, key)
    has_begun = known is not None or FileStorage(folder).has_ledger()
    if not has_begun or place == url:
        return
    if place is None:
        raise StoreError(
            Code.BAD_MESSAGE,
            f"{folder}: the run's {key} is in this folder, and the service file says {key} = "
            f"{url!r}. A run stays where it began: leave {key} out of the service file, or give "
            "the plan another data_dir",
        )
    raise StoreError(
        Code.BAD_MESSAGE,
        f"{folder}: the run's {key} is in {place} ({folder / FILE}), and the service file says "
        f"{key} = {url!r}. A run stays where it began: put that address into the service file; "
        f"or, if it has moved, the new one into {folder / FILE}",
    )


def _has_ledger(storage: RunStorage) -> bool:
    try:
        with storage.read_ledger():
            return True
    except StoreError:
        return False


def _has_models(storage: RunStorage) -> bool:
    return bool(storage.models.model_versions())
