"""Which store a run is in: the one place that knows the stores by name.

A store is an implementation of ``run_storage.RunStorage``. Another one is a line of STORES.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.file_storage import FileStorage
from fleetlearn_coordinator.storage.run_storage import RunStorage

STORES: dict[str, Callable[[str], RunStorage]] = {}
"""Scheme of a URL -> what makes the storage from the whole URL. What is no URL is a folder."""


def find_storage(place: str | os.PathLike[str]) -> RunStorage:
    """Return the storage at a place: a folder, or a URL ``SCHEME://...`` of a store in STORES.
    Opens nothing. Raises StoreError where there is no such store."""
    text = os.fspath(place)
    scheme = re.match("([a-z][a-z0-9+.-]+):/+", text)  # a Path of a URL has one slash of the two
    if scheme is None:
        return FileStorage(text)
    text = f"{scheme[1]}://{text[scheme.end() :]}"
    if scheme[1] not in STORES:
        known = ", ".join(f"{name}://" for name in sorted(STORES)) or "folders alone"
        raise StoreError(
            Code.UNKNOWN_CONTENT,
            f"{text}: there is no store called {scheme[1]}; a run's data can be in: {known}",
        )
    return STORES[scheme[1]](text)


def is_folder(storage: RunStorage) -> bool:
    """Return whether the run is in a folder of this machine."""
    return isinstance(storage, FileStorage)
