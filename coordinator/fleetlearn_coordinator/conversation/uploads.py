"""Updates on their way to the coordinator: a few at a time, checked as they arrive. places.py says
whose turn it is.

When an upload loses its place, chunks that are on their way still count; otherwise a slow device
would lose them each time. The bytes that arrived are in a spool file. At most as many uploads
without a place keep their spool files as there are places: beyond that, the upload with the fewest
bytes begins again. When a connection breaks, its run keeps what it brought (begun.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Chunk
from fleetlearn_protocol.messages import Part, Report
from fleetlearn_protocol.sparse_rows import elements_in
from fleetlearn_protocol.vector import checksum

from fleetlearn_coordinator.conversation.begun import BegunUpload, encode_begun
from fleetlearn_coordinator.conversation.places import PROOF_FACTOR, WINDOW, Places, Turn
from fleetlearn_coordinator.conversation.port import Spool

CHECKPOINT_BYTES = 16 * 2**20
CHECKPOINT_SECONDS = 5.0
"""Bytes, and seconds in which some came, after which an upload's progress is written down. A
coordinator that is killed loses no more of the upload. Smaller and quicker ones cost nothing."""


def check_parts(
    report: Report, asked: Mapping[str, str], elements_of: Callable[[str], int]
) -> None:
    """Raise ProtocolError (wrong-parts, wrong-length) unless the report has the parts that were
    asked for (name -> encoding), of as many elements as ``elements_of`` says of each; of an update
    of some rows of tables alone, as many as it has rows."""
    given = [(part.name, part.encoding) for part in report.parts]
    if sorted(given) != sorted(asked.items()):
        text = (
            f"a report of the parts {_listed(given)} came; the task asked for "
            f"{_listed(asked.items())}"
        )
        raise ProtocolError(Code.WRONG_PARTS, text)
    elements_of = elements_in(report, elements_of)
    for part in report.parts:
        encoding = find_encoding(part.encoding)
        if not encoding.accepts_size(part.size, elements_of(part.name)):
            elements = encoding.elements(elements_of(part.name))
            text = (
                f"part {part.name} has {part.size} bytes; its {elements} elements take "
                f"{encoding.size(elements)}"
            )
            raise ProtocolError(Code.WRONG_LENGTH, text)


def check_work(report: Report, epochs: int) -> None:
    """Raise ProtocolError (bad-message) if the report claims more work than its task's ``epochs``
    over the examples that it claims. A step takes at least one example; twice as many steps are let
    through."""
    if report.epochs > epochs or report.steps > 2 * epochs * report.examples:
        raise ProtocolError(
            Code.BAD_MESSAGE,
            f"a report of {report.epochs:g} epochs and {report.steps} steps on {report.examples} "
            f"examples came; the task asked for {epochs} epochs",
        )


def _listed(parts: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({encoding})" for name, encoding in parts)


class Sender(Protocol):
    """The sender of an upload: the conversation with its device."""

    def arriving(self) -> int:
        """Return how many bytes of an incomplete chunk have arrived."""

    def granted(self, upload: Upload, now: float) -> None:
        """The upload has a place."""

    def must_wait(self, upload: Upload) -> None:
        """The upload lost its place."""


@dataclass(slots=True, eq=False)
class Upload(Turn):
    """One update on its way: spooled to a file and checked as it arrives."""

    report: Report
    spool: Spool
    """Where its bytes are written: its run's."""
    elements_of: Callable[[str], int]
    """Name of a part -> its elements."""
    sender: Sender
    spool_file: int | None = None
    """The number of its spool file, from the first grant on."""
    offset: int = 0
    """Bytes received so far."""
    largest: dict[str, float] = field(default_factory=dict)
    """Name of each part that has begun to arrive -> the greatest magnitude so far."""
    transfer: int = 0
    """The number that its chunks carry, while it has a place and for a while afterwards. 0: no
    chunk counts."""
    restarted: bool = False
    """A chunk was refused, and no chunk with the new transfer number has come yet."""
    crc32: dict[str, int] = field(default_factory=dict)
    """Name of each part that has begun to arrive -> CRC-32 of its bytes so far."""
    began: float | None = None
    """When the upload was first granted."""
    went_on: bool = False
    """An earlier connection brought some of its bytes."""
    checkpoint: tuple[float, int] = (0.0, 0)
    """When it was last written down how far the upload came, and how far that was."""
    is_quick: bool = False
    """It is complete, and came quickly enough to prove its device."""

    def progress(self) -> int:
        return self.offset + self.sender.arriving()

    def has_room(self) -> bool:
        return self.spool_file is not None or self.spool.has_room()

    def proves(self, now: float, least_rate: float) -> bool:
        """Return whether the complete upload was quick enough to prove its device."""
        if self.went_on or self.began is None:
            return False  # who sends slowly and ends quickly, on another connection, is not quick
        return now - self.began <= max(
            WINDOW, self.offset / (PROOF_FACTOR * least_rate) if least_rate else 0.0
        )

    def begun(self) -> BegunUpload:
        """Return how far it came."""
        assert self.spool_file is not None
        return BegunUpload(
            self.device,
            self.report.task,
            self.report.parts,
            self.spool_file,
            self.offset,
            {**self.crc32},
            {**self.largest},
        )

    def go_on(self, begun: BegunUpload) -> None:
        """Go on from what an earlier connection brought of the same bytes."""
        self.went_on, self.spool_file, self.offset = True, begun.spool_file, begun.offset
        self.crc32, self.largest = {**begun.crc32}, {**begun.largest}

    def needs_checkpoint(self, now: float) -> bool:
        """Return whether the death of this process would lose too much of it."""
        at, offset = self.checkpoint
        return self.offset - offset >= CHECKPOINT_BYTES or now - at >= CHECKPOINT_SECONDS

    def write_checkpoint(self, now: float) -> BegunUpload:
        """Write down how far it came, and return that."""
        begun = self.begun()
        self.spool.write_checkpoint(begun.spool_file, encode_begun(begun))
        self.checkpoint = now, self.offset
        return begun

    def receive(self, chunk: Chunk) -> None:
        """Check one chunk and write it to the spool file. Raises ProtocolError (wrong-offset,
        wrong-length, not-finite, bad-encoding) and changes nothing."""
        assert self.spool_file is not None
        size = len(chunk.payload)
        if chunk.offset != self.offset:
            raise ProtocolError(
                Code.WRONG_OFFSET,
                f"a chunk begins at byte {chunk.offset}; {self.offset} bytes are here so far",
            )
        part, end = self._arriving_part()
        if self.offset + size > end:
            raise ProtocolError(
                Code.WRONG_LENGTH,
                f"a chunk of {size} bytes at {self.offset}; part {part.name} ends at {end}",
            )
        encoding, elements = find_encoding(part.encoding), None
        if encoding.block > 1 and self.offset + size == end:  # the last block may be shorter
            before = (self.offset - (end - part.size)) // encoding.block_bytes * encoding.block
            elements = encoding.elements(self.elements_of(part.name)) - before
        largest = encoding.check(chunk.payload, elements)
        self.crc32[part.name] = checksum(chunk.payload, self.crc32.get(part.name, 0))
        self.spool.write_spool_file(self.spool_file, self.offset, chunk.payload)
        self.largest[part.name] = max(self.largest.get(part.name, 0.0), largest)
        self.offset += size
        self.restarted = False

    def check_complete(self) -> None:
        """Raise ProtocolError (wrong-length, wrong-hash) unless all bytes arrived as announced."""
        if self.offset != self.report.size:
            raise ProtocolError(
                Code.WRONG_LENGTH,
                f"{self.offset} bytes were sent; the update was announced with {self.report.size}",
            )
        for part in self.report.parts:
            if self.crc32[part.name] != part.crc32:
                raise ProtocolError(
                    Code.WRONG_HASH,
                    f"part {part.name} has CRC-32 {self.crc32[part.name]:08x}; {part.crc32:08x} "
                    "was announced. Send it again.",
                )

    def _arriving_part(self) -> tuple[Part, int]:
        """Return the part that the next byte belongs to (the last one once all have arrived), and
        where it ends."""
        end = 0
        for part in self.report.parts:
            end += part.size
            if self.offset < end:
                break
        return part, end


