"""Appends records to a live buffer while devices train on it."""

from __future__ import annotations

import os
import sys
import time as clock
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from fleetlearn_protocol.paths import in_home

from fleetlearn_device.data.buffer_format import (
    COUNT_PLACES,
    HEADER_BYTES,
    RECORD_HEADER,
    BufferLayout,
    Policy,
    make_layout,
    pack_count,
    record_crc,
    slot_of,
    write_header,
)
from fleetlearn_device.data.buffer_source import count_all, open_layout
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.storage.files import allocate, sync_folder

if sys.platform == "win32":  # pragma: no cover
    import msvcrt
else:
    import fcntl


class BufferWriter:
    """A live buffer that this process appends to. One process at a time may; any number may read.

    Args:
        path: The file. It is made, with all the room that it will take, if it does not exist.
        arrays: Name -> (dtype, shape) of the arrays of one record: one example, or one sample of a
            stream.
        capacity: Most records that are kept.
        policy: Which are kept: the ``newest``, or a ``reservoir``: a uniform sample of all that
            were ever appended.
        durable: Whether a record is safe from a power cut when ``append`` returns. Otherwise a
            killed process loses nothing, and a power cut the last seconds.
        seed: Decides what the reservoir keeps. None: random, when the file is made.

    Raises DataError where the file is another buffer, or another process writes it; OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        arrays: Mapping[str, tuple[Any, Sequence[int]]],
        capacity: int,
        *,
        policy: Policy = "newest",
        durable: bool = False,
        seed: int | None = None,
    ) -> None:
        path = in_home(path)
        random = int.from_bytes(os.urandom(8), "little")
        wanted = make_layout(arrays, capacity, policy, durable, random if seed is None else seed)
        if not path.exists():
            _make(path, wanted)
        self.path = path
        self._file = path.open("r+b", buffering=0)
        try:
            self.layout = open_layout(self._file, path)
            _lock(self._file, path)
            if self.layout._replace(seed=0) != wanted._replace(seed=0):
                raise DataError(
                    f"{path} is a buffer of {_described(self.layout)}; expected "
                    f"{_described(wanted)}. Move the file away to begin with another"
                )
            self.count = count_all(self._file, self.layout)
            """Records that were ever appended."""
        except BaseException:
            self._file.close()
            raise

    def append(self, *, time: float | None = None, **arrays: Any) -> int:
        """Append a record and return its number, from 1 on.

        time: Seconds since 1970; now unless given. arrays: each of the buffer's arrays by name; a
        value is converted where numpy casts it under the rule ``same_kind``. Raises DataError,
        OSError.
        """
        payload = self._payload(arrays)
        sequence = self.count + 1
        slot = slot_of(sequence, self.layout)
        if slot is not None:
            self._write(slot, sequence, clock.time() if time is None else time, payload)
        # The record first: a count without its record would be one that nobody can read.
        self._put(COUNT_PLACES[sequence % 2], pack_count(sequence))
        if self.layout.durable:
            getattr(os, "fdatasync", os.fsync)(self._file.fileno())
        self.count = sequence
        return sequence

    def _payload(self, arrays: Mapping[str, Any]) -> bytes:
        if set(arrays) != {row.name for row in self.layout.arrays}:
            expected = sorted(row.name for row in self.layout.arrays)
            raise DataError(f"arrays {sorted(arrays)} were given; expected {expected}")
        parts = []
        for row in self.layout.arrays:
            array = np.asarray(arrays[row.name])
            if array.shape != row.shape or not np.can_cast(array.dtype, row.dtype, "same_kind"):
                raise DataError(
                    f"array {row.name} has dtype {array.dtype} and shape {array.shape}; expected "
                    f"{np.dtype(row.dtype)} and {row.shape}"
                )
            parts.append(np.ascontiguousarray(array, row.dtype).tobytes())
        return b"".join(parts)

    def _write(self, slot: int, sequence: int, time: float, payload: bytes) -> None:
        place = HEADER_BYTES + slot * self.layout.record_bytes
        record = (
            RECORD_HEADER.pack(sequence, time, record_crc(sequence, time, payload), 0) + payload
        )
        # While the number is 0 the place is empty for readers; it comes last.
        self._put(place, bytes(8))
        self._put(place + 8, record[8:])
        self._put(place, record[:8])

    def _put(self, place: int, content: bytes) -> None:
        self._file.seek(place)
        while content:
            content = content[self._file.write(content) :]

    def close(self) -> None:
        """Let another process write."""
        self._file.close()

    def __enter__(self) -> BufferWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _make(path: Path, layout: BufferLayout) -> None:
    """Make the file: it appears whole, with its room on the disk, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        allocate(aside, layout.file_bytes)
        with aside.open("r+b") as file:
            file.write(write_header(layout))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def _lock(file: FileIO, path: Path) -> None:
    try:
        if sys.platform == "win32":  # pragma: no cover
            file.seek(2**40)  # behind the end: a lock there stops no reader
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DataError(f"{path}: another process appends to this buffer; only one may") from None


def _described(layout: BufferLayout) -> str:
    arrays = ", ".join(f"{row.name} {np.dtype(row.dtype)} {row.shape}" for row in layout.arrays)
    durable = ", durable" if layout.durable else ""
    return f"{layout.capacity} records ({layout.policy}{durable}) of {arrays}"
