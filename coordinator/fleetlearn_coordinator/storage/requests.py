"""A request for an evaluation: a file in the data directory, which the run's coordinator looks for.

The file is the request as long as it is there. The coordinator writes the request's name with the evaluation that
answers it, and then removes the file: so a request is carried out once, whoever dies meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError

REQUEST = "evaluate.request"


def write_request(folder: Path) -> None:
    """Ask for an evaluation. A request that is there already is replaced: one evaluation answers both. Raises
    StoreError: there is no data directory."""
    if not folder.is_dir():
        raise StoreError(Code.UNKNOWN_CONTENT, f"{folder} does not exist: serve the plan first")
    draft = folder / f"{REQUEST}.draft"
    draft.write_text(token_hex(8), encoding="ascii")
    draft.replace(folder / REQUEST)


def read_request(folder: Path) -> str | None:
    """Return the name of the request, or None if there is none."""
    try:
        return (folder / REQUEST).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None


def remove_request(folder: Path) -> None:
    """The request was carried out."""
    (folder / REQUEST).unlink(missing_ok=True)
