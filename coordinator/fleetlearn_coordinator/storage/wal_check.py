"""Looks for damage in SQLite's write-ahead log, before SQLite opens it.

SQLite takes a damaged frame for one that was being written when the process died: it goes back to
the state before, in silence, and what was committed later is gone. Two things tell damage from
that. The index beside the log (-shm), which a killed process leaves, says how many frames were
committed. And after a frame that was being written there is none of a later transaction. The
formats: https://www.sqlite.org/fileformat2.html#walformat and
https://www.sqlite.org/walformat.html.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError

_HEADER = struct.Struct(">8I")
"""Magic number, version, page size, checkpoint, two salts, two sums."""
_FRAME = struct.Struct(">6I")
"""Page, pages of the database if a transaction ends here, two salts, two sums."""
_MAGIC = 0x377F0682
"""Its last bit says that sums are over big-endian words."""
_INDEX = struct.Struct("=I4xI2BH2I4I2I")
"""Of the index: version, changes, whether it is made, the sums' byte order, page size, frames,
pages, two sums, two salts, and two sums of this itself."""
_BACKFILLED = struct.Struct("=I")
"""How many frames are in the database already. After the index's two equal headers."""


class _Log(NamedTuple):
    salts: tuple[int, int]
    committed: int
    """Frames up to the end of the last transaction before a damaged frame."""
    later: bool
    """Whether there are frames of a later transaction than the damaged one."""


def check_wal(database: Path) -> None:
    """Raise StoreError where transactions are lost that were committed. Other processes may have
    the database open, this one must not: POSIX takes a process's locks on a file away when it
    closes any descriptor of it."""
    # Another process may write while this one reads: what is found damaged twice is damaged.
    if _is_lost(database) and _is_lost(database):
        path = database.with_name(f"{database.name}-wal")
        raise StoreError(
            Code.WRONG_HASH,
            f"{path} is damaged or lost: SQLite would go on without what was written last. Put it "
            f"back from a backup, together with {database.name}. Or remove {path.name} and "
            f"{database.name}-shm, to go on from what {database.name} has without them.",
        )


def _is_lost(database: Path) -> bool:
    path, index = (
        database.with_name(f"{database.name}-wal"),
        _read_index(database.with_name(f"{database.name}-shm")),
    )
    log = _read_log(path)
    if log is None:
        return (path.exists() and path.stat().st_size > _HEADER.size) or (
            index is not None and index[1] > index[2]
        )
    return log.later or (index is not None and index[0] == log.salts and index[1] > log.committed)


def _read_index(path: Path) -> tuple[tuple[int, int], int, int] | None:
    """Return the salts, the number of committed frames, and how many of them are in the database.
    None: there is no index, or it is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    size = _INDEX.size
    if len(content) < 2 * size + _BACKFILLED.size or content[:size] != content[size : 2 * size]:
        return None
    _, _, made, _, _, frames, _, _, _, first, second, *sums = _INDEX.unpack(content[:size])
    if not made or tuple(sums) != _sum(content[: size - 8], "=", (0, 0)):
        return None
    salts = struct.unpack(">2I", struct.pack("=2I", first, second))  # kept as they are in the log
    return (salts[0], salts[1]), frames, _BACKFILLED.unpack_from(content, 2 * size)[0]


def _read_log(path: Path) -> _Log | None:
    """None: there is no log, it is empty, or its header is not whole."""
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return None
    if len(content) < _HEADER.size:
        return None
    magic, _, page, _, first, second, *sums = _HEADER.unpack_from(content)
    order = ">" if magic & 1 else "<"
    if magic & ~1 != _MAGIC or tuple(sums) != (
        total := _sum(content[: _HEADER.size - 8], order, (0, 0))
    ):
        return None
    salts, committed, damaged, ended = (first, second), 0, False, False
    for number, (head, frame) in enumerate(_frames(content[_HEADER.size :], page), start=1):
        _, pages, *found = _FRAME.unpack(head)
        # left from before the log began again, unless a salt is damaged
        if tuple(found[:2]) != salts:
            if damaged:
                continue
            damaged, ended = True, False
            continue
        if ended:
            return _Log(salts, committed, later=True)
        if not damaged:
            total = _sum(frame, order, _sum(head[:8], order, total))
            damaged = tuple(found[2:]) != total
        if damaged:
            ended = ended or bool(pages)
        elif pages:
            committed = number
    return _Log(salts, committed, later=False)


def _frames(content: memoryview, page: int) -> Iterator[tuple[memoryview, memoryview]]:
    size = _FRAME.size + page
    for begin in range(0, len(content) - size + 1, size):
        yield content[begin : begin + _FRAME.size], content[begin + _FRAME.size : begin + size]


def _sum(content: memoryview | bytes, order: str, total: tuple[int, int]) -> tuple[int, int]:
    """SQLite's sums over 32-bit words in pairs, going on from ``total``."""
    first, second = total
    words = iter(struct.unpack(f"{order}{len(content) // 4}I", content))
    for one, other in zip(words, words, strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
