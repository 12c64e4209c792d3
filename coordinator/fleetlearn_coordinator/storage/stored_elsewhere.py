"""Where a run's ledger and its blobs are, where that is not its data directory: a file in the data
directory says so. So whatever is given the folder finds all of the run.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from fleetlearn_protocol.errors import Code, in_words

from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.synced_names import sync_names

FILE = "stores.toml"


class StoredElsewhere(NamedTuple):
    """What the file says."""

    run: str
    """The run's name in all of these places."""
    ledger: str | None = None
    """The URL of the database, without a password. None: the ledger is in the data directory."""
    blobs: str | None = None
    """The URL of the object store, below which the run has a folder of its name. None: the blobs
    are in the data directory alone."""


def read_stores(folder: Path) -> StoredElsewhere | None:
    """Return where the run of a data directory is. None: in the folder itself. Raises StoreError
    where the file is damaged, StoreUnavailableError where it cannot be read."""
    path = folder / FILE
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = f"{path} cannot be read: {in_words(error)}"
        raise StoreUnavailableError(Code.BUSY, why) from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    wrong = {key for key, value in raw.items() if not isinstance(value, str) or not value}
    wrong |= raw.keys() - {*StoredElsewhere._fields}
    if wrong or "run" not in raw or len(raw) < 2:
        see = f"; see {', '.join(sorted(wrong))}" if wrong else ""
        text = f"it has to have run, and ledger or blobs or both, as strings, and no more{see}"
        raise _damaged(path, text)
    return StoredElsewhere(**raw)


def _damaged(path: Path, why: str) -> StoreError:
    text = f"{path}, which says where the run is stored, cannot be used: {why}"
    return StoreError(Code.BAD_MESSAGE, text)


def write_stores(folder: Path, place: StoredElsewhere) -> None:
    """Write the file, whole or not at all, and so that it survives a loss of power. Makes the
    folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Where the rest of this run is. Written by fleetlearn-coordinator when the run began.\n",
        "# If one has moved, write its new address here. No passwords: see PGPASSFILE.\n",
        *(f"{key} = {json.dumps(value)}\n" for key, value in place._asdict().items() if value),
    ]
    draft = folder / f"{FILE}.{token_hex(8)}.draft"
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / FILE)
    sync_names(folder)


def objects_of(place: StoredElsewhere) -> str | None:
    """Return the URL below which the run's objects are. None: its blobs are in the data directory
    alone."""
    return None if place.blobs is None else f"{place.blobs.rstrip('/')}/{place.run}"
