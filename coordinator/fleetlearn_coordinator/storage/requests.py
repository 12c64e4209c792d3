"""What people ask of a run: files in its data directory, which its coordinator looks for.

A file is the request as long as it is there. The coordinator writes the request's name into the ledger with what
answers it, and then removes the file: so a request is carried out once, whoever dies meanwhile.
"""

from __future__ import annotations

import re
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError

REQUEST = "evaluate.request"
ROLL_BACK = "roll-back.request"


class RollBack(NamedTuple):
    """Somebody asks for a roll back."""

    name: str
    """Of this request; no other has it."""
    version: int
    """Whose model is to be the newest again."""
    who: str
    """An administrator's name, or ``command``."""


def write_request(folder: Path) -> None:
    """Ask for an evaluation. A request that is there already is replaced: one evaluation answers both. Raises
    StoreError: there is no data directory."""
    _write(folder, REQUEST, token_hex(8))


def read_request(folder: Path) -> str | None:
    """Return the name of the request, or None if there is none."""
    return _read(folder, REQUEST)


def remove_request(folder: Path) -> None:
    """The request was carried out."""
    (folder / REQUEST).unlink(missing_ok=True)


def write_roll_back(folder: Path, version: int, who: str) -> None:
    """Ask for a roll back to an earlier model. A request that is there already is replaced: the last one counts. Raises
    StoreError: there is no data directory."""
    _write(folder, ROLL_BACK, encode_roll_back(RollBack(token_hex(8), version, who)))


def read_roll_back(folder: Path) -> RollBack | None:
    """Return the request, or None if there is none, or one that says nothing."""
    text = _read(folder, ROLL_BACK) or ""
    return decode_roll_back(text) if re.fullmatch("[^ ]* [0-9]+ .*", text) else None


def encode_roll_back(request: RollBack) -> str:
    """Return the request as a line of text."""
    return f"{request.name} {request.version} {request.who}"


def decode_roll_back(text: str) -> RollBack:
    """Return the request that ``encode_roll_back`` wrote."""
    name, version, who = text.split(" ", 2)
    return RollBack(name, int(version), who)


def remove_roll_back(folder: Path) -> None:
    """The request was carried out, or cannot be."""
    (folder / ROLL_BACK).unlink(missing_ok=True)


def _write(folder: Path, file: str, text: str) -> None:
    if not folder.is_dir():
        raise StoreError(Code.UNKNOWN_CONTENT, f"{folder} does not exist: serve the plan first")
    draft = folder / f"{file}.draft"
    draft.write_text(text, encoding="ascii")
    draft.replace(folder / file)


def _read(folder: Path, file: str) -> str | None:
    try:
        return (folder / file).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None
