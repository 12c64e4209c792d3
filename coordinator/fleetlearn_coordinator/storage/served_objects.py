"""What devices may fetch of a run, as objects of its object store: ``served/SHA256``.

Gateways on other machines read them, and devices to which the coordinator gives a signed URL. An
object's bytes have the SHA-256 that its name says, whoever wrote it and when: a coordinator that
takes the run over uses what it finds, and a late write of one that has lost the run replaces bytes
by the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256 as new_sha256
from itertools import chain, islice
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.frames import Buffer

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.object_store import Objects

SERVED = "served"
"""The folder of these objects, below the run's."""
AT_ONCE = 2**20
"""Bytes of a content that are hashed and handed on at a time."""

ONE_REQUEST = 2**22
"""Bytes of a content, in parts of AT_ONCE, that are written by one request; more take several."""

Content: TypeAlias = Path | Buffer | Iterable[Buffer]
"""A content's bytes: a file, all of them, or in parts. They are read only if there is no such
object."""


class ObjectBytes:
    """``StoredBytes`` of an object, read from the store by ranges."""

    def __init__(self, objects: Objects, key: str, size: int) -> None:
        self._objects, self._key, self.size = objects, key, size

    def read(self, begin: int, size: int) -> bytes:
        """As ``StoredBytes.read``. Raises OSError also where the object was removed meanwhile."""
        if begin >= self.size or not size:
            return b""
        try:
            return self._objects.read_range(self._key, begin, size)
        except StoreError as error:
            raise OSError(error.text) from None


class ServedObjects:
    """The objects of one run that devices may fetch. ``publish`` and ``add`` are called by the
    coordinator that holds the run's lock, in one thread at a time, and wait for the store. The
    others may be called in any thread, and in other processes."""

    def __init__(self, objects: Objects, check: Callable[[], object] = lambda: None) -> None:
        """``objects``: the run's. ``check``: called before something is written or removed; raises
        where another coordinator has the run."""
        self._objects, self._check = objects, check

    def publish(self, contents: Mapping[str, Content]) -> None:
        """Have these contents, by SHA-256, and then no others: name all that a task may still
        need. Raises StoreError (wrong-hash: a content has other bytes, and there is no such object
        then), StoreUnavailableError, OSError."""
        there = {*self._objects.keys(SERVED)}
        for sha256, content in contents.items():
            if sha256 not in there:
                self.add(sha256, content)
        self._check()
        self._objects.remove(_key(each) for each in sorted(there - contents.keys()))

    def add(self, sha256: str, content: Content) -> None:
        """Have this content too, until others are published. Raises as ``publish``."""
        self._check()
        parts = _checked(sha256, _parts(content))
        first = list(islice(parts, ONE_REQUEST // AT_ONCE + 1))
        small = len(first) <= ONE_REQUEST // AT_ONCE
        self._objects.put(_key(sha256), b"".join(first) if small else chain(first, parts))

    def open(self, sha256: str) -> ObjectBytes | None:
        """Return a content's bytes, to be read by ranges; None: there is no such object. Raises
        StoreUnavailableError."""
        size = self._objects.size(_key(sha256))
        return None if size is None else ObjectBytes(self._objects, _key(sha256), size)

    def fetch(self, sha256: str, path: Path) -> None:
        """Write a content to a file, which is made, or replaced once all of it is here. Raises
        StoreError (unknown-content: there is no such object; wrong-hash: somebody changed it, and
        there is no such file then), StoreUnavailableError, OSError."""
        fetched = path.with_name(f"{path.name}.{token_hex(8)}.fetched")  # others may fetch it, too
        self._objects.fetch(_key(sha256), fetched)
        try:
            for _ in _checked(sha256, _parts(fetched)):
                pass
        except StoreError:
            fetched.unlink()
            raise
        fetched.replace(path)

    def url(self, sha256: str, seconds: float) -> str:
        """Return a URL by which whoever has it can GET a content for ``seconds`` from now on, with
        ranges. It is not looked whether the object is there. Raises StoreUnavailableError."""
        return self._objects.url(_key(sha256), seconds)


def _key(sha256: str) -> str:
    return f"{SERVED}/{sha256}"


def _parts(content: Content) -> Iterator[bytes]:
    """Yield a content's bytes."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            while part := file.read(AT_ONCE):
                yield part
    elif isinstance(content, bytes | bytearray | memoryview):
        view = memoryview(content)
        for begin in range(0, len(view), AT_ONCE):
            yield bytes(view[begin : begin + AT_ONCE])
    else:
        yield from map(bytes, content)


def _checked(sha256: str, parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield all parts. Raises StoreError, behind the last one, if they have another SHA-256."""
    found = new_sha256()
    for part in parts:
        found.update(part)
        yield part
    if found.hexdigest() != sha256:
        text = f"the content {sha256} has other bytes, with SHA-256 {found.hexdigest()}"
        raise StoreError(Code.WRONG_HASH, text)
