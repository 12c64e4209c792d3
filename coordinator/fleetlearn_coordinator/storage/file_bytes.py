"""Bytes that lie one after the other in a file, which stays open."""

from __future__ import annotations

import os
import weakref


class FileBytes:
    """``StoredBytes`` in a file. A file that replaces this one on the disk, or its removal, changes
    nothing here."""

    def __init__(
        self, path: str | os.PathLike[str], begin: int = 0, size: int | None = None
    ) -> None:
        """``begin``: the byte of the file at which the bytes begin. ``size``: how many they are;
        None: up to the file's end. Raises OSError."""
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._begin = begin
        self.size = os.fstat(self._file).st_size - begin if size is None else size

    def narrow(self, begin: int, size: int) -> FileBytes:
        """Let these bytes be all there are: from now on, 0 is the byte that was ``begin``. Returns
        self."""
        self._begin += begin
        self.size = size
        return self

    def read(self, begin: int, size: int) -> bytes:
        return os.pread(self._file, min(size, self.size - begin), self._begin + begin)
