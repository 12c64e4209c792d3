"""checkpoint: a training that goes on, as far as it had come when the file was written.

The file holds the format's name, each vector as raw float32, a header in MessagePack, the header's
length, and the CRC-32 of all bytes before it (the last two have 4 bytes each, little-endian). There
is at most one checkpoint: of the task that is, or was last, in training.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.vector import Vector, checksum

from fleetlearn_device.storage.errors import os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably

CHECKPOINT = "checkpoint"
"""Name of the file in the state directory."""
FORMAT = b"fleetck1"
"""The first bytes of the file. Another format has another name; none begins with another's."""
_END = struct.Struct("<II")

log = logging.getLogger("fleetlearn.device")


class _Header(msgspec.Struct, frozen=True, array_like=True):
    task: str
    content: msgspec.Raw
    sizes: dict[str, int]
    """Vector -> its elements, in the order of the file."""


class StoredCheckpoint(NamedTuple):
    """What was saved of a training."""

    content: bytes
    """MessagePack, which only training can read."""
    vectors: Mapping[str, Vector]
    """By name: float32, one axis. Read-only."""


class TrainingCheckpoint:
    """The file ``path``. Each method raises StateError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, task: str) -> StoredCheckpoint | None:
        """Return what was saved of this task's training, or None if nothing was.

        task: identifies the task and all that decides its training. The checkpoint of another task
        is deleted, and so is a damaged one, with a warning: training then begins again.
        """
        with os_errors_as_state_errors(self._path):
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                return None
            found = _read(content)
            if found is None:
                log.warning(
                    "%s is damaged, or of another version; it is deleted, and the training that it "
                    "was of begins again",
                    self._path,
                )
            elif found[0] == task:
                return found[1]
            self._path.unlink()
            return None

    def save(self, task: str, content: bytes, vectors: Mapping[str, Vector]) -> int:
        """Replace the file durably. Returns its bytes."""
        sizes = {name: vector.size for name, vector in vectors.items()}
        header = msgspec.msgpack.encode(_Header(task, msgspec.Raw(content), sizes))
        pieces: list[Buffer] = [FORMAT]
        pieces += [np.ascontiguousarray(vector).data.cast("B") for vector in vectors.values()]
        pieces.append(header)
        crc = 0
        for piece in pieces:
            crc = checksum(piece, crc)
        pieces.append(_END.pack(len(header), crc))
        with os_errors_as_state_errors(self._path):
            write_durably(self._path, *pieces)
        return sum(memoryview(piece).nbytes for piece in pieces)

    def clear(self) -> None:
        """Forget what was saved, and what a process left that died while it saved."""
        with os_errors_as_state_errors(self._path):
            self._path.unlink(missing_ok=True)
            self._path.with_name(f"{self._path.name}.tmp").unlink(missing_ok=True)


def _read(content: bytes) -> tuple[str, StoredCheckpoint] | None:
    """Return the task and what was saved of it, or None where the file is damaged."""
    end = len(content) - _END.size
    if end < len(FORMAT) or not content.startswith(FORMAT):
        return None
    length, crc = _END.unpack(content[end:])
    view = memoryview(content)[:end]
    if length > end - len(FORMAT) or checksum(view) != crc:
        return None
    try:  # the CRC does not cover ``length``
        header = msgspec.msgpack.decode(view[end - length :], type=_Header)
    except msgspec.DecodeError:
        return None
    vectors, place = {}, len(FORMAT)
    if any(size < 0 for size in header.sizes.values()):
        return None
    if place + 4 * sum(header.sizes.values()) != end - length:
        return None
    for name, size in header.sizes.items():
        vectors[name] = np.frombuffer(view, "<f4", size, place)
        place += 4 * size
    return header.task, StoredCheckpoint(bytes(header.content), vectors)
