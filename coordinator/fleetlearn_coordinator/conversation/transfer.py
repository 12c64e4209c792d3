"""Bulk bytes: contents that devices fetch by hash, and updates that they upload when told. places.py says whose turn
it is.

A download without a place still has its write buffer (192 KiB at most), which nobody can take back. A peer that does
not read could collect such buffers by the thousand, so of the downloads that lost their place before their buffer was
read, the oldest is ended where there are more than STALLED_PER_PLACE for each place: its peer read least. The device
connects again and goes on from the bytes that it has.

An upload without a place may still send what was on its way: those chunks count, or a slow device would lose all of
them each time. What an upload has brought is in a slot of the store, and without a place there are at most as many
slots as there are places: where there are more, the upload that has brought least begins again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import ENCODINGS, FLOAT32
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer, Chunk, pack_chunks
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.messages import UPDATE, Part, Report
from fleetlearn_protocol.vector import Vector, checksum
from websockets.frames import Frame, Opcode

from fleetlearn_coordinator.conversation.places import PROOF, WINDOW, Places, Turn
from fleetlearn_coordinator.storage.store import Store

STALLED_PER_PLACE = 8
"""Downloads with unread bytes and without a place, for each place."""
ASKED_PARTS = {UPDATE: FLOAT32.name}
"""What each task asks its device to report: name of the part -> its encoding."""


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

    def publish(self, sha256: str, vector: Vector) -> str | None:
        """Serve this model, and no longer the one before, whose hash is returned if it was another."""
        before = self._model
        if sha256 == before:  # its frames are kept
            return None
        if before is not None:
            self._contents.pop(before, None)
        self._model = sha256
        self._add(sha256, FLOAT32.encode(vector))
        return before

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


@dataclass(slots=True, eq=False)
class Download(Turn):
    """One content on its way to a device."""

    sha256: str
    transport: asyncio.WriteTransport
    sent: int = 0
    """Bytes written to the transport."""
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has a place."""
    task: asyncio.Task[None] | None = None
    """Sends it."""

    def progress(self) -> int:
        return self.sent - self.transport.get_write_buffer_size()


class Downloads:
    """Who may download now."""

    def __init__(self, places: Places[Download]) -> None:
        self.places = places
        self._stalled: dict[Download, None] = {}
        """Without a place, and its device has not read what was written. The one that is so for longest comes first."""

    def ask(self, download: Download, *, idle: bool) -> None:
        """Let a download wait for a place. What was written before has been read."""
        self._stalled.pop(download, None)
        self.places.ask(download, idle=idle)

    def leave(self, download: Download) -> None:
        """Nothing more is to be sent."""
        self._stalled.pop(download, None)
        self.places.leave(download)

    def go_on(self, now: float) -> None:
        """Let downloads begin or go on, as many as there is room for."""
        while (found := self.places.next(now)) is not None:
            download, loser = found
            download.turn.set()
            if loser is not None:
                loser.turn.clear()
                self._stalled[loser] = None
        if len(self._stalled) > STALLED_PER_PLACE * self.places.limit:
            oldest = next(iter(self._stalled))
            del self._stalled[oldest]
            oldest.transport.abort()


def check_parts(report: Report, elements: int) -> None:
    """Raise ProtocolError (wrong-parts, wrong-length) unless the report has the ASKED_PARTS, of ``elements`` each."""
    given = [(part.name, part.encoding) for part in report.parts]
    if sorted(given) != sorted(ASKED_PARTS.items()):
        text = f"a report of the parts {_listed(given)} came; the task asked for {_listed(ASKED_PARTS.items())}"
        raise ProtocolError(Code.WRONG_PARTS, text)
    for part in report.parts:
        expected = ENCODINGS[part.encoding].size(elements)
        if part.size != expected:
            text = f"part {part.name} has {part.size} bytes; a model of {elements} elements takes {expected}"
            raise ProtocolError(Code.WRONG_LENGTH, text)


