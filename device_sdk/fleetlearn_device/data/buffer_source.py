"""Reads a live buffer: a copy of the records that are whole, while another process may append."""

from __future__ import annotations

import time as clock
import zlib
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.data.buffer_format import (
    HEADER_BYTES,
    RECORD_HEADER_BYTES,
    BufferLayout,
    read_count,
    read_header,
    slot_of,
)
from fleetlearn_device.data.raw import Choices, RawRows, RawSource
from fleetlearn_device.runtimes.checks import DataError

TRIES = 3
"""How often a record is read that another process may be writing just then."""


def open_buffer(path: Path, choices: Choices) -> RawSource:
    """A live buffer, by its arrays and ``time`` (seconds since 1970, float64). Options: max_age
    (seconds; older records are left out)."""
    max_age = choices.whole("max_age")

    def version() -> Any:
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
        except FileNotFoundError:
            return None
        if len(header) < HEADER_BYTES:
            return None
        # Records grow too old without being written.
        return read_count(header), None if max_age is None else clock.monotonic()

    return RawSource(str(path), lambda: read_buffer(path, max_age), version)


def read_buffer(path: Path, max_age: float | None = None) -> RawRows:
    """Return the records of a buffer, oldest first; ``ids`` are their numbers. A record that is not
    whole is left out.

    Raises DataError: no buffer, no record that is new enough.
    """
    try:
        with path.open("rb", buffering=0) as file:
            layout = open_layout(file, path)
            records = _whole_records(file, layout)
    except FileNotFoundError:
        raise EmptyBufferError(f"{path}, a live buffer, does not exist yet") from None
    records = records[np.argsort(records["sequence"])]
    if max_age is not None:
        records = records[records["time"] >= clock.time() - max_age]
    if not len(records):
        raise EmptyBufferError(f"{path} holds no record" + (" that is new enough" * bool(max_age)))
    arrays = {row.name: records[f"a.{row.name}"] for row in layout.arrays}
    arrays.setdefault("time", records["time"])
    numbers = records["sequence"]
    return RawRows(
        arrays, lambda row: f"record {numbers[row]}", ids=numbers.astype(np.uint64), of_text=True
    )


class EmptyBufferError(DataError):
    """The buffer has no record to train on now; there may be some later."""


def open_layout(file: RawIOBase, path: Path) -> BufferLayout:
    """Return an open file's layout. Raises DataError."""
    return read_header(_header(file), path)


def _header(file: RawIOBase) -> bytes:
    file.seek(0)
    return file.read(HEADER_BYTES) or b""


def count_all(file: RawIOBase, layout: BufferLayout) -> int:
    """Return how many records were ever appended. The last record may be one ahead of the number
    in the header."""
    counted = read_count(_header(file))
    numbers = _whole_records(file, layout)["sequence"]
    return max(counted, int(numbers.max()) if len(numbers) else 0)


def _whole_records(file: RawIOBase, layout: BufferLayout) -> NDArray[Any]:
    """Return a copy of the records whose checksums are right, in the order of their places."""
    content = bytearray(layout.capacity * layout.record_bytes)
    view, done = memoryview(content), 0
    file.seek(HEADER_BYTES)
    while read := file.readinto(view[done:]):  # of a file that was cut, the rest is empty
        done += read
    records = np.frombuffer(content, layout.dtype)
    whole = [
        slot
        for slot in np.flatnonzero(records["sequence"]).tolist()
        if _is_whole(view, slot, layout) or _read_again(file, view, slot, layout)
    ]
    return records[whole]


def _is_whole(view: memoryview, slot: int, layout: BufferLayout) -> bool:
    record = view[slot * layout.record_bytes : (slot + 1) * layout.record_bytes]
    end = RECORD_HEADER_BYTES + sum(array.bytes for array in layout.arrays)
    crc = zlib.crc32(record[RECORD_HEADER_BYTES:end], zlib.crc32(record[:16]))
    sequence = int.from_bytes(record[:8], "little")
    # One record more has one place: a whole record elsewhere was copied there by nobody's writer.
    return crc == int.from_bytes(record[16:20], "little") and (
        sequence > 0 and slot_of(sequence, layout) == slot
    )


def _read_again(file: RawIOBase, view: memoryview, slot: int, layout: BufferLayout) -> bool:
    """Read a record again that was not whole: its writer may have finished it by now."""
    start, end = slot * layout.record_bytes, (slot + 1) * layout.record_bytes
    for _ in range(TRIES):
        file.seek(HEADER_BYTES + start)
        file.readinto(view[start:end])
        if _is_whole(view, slot, layout):
            return True
    return False