class Uploads:
    """The uploads of all conversations: who may upload now."""

    def __init__(self, places: Places[Upload]) -> None:
        self.places = places
        self._count = 0
        self._without_place: dict[Upload, None] = {}
        """Uploads with bytes in a spool file and without a place: waiting, or asked to wait."""
        self._spoiled: dict[str, Spool] = {}
        """Task whose upload arrived wrong once -> its run's spool."""

    @property
    def waiting(self) -> list[Upload]:
        """The uploads that wait for a place."""
        return list(self.places.waiting)

    @property
    def active(self) -> dict[str, Upload]:
        """Task -> its upload, for uploads with a place."""
        return {upload.report.task: upload for upload in self.places.held}

    def offer(
        self,
        device: str,
        report: Report,
        spool: Spool,
        elements_of: Callable[[str], int],
        sender: Sender,
        begun: BegunUpload | None = None,
    ) -> Upload:
        """Queue an announced update. ``begun``: what an earlier connection brought of the same
        bytes."""
        upload = Upload(device, report, spool, elements_of, sender)
        self.queue(upload)
        if begun is not None:
            upload.go_on(begun)
            self._keep_bytes(upload)
        return upload

    def queue(self, upload: Upload) -> None:
        """Let the upload wait for a place. None of its chunks is on the way."""
        upload.transfer = 0
        self.places.ask(upload)

    def grant(self, now: float) -> None:
        """Let as many uploads begin as there are places for, and tell their senders."""
        for upload in self.grants(now):
            if upload in self.places.held:
                upload.sender.granted(upload, now)
            else:
                upload.sender.must_wait(upload)

    def grants(self, now: float) -> Iterator[Upload]:
        """Yield the uploads that may begin now, each with a new transfer number, and the uploads
        that lost their places to them, which hold none now."""
        while (found := self.places.next(now)) is not None:
            upload, loser = found
            if loser is not None:
                self._lose_place(loser)
                yield loser
            self._without_place.pop(upload, None)
            if upload.spool_file is None:
                upload.spool_file = upload.spool.take_spool_file()
            if upload.began is None:
                upload.began = now
            upload.checkpoint = now, upload.offset
            self.renew(upload)
            yield upload

    def renew(self, upload: Upload) -> None:
        """Give the upload a new transfer number, so that chunks with the old number do not count
        any more."""
        self._count = self._count % (2**32 - 1) + 1
        upload.transfer, upload.restarted = self._count, False

    def part(self, upload: Upload, now: float) -> BegunUpload | None:
        """The connection broke, and this upload is over. Returns what came, with its spool file,
        which is the caller's now. None: nothing came."""
        begun = upload.write_checkpoint(now) if upload.offset else None
        if begun is not None:
            upload.spool_file = None
        self.drop(upload)
        return begun

    def write_checkpoints(self, now: float) -> None:
        """Write down how far the uploads with a place came: this process ends before they do."""
        for upload in self.places.held:
            if upload.offset > upload.checkpoint[1]:
                upload.write_checkpoint(now)

    def drop(self, upload: Upload) -> None:
        """The upload is not wanted any more, or was refused. Its spool file is free."""
        self._stop(upload)
        self._begin_again(upload)

    def finish(self, upload: Upload, now: float) -> None:
        """All bytes are here, and the update is to be saved: ``complete`` or ``drop`` follows. The
        upload needs no place meanwhile."""
        held = upload in self.places.held
        upload.is_quick = held and upload.proves(now, self.places.least_rate)
        self._stop(upload)
        self._without_place.pop(upload, None)

    def complete(self, upload: Upload) -> int:
        """The update was saved. Returns the number of its spool file, which is not the upload's
        from now on."""
        if upload.is_quick:
            self.places.proven.add(upload.device)
        assert upload.spool_file is not None
        spool_file, upload.spool_file = upload.spool_file, None
        return spool_file

    def first_spoiled(self, task: str, spool: Spool) -> bool:
        """Return whether this is the first time that the task's upload arrived wrong, and remember
        that it did."""
        first = task not in self._spoiled
        self._spoiled[task] = spool
        return first

    def forget_tasks(self, spool: Spool, unless: Container[str]) -> None:
        """A run's tasks are over, except those named by ``unless``: forget which of their uploads
        arrived wrong."""
        for task in [
            task
            for task, its_spool in self._spoiled.items()
            if its_spool is spool and task not in unless
        ]:
            del self._spoiled[task]

    def _lose_place(self, upload: Upload) -> None:
        """The upload lost its place. Chunks that are on their way still count."""
        if upload.progress():
            self._keep_bytes(upload)
        else:
            self._begin_again(upload)

    def _stop(self, upload: Upload) -> None:
        upload.transfer = 0
        self.places.leave(upload)

    def _keep_bytes(self, upload: Upload) -> None:
        self._without_place[upload] = None
        if len(self._without_place) > self.places.limit:
            self._begin_again(min(self._without_place, key=Upload.progress))

    def _begin_again(self, upload: Upload) -> None:
        """Forget the upload's bytes. Chunks that are on their way will not count."""
        self._without_place.pop(upload, None)
        upload.transfer = upload.offset = 0
        upload.crc32.clear()
        upload.largest.clear()
        if upload.spool_file is not None:
            upload.spool.free_spool_file(upload.spool_file)
            upload.spool_file = None
