"""Bulk bytes: contents that devices fetch by hash, and updates that they upload when told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer, Chunk, pack_chunks
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector, check_finite, checksum
from websockets.frames import Frame, Opcode

from fleetlearn_coordinator.store import Store


class Content:
    """Bytes that are sent as the same frames to everybody, made once, when first asked for."""

    def __init__(self, transfer: int, content: Buffer) -> None:
        self.transfer, self.size = transfer, len(content)
        self._content = content
        self._frames: list[bytes] | None = None

    def frames(self, offset: int) -> Iterator[bytes]:
        """WebSocket frames, ready for the wire, of the content from ``offset`` on."""
        if offset % CHUNK_BYTES:  # a device that kept half a chunk
            return (wire(chunk) for chunk in pack_chunks(self.transfer, self._content, offset))
        if self._frames is None:
            self._frames = [wire(chunk) for chunk in pack_chunks(self.transfer, self._content)]
        return iter(self._frames[offset // CHUNK_BYTES :])


def wire(message: bytes) -> bytes:
    """A binary message as the bytes of one server frame (servers do not mask, so one frame serves all)."""
    return Frame(Opcode.BINARY, message).serialize(mask=False)


class Contents:
    """What can be fetched, by SHA-256: the bundle's files and the round's model."""

    def __init__(self, bundle: Bundle) -> None:
        self._files = {bundle.sha256: MANIFEST} | {entry.sha256: path for path, entry in bundle.manifest.files.items()}
        self._bundle = bundle
        self._contents: dict[str, Content] = {}
        self._model: str | None = None
        self._count = 0

    def publish(self, sha256: str, vector: Vector) -> None:
        """Serve this model, and no longer the one before. Its frames are kept where it is the same one."""
        if sha256 == self._model:
            return
        if self._model is not None:
            self._contents.pop(self._model, None)
        self._model = sha256
        self._add(sha256, vector.data.cast("B"))

    def find(self, sha256: str, offset: int) -> Content:
        """Raises ProtocolError (unknown-content, wrong-offset)."""
        if sha256 not in self._contents and sha256 in self._files:
            self._add(sha256, self._bundle.read(self._files[sha256]))
        content = self._contents.get(sha256)
        if content is None:
            raise ProtocolError(
                Code.UNKNOWN_CONTENT, f"nothing with SHA-256 {sha256} is served; it may be of an old round"
            )
        if offset > content.size:
            raise ProtocolError(Code.WRONG_OFFSET, f"offset {offset} is beyond the content's {content.size} bytes")
        return content

    def _add(self, sha256: str, content: Buffer) -> None:
        self._count += 1
        self._contents[sha256] = Content(self._count, content)


@dataclass(slots=True, eq=False)  # two are never the same, and looking one up among many is quick
class Upload:
    """One update on its way: spooled to a slot of the store and checked as it arrives."""

    device: str
    report: Report
    slot: int | None = None
    offset: int = 0
    """Bytes received so far."""
    largest: float = 0.0
    """Greatest magnitude among them."""
    transfer: int = 0
    """0: not granted."""
    moved: float = 0.0
    """When the last byte came, on the loop's clock."""
    crc32: int = 0
    """Of them."""

    def take(self, chunk: Chunk, store: Store) -> None:
        """Spool one chunk. Raises ProtocolError (wrong-offset, wrong-length, not-finite) and takes nothing of it."""
        assert self.slot is not None
        size = len(chunk.payload)
        if chunk.offset != self.offset:
            raise ProtocolError(
                Code.WRONG_OFFSET, f"a chunk begins at byte {chunk.offset}; {self.offset} bytes are here so far"
            )
        if self.offset + size > self.report.size or size % 4:
            raise ProtocolError(
                Code.WRONG_LENGTH,
                f"a chunk of {size} bytes at {self.offset}; the update has {self.report.size} bytes of float32",
            )
        largest = check_finite(np.frombuffer(chunk.payload, "<f4"))
        self.crc32 = checksum(chunk.payload, self.crc32)
        store.write_slot(self.slot, self.offset, chunk.payload)
        self.largest = max(self.largest, largest)
        self.offset += size

    def check_complete(self) -> None:
        """Raises ProtocolError (wrong-length, wrong-hash)."""
        if self.offset != self.report.size:
            raise ProtocolError(
                Code.WRONG_LENGTH, f"{self.offset} bytes were sent; the update was announced with {self.report.size}"
            )
        if self.crc32 != self.report.crc32:
            raise ProtocolError(
                Code.WRONG_HASH,
                f"the update has CRC-32 {self.crc32:08x}; {self.report.crc32:08x} was announced. Send it again.",
            )


class Uploads:
    """Who may upload now. A few at a time: 1,000 at once would take gigabytes and be no faster."""

    def __init__(self, store: Store, limit: int) -> None:
        self._store, self._limit = store, limit
        self._count = 0
        self.waiting: deque[Upload] = deque()
        self.active: dict[str, Upload] = {}
        """Task -> upload, granted."""
        self._broken: dict[str, Upload] = {}
        """Task -> upload whose connection broke; the device may go on with it."""

    def offer(self, device: str, report: Report) -> Upload:
        """Queue an announced update, going on with what an earlier connection brought of the same bytes."""
        self.forget(report.task, but=report)
        upload = self._broken.pop(report.task, None) or Upload(device, report)
        upload.report = report
        self.waiting.append(upload)
        return upload

    def grants(self, now: float) -> Iterator[Upload]:
        """The uploads that may begin now, each with a new transfer number."""
        while self.waiting and len(self.active) < self._limit:
            upload = self.waiting.popleft()
            if upload.slot is None:
                upload.slot = self._store.take_slot()
            self.active[upload.report.task] = upload
            self.renew(upload, now)
            yield upload

    def renew(self, upload: Upload, now: float) -> None:
        """Another transfer number, so that chunks of the old one cannot be taken for the new one's."""
        self._count = self._count % (2**32 - 1) + 1
        upload.transfer, upload.moved = self._count, now

    def pause(self, upload: Upload) -> None:
        """Its connection broke: keep what came, for a while."""
        self._stop(upload)
        if upload.slot is not None and upload.offset:
            self._broken[upload.report.task] = upload
            if len(self._broken) > self._limit:  # the oldest begins again
                self.forget(next(iter(self._broken)))
        else:
            self._release(upload)

    def drop(self, upload: Upload) -> None:
        """Done with it, or refused: its slot is free."""
        self._stop(upload)
        self._release(upload)

    def keep(self, upload: Upload) -> int:
        """Done with it; its slot, which now belongs to an accepted update."""
        self._stop(upload)
        assert upload.slot is not None
        slot, upload.slot = upload.slot, None
        return slot

    def forget(self, task: str, but: Report | None = None) -> None:
        """Drop what came of a task, unless it is of the very bytes that ``but`` announces."""
        broken = self._broken.get(task)
        if broken is not None and (but is None or broken.report.crc32 != but.crc32):
            self._release(self._broken.pop(task))

    def forget_all(self) -> None:
        """Drop what broken connections left: the round is over."""
        for task in list(self._broken):
            self.forget(task)

    def _stop(self, upload: Upload) -> None:
        upload.transfer = 0
        if self.active.get(upload.report.task) is upload:
            del self.active[upload.report.task]
        elif upload in self.waiting:
            self.waiting.remove(upload)

    def _release(self, upload: Upload) -> None:
        if upload.slot is not None:
            self._store.free_slot(upload.slot)
            upload.slot = None
