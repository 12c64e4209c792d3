"""tied/BUNDLE.TASK: the tied vectors that a task made: what must agree with what the coordinator
counted of that task.

A file holds one set: each vector as raw float32, then the names as a JSON array, then the length of
that array and the CRC-32 of all bytes before it (each 4 bytes, little-endian). There are at most
two sets of a bundle: the one that a task goes on from, which the coordinator names, and the one
that it makes. The coordinator decides later which of the two the next task goes on from.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.stored_report import read_json
from fleetlearn_protocol.vector import Vector, checksum

from fleetlearn_device.storage.errors import os_errors_as_state_errors
from fleetlearn_device.storage.files import sync_folder

_END = struct.Struct("<II")
_DAMAGED = "damaged"

log = logging.getLogger("fleetlearn.device")


class TiedSet(NamedTuple):
    """One file, for people."""

    bundle: str
    """SHA-256 of the bundle's manifest."""
    task: str
    size: int
    """Bytes of the file."""


class TiedVectors:
    """The folder tied/."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(exist_ok=True)

    def begin(self, bundle: str, task: str | None, size: int) -> dict[str, Vector]:
        """Return the set that this task made, by name: float32, shape (size,). Delete the bundle's
        other sets.

        Returns none where ``task`` is None. Where the set is lost, or damaged (the file is then
        renamed to BUNDLE.damaged), it warns and returns none. Raises StateError.
        """
        with os_errors_as_state_errors(self._path):
            for path in self._path.glob(f"{bundle}.*"):
                if path.name not in (f"{bundle}.{task}", f"{bundle}.{_DAMAGED}"):
                    path.unlink()
            path = self._path / f"{bundle}.{task}"
            if task is None:
                return {}
            if not path.exists():
                log.warning(
                    "%s is lost, although the coordinator counts the update of its task; zeros "
                    "take its place",
                    path,
                )
                return {}
            vector = _read(path.read_bytes(), size)
            if vector is None:
                aside = path.with_name(f"{bundle}.{_DAMAGED}")
                path.replace(aside)
                log.warning(
                    "%s is damaged; it is put aside as %s, and zeros take its place", path, aside
                )
                return {}
            return vector

    def take(self, source: Path, bundle: str, task: str) -> None:
        """Move a file of ``file_contents`` to its place. Raises OSError."""
        source.replace(self._path / f"{bundle}.{task}")
        sync_folder(self._path)


def sets_in(folder: Path) -> list[TiedSet]:
    """Return the sets in the folder tied/, which may be absent. Raises OSError."""
    found = []
    for path in sorted(folder.glob("*.*")):
        bundle, _, task = path.name.partition(".")
        found.append(TiedSet(bundle, task, path.stat().st_size))
    return found


def file_contents(vectors: Mapping[str, Vector]) -> tuple[Buffer, ...]:
    """Return what the file of a set holds, in order."""
    contents: list[Buffer] = [vector.data.cast("B") for vector in vectors.values()]
    contents.append(_names(vectors))
    crc = 0
    for content in contents:
        crc = checksum(content, crc)
    return (*contents, _END.pack(len(contents[-1]), crc))


def file_size(names: Iterable[str], size: int) -> int:
    """Return the size of the file of these vectors, each of ``size`` elements; 0 where there are
    none."""
    names = tuple(names)
    return 4 * size * len(names) + len(_names(names)) + _END.size if names else 0


def _names(names: Iterable[str]) -> bytes:
    return msgspec.json.encode(tuple(names))


def _read(content: bytes, size: int) -> dict[str, Vector] | None:
    """Return the vectors of a file, or None if it is damaged, or has vectors of another size."""
    end = len(content) - _END.size
    if end < 0:
        return None
    length, crc = _END.unpack(content[end:])
    view = memoryview(content)[:end]
    if length > end or checksum(view) != crc:
        return None
    try:  # the CRC does not cover ``length``
        names = read_json(view[end - length :], tuple[str, ...])
    except msgspec.DecodeError:
        return None
    if end - length != 4 * size * len(names):
        return None
    return {
        name: np.frombuffer(view, "<f4", size, 4 * size * index) for index, name in enumerate(names)
    }
