"""Where a run's ledger is, where that is not its data directory: a file in the data directory says
so. So whatever is given the folder finds all of the run.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from fleetlearn_protocol.errors import Code, in_words

from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError

FILE = "stores.toml"


class LedgerPlace(NamedTuple):
    """What the file says."""

    ledger: str
    """The URL of the database, without a password."""
    run: str
    """The run's name there."""


def read_ledger_place(folder: Path) -> LedgerPlace | None:
    """Return where the ledger of a data directory is. None: in the folder itself. Raises StoreError
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
    found = {key: raw.get(key) for key in LedgerPlace._fields}
    wrong = [key for key, value in found.items() if not isinstance(value, str) or not value]
    if wrong or raw.keys() - found.keys():
        names = ", ".join(sorted({*wrong, *(raw.keys() - found.keys())}))
        raise _damaged(
            path, f"it has to have ledger and run, two strings, and no more; see {names}"
        )
    return LedgerPlace(**found)  # type: ignore[arg-type]


def _damaged(path: Path, why: str) -> StoreError:
    text = f"{path}, which says where the run's ledger is, cannot be used: {why}"
    return StoreError(Code.BAD_MESSAGE, text)


def write_ledger_place(folder: Path, place: LedgerPlace) -> None:
    """Write the file, whole or not at all. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Where the rest of this run is. Written by fleetlearn-coordinator when the run began.\n",
        "# If the database has moved, write its new address here. No passwords: see PGPASSFILE.\n",
        *(f"{key} = {json.dumps(value)}\n" for key, value in place._asdict().items()),
    ]
    draft = folder / f"{FILE}.{token_hex(8)}.draft"
    draft.write_text("".join(lines), "utf-8")
    draft.replace(folder / FILE)
