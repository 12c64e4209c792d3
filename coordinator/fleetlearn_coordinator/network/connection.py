"""A WebSocket connection that reads from its peer only as much as it can handle within the bounds of limits.py.

websockets handles all frames of one read (up to 40,000) at once, and answers pings however much waits to be written.
Here websockets is given a few frames at a time; in between, other connections have their turn.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from websockets.asyncio.server import Server, ServerConnection
from websockets.frames import Frame, Opcode
from websockets.protocol import Event, State
from websockets.server import ServerProtocol

from fleetlearn_coordinator.conversation.limits import (
    BYTE_BURST,
    BYTE_RATE,
    CLOSE_TIMEOUT,
    DOWNLOAD_RATE,
    FRAMES_PER_TURN,
    HANDSHAKE_BYTES,
    LARGE_FRAME,
    LARGEST_MESSAGE,
    LINGER,
    MAX_FRAGMENTS,
    MESSAGE_BURST,
    MESSAGE_RATE,
    MESSAGES_BEFORE_CHECK_IN,
    PATIENCE,
    RECEIVE,
    WRITE_PAUSE,
    Bucket,
)

_CONTINUATION, _BINARY = 0, 2


class FrameCounter:
    """Finds where frames end in a stream of bytes (RFC 6455, section 5.2), before anything is done with them."""

    __slots__ = ("_header", "_payload", "fragments")

    def __init__(self) -> None:
        self.fragments = 0
        """Frames of the arriving message, without its first."""
        self._header = b""
        """The beginning of a header that is not complete."""
        self._payload = 0
        """Bytes of the current frame that are still to come."""

    def advance(self, data: bytes, begin: int, frames: int, small: int) -> tuple[int, int]:
        """Go on from ``begin`` over at most ``frames`` frames, at most ``small`` of them smaller than LARGE_FRAME.

        Returns where they end, and how many of them are small. A frame counts when its header is complete.
        """
        at, size, counted = begin, len(data), 0
        while at < size:
            if self._payload:
                step = min(self._payload, size - at)
                at += step
                self._payload -= step
                continue
            if frames == 0 or counted == small:
                break
            header = self._header + data[at : at + 14 - len(self._header)]
            needed = _header_size(header)
            if len(header) < needed:
                self._header, at = header, size
                break
            at += needed - len(self._header)
            self._header = b""
            opcode, length = header[0] & 15, header[1] & 127
            if length > 125:
                length = int.from_bytes(header[2 : 4 if length == 126 else 10], "big")
            self._payload = length
            if opcode == _CONTINUATION:
                self.fragments += 1
            elif opcode <= _BINARY:
                self.fragments = 0
            frames -= 1
            counted += opcode != _BINARY or length < LARGE_FRAME
        return at, counted


def _header_size(header: bytes) -> int:
    if len(header) < 2:
        return 2
    length = header[1] & 127
    return 2 + (2 if length == 126 else 8 if length == 127 else 0) + (4 if header[1] & 128 else 0)


class ConnectionOwner(Protocol):
    """The listener that accepted a connection, as the connection sees it; for websockets it is a ``Server``."""

    def lost(self, connection: Connection) -> None:
        """The connection is closed."""


class Handler(Protocol):
    """Who handles a connection's messages. Most of them come out of ``recv``."""

    def take_chunk(self, message: bytes) -> bool:
        """Handle a binary message that came in one frame, while no other message waits. Returns False if ``recv``
        should return it instead. Waking the task that waits in ``recv`` for each chunk would cost a fifth of all
        reading."""

    def flooded(self) -> None:
        """The peer has waited for its budget for too long. Called once; the connection is ended then."""


