"""Begun uploads: the bytes of an update that are here, of an upload that is not complete.

They outlive their connection, and the coordinator too: beside the spool file with the bytes lies a
*checkpoint*, which says what they are. It is written when a connection breaks, and as bytes come.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import msgspec
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import Part
from fleetlearn_protocol.vector import checksum
from msgspec import Struct


class BegunUpload(Struct, frozen=True):
    """How far an upload came, and what is known of its bytes: enough to go on with it on another
    connection, in another process."""

    device: str
    task: str
    parts: tuple[Part, ...]
    """Of the report that announced it. Only a report of the same parts, whose CRC-32 are among
    them, goes on with these bytes."""
    spool_file: int
    """The number of the spool file that has the bytes."""
    offset: int
    """Bytes that are here."""
    crc32: dict[str, int]
    """Name of each part that has begun to arrive -> CRC-32 of its bytes so far."""
    largest: dict[str, float]
    """Name of each part that has begun to arrive -> the greatest magnitude so far."""


class Announced(Struct, frozen=True):
    """What a run says of an announced update."""

    wanted: bool
    """False: its report has counted already."""
    begun: BegunUpload | None = None
    """What is here of the same bytes: the upload goes on there. Its spool file belongs to whoever
    is told this."""


def encode_begun(begun: BegunUpload) -> bytes:
    """Return a checkpoint's bytes: the CRC-32 of what follows, as four bytes, and JSON."""
    content = msgspec.json.encode(begun)
    return checksum(content).to_bytes(4, "little") + content


def decode_begun(content: bytes) -> BegunUpload | None:
    """Return what a checkpoint says. None: it is damaged, or another version wrote it."""
    if checksum(content[4:]) != int.from_bytes(content[:4], "little"):
        return None
    try:
        return msgspec.json.decode(content[4:], type=BegunUpload)
    except msgspec.MsgspecError:
        return None


def are_here(begun: BegunUpload, read: Callable[[int, int, int], Iterable[memoryview]]) -> bool:
    """Return whether the spool file has the bytes that the checkpoint is of. The checksums at an
    upload's end are of what arrived: they would not notice what a loss of power took. ``read``:
    yields bytes of a spool file, from its number, how many, and from which on."""
    begin = 0
    try:
        for part in begun.parts:
            size = min(part.size, begun.offset - begin)
            if size <= 0:
                break
            found = 0
            for block in read(begun.spool_file, size, begin):
                found = checksum(block, found)
            if found != begun.crc32.get(part.name):
                return False
            begin += size
    except (FleetError, OSError):
        return False
    return begin == begun.offset


class BegunUploads:
    """The begun uploads of one run whose devices are away: at most ``limit``. Beyond that, the one
    with the fewest bytes is dropped, and its upload begins again."""

    def __init__(self, limit: int, free: Callable[[int], None]) -> None:
        """``free``: called with the number of each spool file whose bytes are not needed."""
        self._limit, self._free = limit, free
        self._kept: dict[str, BegunUpload] = {}
        """Task -> its upload."""

    @property
    def bytes_kept(self) -> int:
        """How many bytes of updates are here."""
        return sum(each.offset for each in self._kept.values())

    def keep(self, begun: BegunUpload) -> None:
        """Keep this until its task is announced again. Its spool file is not the caller's any
        more."""
        self._drop(begun.task)
        self._kept[begun.task] = begun
        if len(self._kept) > self._limit:
            self._drop(min(self._kept.values(), key=lambda each: each.offset).task)

    def take(self, task: str, parts: tuple[Part, ...]) -> BegunUpload | None:
        """Return what is here of an update with these parts, if something is. It is the caller's
        then. What is here of other parts is dropped."""
        begun = self._kept.get(task)
        if begun is None:
            return None
        if begun.parts != parts:
            self._drop(task)
            return None
        return self._kept.pop(task)

    def release(self, spool_file: int) -> bool:
        """Keep what is in this spool file no longer: it is another's, and its bytes go on coming.
        Returns whether it was kept."""
        found = [task for task, each in self._kept.items() if each.spool_file == spool_file]
        for task in found:
            del self._kept[task]
        return bool(found)

    def forget(self, unless: Container[str]) -> None:
        """Drop what is here of tasks, except those named by ``unless``."""
        for task in [task for task in self._kept if task not in unless]:
            self._drop(task)

    def _drop(self, task: str) -> None:
        begun = self._kept.pop(task, None)
        if begun is not None:
            self._free(begun.spool_file)
