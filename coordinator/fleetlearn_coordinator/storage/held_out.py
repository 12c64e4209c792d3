"""What models measure on held-out data: a file for each version below ``held_out/``, which is written once."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fleetlearn_coordinator.storage.sqlite_json import decode

HELD_OUT = "held_out"


def write_result(folder: Path, version: int, result: dict[str, Any]) -> None:
    """Write a version's result, whole or not at all. A result that is there already stays."""
    (folder / HELD_OUT).mkdir(exist_ok=True)
    path = _path(folder, version)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_bytes(msgspec.json.encode(result))
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()


def read_result(folder: Path, version: int) -> dict[str, Any] | None:
    """Return a version's result (examples, metrics), or None. Raises StoreError (damaged)."""
    path = _path(folder, version)
    try:
        return decode(path.read_bytes(), dict[str, Any], str(path))
    except FileNotFoundError:
        return None


def read_results(folder: Path) -> dict[int, dict[str, Any]]:
    """Return version -> result (examples, metrics), in order. Raises StoreError (damaged)."""
    paths = sorted((folder / HELD_OUT).glob("v*.json"))
    return {int(path.stem[1:]): decode(path.read_bytes(), dict[str, Any], str(path)) for path in paths}


def _path(folder: Path, version: int) -> Path:
    return folder / HELD_OUT / f"v{version:08d}.json"
