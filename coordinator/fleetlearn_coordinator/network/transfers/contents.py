"""What devices fetch, by SHA-256, as WebSocket frames that are made once for all devices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import FLOAT32, Encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer, pack_chunk, pack_chunks
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.messages import ContentSelection
from fleetlearn_protocol.sparse_rows import select_bytes, selected_bytes
from fleetlearn_protocol.vector import digest
from websockets.frames import Frame, Opcode

from fleetlearn_coordinator.storage.blobs import StoredBytes
from fleetlearn_coordinator.storage.file_bytes import FileBytes

LARGE = 2**24
"""From this many bytes on, a file of the bundle is read from the disk for each device, unless the
bundle is a zip."""

READ_AT_ONCE = 2**22
"""Bytes of an older vector that are copied at a time: whole elements."""


NEAR = 2**12
"""Most bytes between two selected rows that are read with them: to read as many takes as long as to
read once more."""


class FramedContent:
    """Bytes that are sent to every device as the same frames. Each frame is made when it is first
    sent: those of 400 MB take 0.9 s together."""

    def __init__(self, transfer: int, content: Buffer) -> None:
        self.transfer, self.size = transfer, len(content)
        self._content = memoryview(content)
        self._frames: list[bytes | None] = [None] * -(-self.size // CHUNK_BYTES)

    def read(self, begin: int, size: int) -> Buffer:
        """Return ``size`` bytes from ``begin`` on, or fewer where the content ends."""
        return self._content[begin : begin + size]

    def frames(self, offset: int, end: int | None = None) -> Iterator[bytes]:
        """Yield the content from ``offset`` on as WebSocket frames, ready for the wire. ``end``:
        up to there; None: to its end."""
        end = self.size if end is None else end
        # A device has part of a chunk, or wants one.
        if offset % CHUNK_BYTES or (end % CHUNK_BYTES and end < self.size):
            yield from map(wire, pack_chunks(self.transfer, self._content[:end], offset))
            return
        for number in range(offset // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            frame = self._frames[number]
            if frame is None:
                begin = number * CHUNK_BYTES
                frame = wire(
                    pack_chunk(self.transfer, begin, self._content[begin : begin + CHUNK_BYTES])
                )
                self._frames[number] = frame
            yield frame


class StoredContent:
    """A large file of the bundle, or an older model. The frames are read from the store for each
    device: none of it stays in memory. A bundle that replaces this one on the disk changes nothing
    of it, and a model may be dropped."""

    def __init__(
        self,
        transfer: int,
        content: StoredBytes,
        size: int | None = None,
        encoding: Encoding = FLOAT32,
    ) -> None:
        """``size``: bytes that travel; None: as many as are stored. ``encoding``: as in
        ``Older``."""
        self.transfer, self._content, self._encoding = transfer, content, encoding
        self.size = content.size if size is None else size

    def frames(self, offset: int, end: int | None = None) -> Iterator[bytes]:
        """Return the content from ``offset`` on as WebSocket frames. ``end``: up to there; None: to
        its end. Raises OSError if the file has become shorter."""
        end = self.size if end is None else end
        for place in range(offset, end, CHUNK_BYTES):
            payload = self.read(place, min(CHUNK_BYTES, end - place))
            yield wire(pack_chunk(self.transfer, place, payload))

    def read(self, begin: int, size: int) -> Buffer:
        """Return ``size`` bytes from ``begin`` on, or fewer where the content ends. Raises OSError
        if the file has become shorter."""
        size = min(size, self.size - begin)
        payload = self._read(begin, size)
        if len(payload) < size:
            raise OSError(
                f"a file had {self.size} bytes for devices and was cut short while they fetch it"
            )
        return payload

    def _read(self, place: int, size: int) -> Buffer:
        """Return the content's bytes from ``place`` on."""
        if self._encoding == FLOAT32:
            return self._content.read(place, size)
        first, end = place // 2, (place + size + 1) // 2  # a device may have half of an element
        exact = self._content.read(4 * first, 4 * (end - first))
        return self._encoding.encode(FLOAT32.decode(exact))[place - 2 * first :][:size]


class SelectedContent:
    """The pieces of a content that one device wants, which ``check_selection`` let pass.

    Making them takes time, and they take memory. So they are made in a thread, and are here only
    while the device's download has a place."""

    def __init__(self, content: FramedContent | StoredContent, selection: ContentSelection) -> None:
        self.transfer, self.size = content.transfer, selected_bytes(selection)
        self._content, self._selection = content, selection
        self._near = NEAR if isinstance(content, StoredContent) else content.size
        self._pieces = b""

    async def make(self) -> str:
        """Have the pieces here. Returns their SHA-256. Raises OSError if a file has become
        shorter."""
        return await asyncio.to_thread(self._make)

    def _make(self) -> str:
        self._pieces = select_bytes(self._content.read, self._selection, self._near)
        return digest(self._pieces)

    def drop(self) -> None:
        """The pieces are made again before they are read again."""
        self._pieces = b""

    def frames(self, offset: int, end: int | None = None) -> Iterator[bytes]:
        """Yield the pieces from ``offset`` on as WebSocket frames. ``end``: up to there; None: to
        their end."""
        end = self.size if end is None else end
        for place in range(offset, end, CHUNK_BYTES):
            payload = self._pieces[place : min(end, place + CHUNK_BYTES)]
            yield wire(pack_chunk(self.transfer, place, payload))


