"""kept/SHA: a device's kept state for each bundle, as raw float32 and the CRC-32 of these bytes.

kept/SHA.personal: its personal model, where it was trained by an algorithm that has one beside the
round's (Ditto, pFedMe, APFL), and behind it what else that algorithm keeps.

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
        """Return the kept state that the last task of a bundle left: float32, shape (size,). name:
        the bundle's SHA-256.

        Returns None before the first task, and where ``size`` is 0. A damaged file is renamed to
        NAME.damaged with a warning, and None is returned. Raises StateError.
        """
        return self._load(name, size)

    def load_personal(self, bundle: str, size: int) -> Vector | None:
        """Return the personal model that the last task of a bundle left, and behind its ``size``
        elements whatever else that task's algorithm keeps: float32. As ``load`` otherwise.
        bundle: its SHA-256."""
        return self._load(personal_name(bundle), size, or_more=True)

    def _load(self, name: str, size: int, *, or_more: bool = False) -> Vector | None:
        path = self._path / name
        with os_errors_as_state_errors(path):
            if not size or not path.exists():
                return None
            found = _read(path.read_bytes(), size, or_more=or_more)
            if found is not None:
                return found
            aside = path.with_name(f"{name}.damaged")
            path.replace(aside)
            log.warning(
                "%s is damaged; it is put aside as %s, and training begins as at first", path, aside
            )
            return None

    def take(self, source: Path, name: str) -> None:
        """Move a file of ``file_contents`` to its place. name: the bundle's SHA-256, or
        ``personal_name`` of it. Raises OSError."""
        source.replace(self._path / name)
        sync_folder(self._path)


def read_kept(path: Path, size: int, *, or_more: bool = False) -> Vector | None:
    """Return what is in a file of the folder, for a process that only reads: float32, shape
    (size,), the first elements where the file may have more. None where there is no such file,
    ``size`` is 0, or it is damaged, which is said. Raises StateError."""
    with os_errors_as_state_errors(path):
        try:
            content = path.read_bytes() if size else None
        except FileNotFoundError:
            return None
    found = None if content is None else _read(content, size, or_more=or_more)
    if found is None and content is not None:
        log.warning("%s is damaged, and is passed over", path)
    return None if found is None else found[:size]


def _read(content: bytes, size: int, *, or_more: bool) -> Vector | None:
    length = len(content) - _CRC.size
    whole = length == 4 * size or (or_more and length > 4 * size and length % 4 == 0)
    if whole and _CRC.unpack(content[length:]) == (checksum(memoryview(content)[:length]),):
        return np.frombuffer(content, "<f4", length // 4)
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