class Connection(ServerConnection):
    """Hands frames to websockets within the budgets of limits.py, a few in each turn of the event loop."""

    def __init__(self, protocol: ServerProtocol, owner: ConnectionOwner, message_rate: float = MESSAGE_RATE) -> None:
        super().__init__(
            protocol,
            cast(Server, owner),
            ping_interval=None,
            close_timeout=CLOSE_TIMEOUT,
            max_queue=(2, 0),
        )
        self._owner = owner
        self.since = now = self.loop.time()
        """When the connection was accepted."""
        self.messages = Bucket(message_rate, MESSAGE_BURST, now, MESSAGES_BEFORE_CHECK_IN)
        self.incoming = Bucket(BYTE_RATE, BYTE_BURST, now, LARGEST_MESSAGE)
        self.downloads = Bucket(DOWNLOAD_RATE, BYTE_BURST, now, 0)
        self.driver: Handler | None = None
        """Set after the handshake."""
        self.stalled: float | None = None
        """Since when nothing is read from the peer, because the peer does not read."""
        self.finished = False
        """The peer was told that training is finished."""
        self._patience: Bucket | None = None
        """Made when the peer first waits for its budget, which few devices ever do."""
        self._request: bytearray | None = bytearray()
        """The HTTP request, while it is not complete."""
        self._frames = FrameCounter()
        self._unread = b""
        self._at = 0
        """How many bytes of ``_unread`` were handed on."""
        self._next: asyncio.Handle | None = None
        self._closing = False
        """A closing handshake has begun."""
        self._ended = False
        """Bytes that still arrive are thrown away."""

    # Budgets

    def allow(self, messages: int, download: int, upload: int) -> None:
        """Raise the peer's budgets to at least these: frames, bytes to fetch and bytes to send."""
        self.messages.raise_to(messages)
        self.downloads.raise_to(download)
        self.incoming.raise_to(upload + BYTE_BURST)

    # The end

    def end(self, code: int, reason: str, *, reading: bool = False) -> None:
        """Close, and cut the connection off after LINGER seconds. What still arrives is not handled, and not
        even read unless ``reading``, with which the end of a well-behaved peer is seen sooner."""
        if self._ended:
            return
        self._stop_reading()
        if reading:
            self.transport.resume_reading()
        if self.protocol.state in (State.OPEN, State.CLOSING):
            self.protocol.fail(code, reason)
            self.send_data()
        else:
            self.transport.abort()

    def _stop_reading(self) -> None:
        self._ended, self._unread = True, b""
        self.transport.pause_reading()
        self.loop.call_later(LINGER, self.transport.abort)

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Reading is decided in _set_reading alone, and never goes on within recv(): others would wait.
        self.recv_messages.pause, self.recv_messages.resume = _nothing, self._hand_on_soon

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unread = self._unread[self._at :] + data if self._unread else data
        self._at = 0
        self._hand_on()

    def process_event(self, event: Event) -> None:
        if (
            self.driver is not None
            and isinstance(event, Frame)
            and event.opcode is Opcode.BINARY
            and event.fin
            and not self.recv_messages.frames
            and self.driver.take_chunk(bytes(event.data))
        ):
            return
        super().process_event(event)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._hand_on_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._unread = True, b""
        if self._next is not None:
            self._next.cancel()
        super().connection_lost(exc)
        self._owner.lost(self)

    # Reading

    def _hand_on_soon(self, wait: float = 0.0) -> None:
        if self._next is None and not self._ended:
            self._next = self.loop.call_later(wait, self._hand_on) if wait else self.loop.call_soon(self._hand_on)

    def _hand_on(self) -> None:
        """Hand as much of the unread bytes to websockets as may be handled now."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._ended:
            return
        if self._unread and not self._full():
            if self._request is not None:
                self._hand_on_request(self._request)
            elif not (wait := self._budget()):
                self._hand_on_frames()
            elif not self._ended:
                self._hand_on_soon(wait)
        self._set_reading()

    def _full(self) -> bool:
        """Return whether messages wait to be handled, or too many answers wait for the peer to read them.
        ``_hand_on_soon`` is called when that is over."""
        if self.paused and self.transport.get_write_buffer_size() > WRITE_PAUSE:
            self.stalled = self.stalled or self.loop.time()
            return True
        self.stalled = None
        return self.recv_messages.paused

    def _set_reading(self) -> None:
        if self._ended or self._unread or self._full():
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _budget(self) -> float:
        """Return 0 if the peer has budget left, else the seconds until it has some again."""
        now = self.loop.time()
        wait = max(self.messages.wait(now, FRAMES_PER_TURN), self.incoming.wait(now, RECEIVE / 4))
        if wait:
            self._patience = self._patience or Bucket(0.5, PATIENCE, now)
            if self._patience.wait(now):
                if self.driver is not None:
                    self.driver.flooded()
                self.end(1008, "too many messages")
            self._patience.tokens -= wait
        return wait

    def _hand_on_request(self, request: bytearray) -> None:
        request += self._unread
        self._unread = b""
        found = request.find(b"\r\n\r\n")
        end = found + 4 if found >= 0 else len(request)
        if end > HANDSHAKE_BYTES:
            self.transport.abort()
        elif found >= 0:
            self._request, self._unread, self._at = None, bytes(request[end:]), 0
            super().data_received(bytes(request[:end]))
            if self._unread:
                self._hand_on_soon()

    def _hand_on_frames(self) -> None:
        data, begin = self._unread, self._at
        end, counted = self._frames.advance(data, begin, FRAMES_PER_TURN, int(self.messages.tokens))
        self.messages.tokens -= counted
        self.incoming.tokens -= end - begin
        if self._frames.fragments >= MAX_FRAGMENTS:
            self.end(1009, f"a message of more than {MAX_FRAGMENTS} fragments")
            return
        whole = end == len(data)
        if whole:
            self._unread = b""
        self._at = 0 if whole else end
        super().data_received(data if whole and begin == 0 else data[begin:end])
        if self.protocol.eof_sent and self.protocol.close_rcvd is None:  # websockets closed it because of an error
            self._stop_reading()
        elif self.protocol.state is State.CLOSING and not self._closing:
            self._closing = True
            self.loop.call_later(CLOSE_TIMEOUT, self.transport.abort)
        if self._unread:
            self._hand_on_soon()


def _nothing() -> None:
    pass
