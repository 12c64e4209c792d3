"""Vectors of the last task that are held in memory, so that a round writes no model to flash.

A flash card wears out by what is written to it, and a round's model is of use until its task is
trained. A process that dies fetches it again.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.vector import digest

from fleetlearn_device.session.commands import Wanted

LIMIT = 8 * 2**20
"""Most bytes of a vector that is held in memory: larger ones would take what training needs, and a
process that dies would lose too much of a download."""


class VectorsInMemory:
    """Complete vectors, and contents that are still arriving, by their names in the cache: the
    SHA-256, but for pieces of a vector."""

    def __init__(self) -> None:
        self._complete: dict[str, bytes | bytearray] = {}
        self._arriving: dict[str, bytearray] = {}

    def takes(self, wanted: Wanted) -> bool:
        """Return whether this content belongs here: a vector, or the difference that gives it."""
        whole = wanted
        if wanted.instead is not None and wanted.selection is None:
            whole = wanted.instead
        return whole.place.startswith("models/") and whole.limit <= LIMIT

    def get(self, sha256: str) -> bytes | bytearray | None:
        """Return a complete vector's bytes, or None."""
        return self._complete.get(sha256)

    def names(self) -> set[str]:
        """Return the SHA-256 of each complete vector."""
        return set(self._complete)

    def put(self, name: str, content: bytes | bytearray, sha256: str) -> bool:
        """Keep a complete vector under this name. Returns False if it has another SHA-256."""
        if digest(content) != sha256:
            return False
        self._complete[name] = content
        return True

    def append(self, name: str, offset: int, payload: Buffer) -> None:
        """Take the next bytes of a content; ``offset`` 0 begins it again."""
        content = self._arriving.setdefault(name, bytearray())
        content[offset:] = payload

    def arrived(self, name: str, sha256: str) -> bytearray | None:
        """Give out a content all of whose bytes arrived. Returns None where its SHA-256 is
        wrong."""
        content = self._arriving.pop(name, bytearray())
        return content if digest(content) == sha256 else None

    def sizes(self) -> dict[str, int]:
        """Return how many bytes of each arriving content are there."""
        return {sha256: len(content) for sha256, content in self._arriving.items()}

    def keep(self, complete: Iterable[str], arriving: Iterable[str]) -> None:
        """Forget all other vectors and contents."""
        self._complete = {name: self._complete[name] for name in complete if name in self._complete}
        self._arriving = {name: self._arriving[name] for name in arriving if name in self._arriving}
