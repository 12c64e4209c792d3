"""What a party keeps in its state directory: which rows are common, and its newest bottoms."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import msgspec
from fleetlearn_protocol.stored_report import read_json
from fleetlearn_protocol.vertical.kept_part import (
    KeptPart,
    PartKey,
    key_of,
    read_part,
    write_part,
)

from fleetlearn_device.storage.errors import os_errors_as_state_errors
from fleetlearn_device.storage.files import sync_names, write_durably

log = logging.getLogger("fleetlearn.device")

ROWS = "common_rows.json"
KEPT = 2
"""Checkpoints that are kept. No side is ever more than one checkpoint ahead of another, since each
keeps its own before it sends what the next step needs."""
_NAME = re.compile(r"bottom-(\d{10})\.part")


class KnownRows(msgspec.Struct, frozen=True):
    """Which of the party's rows are common to all parties of a run."""

    run: str
    own: str
    """SHA-256 of the hashes of the party's rows."""
    digest: str
    """SHA-256 of the common hashes."""
    membership: bytes
    """A bit for each hash."""


class PartyFolder:
    """A party's state directory. Each method raises StateError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with os_errors_as_state_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync_names(folder)

    def known_rows(self, run: str, own: str) -> KnownRows | None:
        """Return what is known for this run and these rows, or None."""
        path = self._folder / ROWS
        with os_errors_as_state_errors(path):
            try:
                found = read_json(path.read_bytes(), KnownRows)
            except FileNotFoundError:
                return None
            except msgspec.DecodeError:
                log.warning("%s is damaged: which rows are common is asked for again", path)
                return None
        return found if (found.run, found.own) == (run, own) else None

    def keep_rows(self, rows: KnownRows) -> None:
        """Write durably which rows are common."""
        path = self._folder / ROWS
        with os_errors_as_state_errors(path):
            write_durably(path, msgspec.json.encode(rows))

    def checkpoints(self, key: PartKey) -> list[int]:
        """Return after how many steps a whole bottom of this key is kept."""
        with os_errors_as_state_errors(self._folder):
            found = [self.load(key, step) for step in self._steps()]
        return [part.step for part in found if part is not None]

    def load(self, key: PartKey, step: int) -> KeptPart | None:
        """Return the bottom after this many steps, or None if it is not kept, damaged, or of
        another key."""
        path = self._path(step)
        with os_errors_as_state_errors(path):
            try:
                part = read_part(path.read_bytes(), key)
            except FileNotFoundError:
                return None
        return part if part is not None and part.step == step else None

    def keep(self, key: PartKey, part: KeptPart) -> None:
        """Write a bottom durably, and remove those that are not needed any more."""
        path = self._path(part.step)
        with os_errors_as_state_errors(path):
            write_durably(path, write_part(key, part))
            # Files of later steps are of an attempt that was given up.
            before = [step for step in self._steps() if step <= part.step]
            for step in {*self._steps()} - {*before[-KEPT:]}:
                self._path(step).unlink(missing_ok=True)

    def newest(self, bundle: str) -> KeptPart | None:
        """Return the newest whole bottom of a bundle, whatever its run, or None."""
        for step in reversed(self._steps()):
            with os_errors_as_state_errors(self._path(step)):
                content = self._path(step).read_bytes()
            key = key_of(content)
            if key is not None and key.bundle == bundle:
                part = read_part(content, key)
                if part is not None:
                    return part
        return None

    def _steps(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def _path(self, step: int) -> Path:
        return self._folder / f"bottom-{step:010d}.part"
