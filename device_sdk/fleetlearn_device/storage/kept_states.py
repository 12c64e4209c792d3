"""kept/SHA: a device's kept state for each bundle, as raw float32 and the CRC-32 of these bytes.

kept/SHA.personal: its personal model, where it was trained by an algorithm that has one beside the
round's (Ditto).

Personal parameters and models are the user's: nothing deletes them, not even the end of their
bundle in the cache.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import numpy as np
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.vector import Vector, checksum

from fleetlearn_device.storage.errors import os_errors_as_state_errors
from fleetlearn_device.storage.files import sync_folder

_CRC = struct.Struct("<I")

log = logging.getLogger("fleetlearn.device")


class KeptStates:
    """The folder kept/."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(exist_ok=True)

    def load(self, name: str, size: int) -> Vector | None:
        """Return what the last task of a bundle left: float32, shape (size,). name: the bundle's
        SHA-256 for its kept state, or ``personal_name`` of it.

        Returns None before the first task, and where ``size`` is 0. A damaged file is renamed to
        NAME.damaged with a warning, and None is returned. Raises StateError.
        """
        path = self._path / name
        with os_errors_as_state_errors(path):
            if not size or not path.exists():
                return None
            found = _read(path.read_bytes(), size)
            if found is not None:
                return found
            aside = path.with_name(f"{name}.damaged")
            path.replace(aside)
            log.warning(
                "%s is damaged; it is put aside as %s, and training begins as at first", path, aside
            )
            return None

    def take(self, source: Path, name: str) -> None:
        """Move a file of ``file_contents`` to its place. name: as in ``load``. Raises OSError."""
        source.replace(self._path / name)
        sync_folder(self._path)


def read_kept(path: Path, size: int) -> Vector | None:
    """Return what is in a file of the folder, for a process that only reads: float32, shape
    (size,). None where there is no such file, ``size`` is 0, or it is damaged, which is said.
    Raises StateError."""
    with os_errors_as_state_errors(path):
        try:
            content = path.read_bytes() if size else None
        except FileNotFoundError:
            return None
    found = None if content is None else _read(content, size)
    if found is None and content is not None:
        log.warning("%s is damaged, and is passed over", path)
    return found


def _read(content: bytes, size: int) -> Vector | None:
    values = memoryview(content)[: 4 * size]
    whole = len(content) == file_size(4 * size)
    if whole and _CRC.unpack(content[4 * size :]) == (checksum(values),):
        return np.frombuffer(values, "<f4")
    return None


def personal_name(bundle: str) -> str:
    """Return the name of the personal model of the bundle with this SHA-256."""
    return f"{bundle}.personal"


def file_contents(kept_state: Vector) -> tuple[Buffer, Buffer]:
    """Return what the file of a kept state holds, in order."""
    return kept_state.data.cast("B"), _CRC.pack(checksum(kept_state))


def file_size(state_bytes: int) -> int:
    """Return the size of the file of a kept state of ``state_bytes``; 0 where there is no kept
    state."""
    return state_bytes + _CRC.size if state_bytes else 0
