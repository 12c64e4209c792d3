"""What models measure on held-out data, in files of a data directory:
``held_out/vNNNNNNNN.json``."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fleetlearn_coordinator.storage.stored_json import decode

HELD_OUT = "held_out"


class FileHeldOutResults:
    """``HeldOutResults`` in a data directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / HELD_OUT

    def write(self, version: int, result: dict[str, Any]) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._path(version)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        draft.write_bytes(msgspec.json.encode(result))
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()

    def read(self, version: int) -> dict[str, Any] | None:
        path = self._path(version)
        try:
            return decode(path.read_bytes(), dict[str, Any], str(path))
        except FileNotFoundError:
            return None

    def read_all(self) -> dict[int, dict[str, Any]]:
        paths = sorted(self._folder.glob("v*.json"))
        return {
            int(path.stem[1:]): decode(path.read_bytes(), dict[str, Any], str(path))
            for path in paths
        }

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version:08d}.json"