def _listed(parts: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({encoding})" for name, encoding in parts)


def _nothing() -> int:
    return 0


@dataclass(slots=True, eq=False)
class Upload(Turn):
    """One update on its way: spooled to a slot of the store and checked as it arrives."""

    report: Report
    slot: int | None = None
    offset: int = 0
    """Bytes received so far."""
    largest: float = 0.0
    """Greatest magnitude among them."""
    transfer: int = 0
    """The number that its chunks carry, while it has a place and for what is on its way afterwards. 0: none."""
    restarted: bool = False
    """A chunk was refused, and nothing has come under the new number yet."""
    crc32: dict[str, int] = field(default_factory=dict)
    """Name of each part that has begun to arrive -> CRC-32 of its bytes so far."""
    arriving: Callable[[], int] = _nothing
    """Bytes received of a chunk that is not complete."""
    began: float | None = None
    """When it was first granted."""

    def progress(self) -> int:
        return self.offset + self.arriving()

    def proves(self, now: float, least_rate: float) -> bool:
        """Whether the complete upload was quick enough to prove its device."""
        assert self.began is not None
        return now - self.began <= max(WINDOW, self.offset / (PROOF * least_rate) if least_rate else 0.0)

    def take(self, chunk: Chunk, store: Store) -> None:
        """Spool one chunk. Raises ProtocolError (wrong-offset, wrong-length, not-finite) and takes nothing of it."""
        assert self.slot is not None
        size = len(chunk.payload)
        if chunk.offset != self.offset:
            raise ProtocolError(
                Code.WRONG_OFFSET, f"a chunk begins at byte {chunk.offset}; {self.offset} bytes are here so far"
            )
        part, end = self._arriving_part()
        if self.offset + size > end:
            raise ProtocolError(
                Code.WRONG_LENGTH, f"a chunk of {size} bytes at {self.offset}; part {part.name} ends at {end}"
            )
        largest = ENCODINGS[part.encoding].check(chunk.payload)
        self.crc32[part.name] = checksum(chunk.payload, self.crc32.get(part.name, 0))
        store.write_slot(self.slot, self.offset, chunk.payload)
        self.largest = max(self.largest, largest)
        self.offset += size
        self.restarted = False

    def check_complete(self) -> None:
        """Raises ProtocolError (wrong-length, wrong-hash)."""
        if self.offset != self.report.size:
            raise ProtocolError(
                Code.WRONG_LENGTH, f"{self.offset} bytes were sent; the update was announced with {self.report.size}"
            )
        for part in self.report.parts:
            if self.crc32[part.name] != part.crc32:
                raise ProtocolError(
                    Code.WRONG_HASH,
                    f"part {part.name} has CRC-32 {self.crc32[part.name]:08x}; {part.crc32:08x} was announced. Send it "
                    "again.",
                )

    def _arriving_part(self) -> tuple[Part, int]:
        """The part that the next byte belongs to, the last one where all have arrived; and the byte where it ends."""
        end = 0
        for part in self.report.parts:
            end += part.size
            if self.offset < end:
                break
        return part, end


class Uploads:
    """Who may upload now."""

    def __init__(self, store: Store, places: Places[Upload]) -> None:
        self._store, self.places = store, places
        self._count = 0
        self._broken: dict[str, Upload] = {}
        """Task -> upload whose connection broke; the device may go on with it."""
        self._spare: dict[Upload, None] = {}
        """Uploads with bytes in a slot and without a place: broken, waiting, or asked to wait."""

    @property
    def waiting(self) -> list[Upload]:
        """Those that wait for a place."""
        return list(self.places.waiting)

    @property
    def active(self) -> dict[str, Upload]:
        """Task -> upload with a place."""
        return {upload.report.task: upload for upload in self.places.held}

    def offer(self, device: str, report: Report, arriving: Callable[[], int] = _nothing) -> Upload:
        """Queue an announced update, going on with what an earlier connection brought of the same bytes."""
        self.forget(report.task, but=report)
        upload = self._broken.pop(report.task, None) or Upload(device, report)
        upload.report, upload.arriving = report, arriving
        self.queue(upload)
        return upload

    def queue(self, upload: Upload) -> None:
        """Let it wait for a place. Nothing of it is on its way."""
        upload.transfer = 0
        self.places.ask(upload)

    def grants(self, now: float) -> Iterator[Upload]:
        """The uploads that may begin now, each with a new transfer number, and those that lost their place to them
        (which do not hold one now)."""
        while (found := self.places.next(now)) is not None:
            upload, loser = found
            if loser is not None:
                self._set_aside(loser)
                yield loser
            self._spare.pop(upload, None)
            if upload.slot is None:
                upload.slot = self._store.take_slot()
            if upload.began is None:
                upload.began = now
            self.renew(upload)
            yield upload

    def renew(self, upload: Upload) -> None:
        """Another transfer number, so that chunks of the old one cannot be taken for the new one's."""
        self._count = self._count % (2**32 - 1) + 1
        upload.transfer, upload.restarted = self._count, False

    def pause(self, upload: Upload) -> None:
        """Its connection broke: keep what came, for a while."""
        self._stop(upload)
        upload.arriving = _nothing
        if upload.offset:
            self._broken[upload.report.task] = upload
            self._keep(upload)
        else:
            self._begin_again(upload)

    def drop(self, upload: Upload) -> None:
        """Done with it, or refused: its slot is free."""
        self._stop(upload)
        self._begin_again(upload)

    def keep(self, upload: Upload, now: float) -> int:
        """It was accepted; returns its slot, which is the caller's from now on."""
        if upload in self.places.held and upload.proves(now, self.places.least_rate):
            self.places.proven.add(upload.device)
        self._stop(upload)
        self._spare.pop(upload, None)
        assert upload.slot is not None
        slot, upload.slot = upload.slot, None
        return slot

    def forget(self, task: str, but: Report | None = None) -> None:
        """Drop what came of a task, unless it is of the very bytes that ``but`` announces."""
        broken = self._broken.get(task)
        if broken is not None and (but is None or broken.report.parts != but.parts):
            self._begin_again(self._broken.pop(task))

    def forget_all(self) -> None:
        """Drop what broken connections left: the round is over."""
        for task in list(self._broken):
            self.forget(task)

    def _set_aside(self, upload: Upload) -> None:
        """It lost its place; what is on its way still counts."""
        if upload.progress():
            self._keep(upload)
        else:
            self._begin_again(upload)

    def _stop(self, upload: Upload) -> None:
        upload.transfer = 0
        self.places.leave(upload)

    def _keep(self, upload: Upload) -> None:
        self._spare[upload] = None
        if len(self._spare) > self.places.limit:
            least = min(self._spare, key=Upload.progress)
            self._broken.pop(least.report.task, None)
            self._begin_again(least)

    def _begin_again(self, upload: Upload) -> None:
        """Forget its bytes. If chunks of it are on their way, they come for nothing."""
        self._spare.pop(upload, None)
        upload.transfer = upload.offset = 0
        upload.crc32.clear()
        upload.largest = 0.0
        if upload.slot is not None:
            self._store.free_slot(upload.slot)
            upload.slot = None
