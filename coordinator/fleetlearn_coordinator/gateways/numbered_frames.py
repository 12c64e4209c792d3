"""Batches as numbered frames, for a carrier that may lose messages, such as NATS: what is missing
is noticed, and nobody is sent more than it takes in. No I/O.

A frame is a header and a part of a batch. Each side numbers its frames that carry bytes, and says
in every frame how many such bytes it has taken in: at most WINDOW bytes are on their way.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from enum import IntEnum

HEADER = struct.Struct("<BQQ")
"""What stands before a frame's bytes: its kind, the number of the next frame that carries bytes
(of this one, if it does), and how many bytes its sender has taken in."""
WINDOW = 2**22
"""Bytes that may be on their way. Above, frames wait."""
LONGEST_BATCH = 2**28
"""Bytes. A longer one is of another program."""


class FrameKind(IntEnum):
    """What a frame is."""

    PART = 0
    """A part of a batch, which goes on in the next one."""
    LAST = 1
    """The last part of a batch."""
    BEAT = 2
    """A sign of life, without bytes."""
    END = 3
    """The sender sends nothing more."""


class MissingFrameError(Exception):
    """A frame was lost, or is none. The text says so to people."""


class NumberedFrames:
    """Both directions of one end."""

    def __init__(self, longest: int) -> None:
        """``longest``: bytes of a frame, with its header, at most."""
        self._most = longest - HEADER.size
        self._waiting: deque[tuple[FrameKind, memoryview]] = deque()
        self.waiting = 0
        """Bytes of frames that wait until the peer has taken in what it was sent."""
        self._number = self._sent = self._acknowledged = 0
        self._expected = self._taken = self._told = 0
        self._batch = bytearray()

    # Out

    def add(self, batch: bytes) -> None:
        """Send this batch after those before."""
        view = memoryview(batch)
        for begin in range(0, max(1, len(view)), self._most):
            part = view[begin : begin + self._most]
            is_last = begin + self._most >= len(view)
            self._waiting.append((FrameKind.LAST if is_last else FrameKind.PART, part))
            self.waiting += len(part)

    def frames(self) -> Iterator[bytes]:
        """Yield the frames that may be sent now. Each has to be sent, in this order."""
        while self._waiting and self._sent - self._acknowledged < WINDOW:
            kind, part = self._waiting.popleft()
            self.waiting -= len(part)
            header = HEADER.pack(kind, self._number, self._taken)
            self._number += 1
            self._sent += len(part)
            self._told = self._taken
            yield header + part

    def signal(self, kind: FrameKind) -> bytes:
        """Return a frame of this kind, BEAT or END, without bytes."""
        self._told = self._taken
        return HEADER.pack(kind, self._number, self._taken)

    @property
    def must_tell(self) -> bool:
        """Whether so much was taken in since the last frame that the peer may wait for a word."""
        return self._taken - self._told >= WINDOW // 4

    # In

    def take(self, frame: bytes) -> tuple[FrameKind, bytes | None]:
        """Take the peer's next frame in. Returns its kind, and the batch that is complete with it.
        Raises MissingFrameError."""
        try:
            word, number, acknowledged = HEADER.unpack_from(frame)
            kind = FrameKind(word)
        except (struct.error, ValueError):
            raise MissingFrameError("what came is of another program") from None
        if number != self._expected:
            raise MissingFrameError(
                f"messages were lost on the way: number {self._expected} was expected, and "
                f"{number} came"
            )
        self._acknowledged = max(self._acknowledged, acknowledged)
        if kind not in (FrameKind.PART, FrameKind.LAST):
            return kind, None
        self._expected += 1
        self._taken += len(frame) - HEADER.size
        self._batch += memoryview(frame)[HEADER.size :]
        if len(self._batch) > LONGEST_BATCH:
            raise MissingFrameError("what came is of another program")
        if kind is FrameKind.PART:
            return kind, None
        batch, self._batch = bytes(self._batch), bytearray()
        return kind, batch


def begins(frame: bytes) -> bool:
    """Return whether this is the first frame of an end that carries bytes."""
    if len(frame) < HEADER.size:
        return False
    kind, number, _ = HEADER.unpack_from(frame)
    return kind in (FrameKind.PART, FrameKind.LAST) and number == 0


def end_of_unknown() -> bytes:
    """Return the frame that answers one of a bus that is over, or was never there."""
    return HEADER.pack(FrameKind.END, 0, 0)