def wire(message: bytes) -> bytes:
    """Return a binary message as the bytes of one WebSocket frame. Servers do not mask, so it is
    the same for all."""
    return Frame(Opcode.BINARY, message).serialize(mask=False)


class Older(NamedTuple):
    """The bytes of an older model, as they travel."""

    content: StoredBytes
    """The vector, in float32."""
    size: int
    """Bytes that travel."""
    encoding: Encoding = FLOAT32
    """In which they travel: float32 or float16."""

    def parts(self) -> Iterator[Buffer]:
        """Yield the bytes, as they travel, in parts. Raises OSError."""
        for begin in range(0, self.content.size, READ_AT_ONCE):
            part: Buffer = self.content.read(begin, READ_AT_ONCE)
            yield part if self.encoding == FLOAT32 else self.encoding.encode(FLOAT32.decode(part))


class Contents:
    """What can be fetched, by SHA-256: the files of the run's bundles, the newest vectors (the
    model, and what belongs to it), and older ones that tasks began from."""

    def __init__(self, *bundles: Bundle) -> None:
        self._files = dict[str, tuple[Bundle, str]]()
        """SHA-256 of a file -> its bundle, and its path there."""
        self.add_bundles(*bundles)
        self._contents: dict[str, FramedContent | StoredContent] = {}
        self._newest: set[str] = set()
        self._older: set[str] = set()
        self._count = 0

    def add_bundles(self, *bundles: Bundle) -> None:
        """Let the files of these bundles be fetched too."""
        for bundle in bundles:
            self._files[bundle.sha256] = bundle, MANIFEST
            for path, entry in bundle.manifest.files.items():
                self._files[entry.sha256] = bundle, path

    def publish(self, newest: Mapping[str, Buffer], older: Mapping[str, Older]) -> list[str]:
        """Serve these bytes as the newest, and the older ones from the store. Returns the SHA-256
        of the vectors that were served and are not any more."""
        if newest.keys() == self._newest:  # their frames are kept
            return []
        gone = (self._older | self._newest) - older.keys() - newest.keys()
        # the ones before are served from the store, if at all
        for before in gone | self._newest | newest.keys():
            self._contents.pop(before, None)
        self._newest, self._older = {*newest}, self._older - gone - newest.keys()
        for sha256, content in newest.items():
            self._add(sha256, content)
        for sha256, where in older.items():
            self.serve_older(sha256, where)
        return sorted(gone)

    def serve_older(self, sha256: str, where: Older) -> None:
        """Serve an older vector from the store, until newest ones are published without it."""
        if sha256 not in self._contents:
            self._count += 1
            self._contents[sha256] = StoredContent(self._count, *where)
            self._older.add(sha256)

    def clear(self) -> None:
        """Serve nothing any more."""
        self._contents.clear()
        self._newest, self._older = set(), set()

    def get(self, sha256: str) -> FramedContent | StoredContent | None:
        """Return the content with this hash; None: it is not served."""
        if sha256 not in self._contents and sha256 in self._files:
            self._add_file(sha256, *self._files[sha256])
        return self._contents.get(sha256)

    def find(self, sha256: str, offset: int) -> FramedContent | StoredContent:
        """Return the content with this hash. Raises ProtocolError (unknown-content,
        wrong-offset)."""
        content = self.get(sha256)
        if content is None:
            raise ProtocolError(
                Code.UNKNOWN_CONTENT,
                f"nothing with SHA-256 {sha256} is served; it may be of an old round",
            )
        if offset > content.size:
            raise ProtocolError(
                Code.WRONG_OFFSET, f"offset {offset} is beyond the content's {content.size} bytes"
            )
        return content

    def _add_file(self, sha256: str, bundle: Bundle, file: str) -> None:
        if file == MANIFEST or bundle.manifest.file(file).size < LARGE or not bundle.path.is_dir():
            self._add(sha256, bundle.read(file))
            return
        bundle.check(file)
        self._count += 1
        self._contents[sha256] = StoredContent(self._count, FileBytes(bundle.path / file))

    def _add(self, sha256: str, content: Buffer) -> None:
        self._count += 1
        self._contents[sha256] = FramedContent(self._count, content)
