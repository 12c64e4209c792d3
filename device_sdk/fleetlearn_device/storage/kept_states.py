"""kept/SHA: a device's kept state for each bundle, as raw float32 and the CRC-32 of these bytes.

Personal parameters are the user's: nothing deletes a kept state, not even the end of its bundle in the cache.
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

    def load(self, bundle: str, size: int) -> Vector | None:
        """Return the kept state of the last task of this bundle: float32, shape (size,).

        Returns None before the first task, and where ``size`` is 0. A damaged file is renamed to SHA.damaged with a
        warning, and None is returned. Raises StateError.
        """
        path = self._path / bundle
        with os_errors_as_state_errors(path):
            if not size or not path.exists():
                return None
            content = path.read_bytes()
            values = memoryview(content)[: 4 * size]
            if len(content) == file_size(4 * size) and _CRC.unpack(content[4 * size :]) == (checksum(values),):
                return np.frombuffer(values, "<f4")
            aside = path.with_name(f"{bundle}.damaged")
            path.replace(aside)
            log.warning("%s is damaged; it is put aside as %s, and the bundle's own values take its place", path, aside)
            return None

    def take(self, source: Path, bundle: str) -> None:
        """Move a file of ``file_contents`` to its place as the bundle's kept state. Raises OSError."""
        source.replace(self._path / bundle)
        sync_folder(self._path)


def file_contents(kept_state: Vector) -> tuple[Buffer, Buffer]:
    """Return what the file of a kept state holds, in order."""
    return kept_state.data.cast("B"), _CRC.pack(checksum(kept_state))


def file_size(state_bytes: int) -> int:
    """Return the size of the file of a kept state of ``state_bytes``; 0 where there is no kept state."""
    return state_bytes + _CRC.size if state_bytes else 0
