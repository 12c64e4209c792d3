"""A WebSocket connection that handles only as much from its peer as the bounds of limits.py allow.

The frames and the handshake are those of websockets' ServerProtocol, which does no I/O. It is given
a few frames at a time; in between, other connections have their turn. websockets' own asyncio
connection is not used: it handles all frames of one read (up to 40,000) at once, answers pings
however much waits to be written, and wakes a task for each message. Here a message is handled as
soon as it is read, and a connection has no task.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Protocol

from websockets.frames import DATA_OPCODES, CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import BytesLike

from fleetlearn_coordinator.conversation.limits import (
    BYTE_BURST,
    BYTE_RATE,
    CLOSE_TIMEOUT,
    DOWNLOAD_RATE,
    DRAIN_ABOVE,
    FRAMES_PER_TURN,
    HANDSHAKE_BYTES,
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
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.network.addresses import NOTHING, AddressUse
from fleetlearn_coordinator.network.device_budgets import Budgets
from fleetlearn_coordinator.network.frame_counter import FrameCounter
from fleetlearn_coordinator.storage.identities import Known

TLS_BEGIN = b"\x16\x03"
"""How a TLS handshake begins: the record type "handshake", and the protocol's major version."""
NO_TLS = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class ConnectionOwner(Protocol):
    """The listener that accepted a connection, as the connection sees it."""

    def respond(
        self, connection: DeviceConnection, request: Request
    ) -> Response | Pending[Response]:
        """Return the answer to the request that opens the connection, here or later, and set its
        ``known``."""

    def speaks_tls(self, connection: DeviceConnection) -> None:
        """The peer begins a TLS handshake, and this port has no TLS. The connection is ended
        now."""

    def is_no_request(self) -> None:
        """The peer sent what is no request of HTTP, or too long a one. The connection is ended
        now."""

    def lost(self, connection: DeviceConnection) -> None:
        """The connection is closed."""


class Handler(Protocol):
    """Who handles a connection's messages."""

    def received(self, message: str | bytes) -> None:
        """A message is complete. More may come until ``closed``, even if the connection is ended
        now."""

    def flooded(self) -> None:
        """The peer has waited for its budget for too long. Called once; the connection is ended
        then."""

    def closed(self) -> None:
        """The connection is closed. Called once."""

    def cut_cycles(self) -> None:
        """Called last, so that the handler may drop what refers to it."""


class DeviceConnection(asyncio.Protocol):
    """Hands frames to websockets within the budgets of limits.py, a few in each turn of the event
    loop."""

    driver: Handler
    """Set by the listener, before anything arrives."""
    transport: asyncio.Transport

    def __init__(
        self, protocol: ServerProtocol, owner: ConnectionOwner, message_rate: float = MESSAGE_RATE
    ) -> None:
        self.protocol, self._owner = protocol, owner
        self.loop = asyncio.get_running_loop()
        self.since = now = self.loop.time()
        """When the connection was accepted."""
        self.messages = Bucket(message_rate, MESSAGE_BURST, now, MESSAGES_BEFORE_CHECK_IN)
        self.incoming = Bucket(BYTE_RATE, BYTE_BURST, now, LARGEST_MESSAGE)
        self.downloads = Bucket(DOWNLOAD_RATE, BYTE_BURST, now, 0)
        self.paused = False
        """The peer does not read, and bytes wait to be written."""
        self.stalled: float | None = None
        """Since when nothing is read from the peer, because the peer does not read."""
        self._held = False
        """No message is handed on: an earlier one waits for an answer."""
        self.known: Known | None = None
        """The device that the peer's credential is of, where credentials are asked for."""
        self.address = ""
        """Where the peer is, as far as it is known: a proxy, until the request says for whom."""
        self.use: AddressUse | None = None
        """What the peer's address has spent; None if it has no limits."""
        self.newcomer = True
        """The peer has not checked in."""
        self.refused = False
        """The request was refused because of the limits of its address or device."""
        self.sent_away = ""
        """Why the peer was told to come back later: the reason of a come-back."""
        self._booked = NOTHING
        """Frames and bytes that were booked of the address's budgets while the peer waited for its
        turn."""
        self._socket_transport: asyncio.BaseTransport | None = None
        """The transport, or the one below TLS."""
        self._drained: asyncio.Future[None] | None = None
        """Set when the peer has read most of what waits. None while nobody waits."""
        self._patience: Bucket | None = None
        """Made when the peer first waits for its budget, which few devices ever do."""
        self._request: bytes | None = b""
        """The HTTP request, while it is not complete."""
        self._frames = FrameCounter()
        self._fragments: tuple[Frame, ...] = ()
        """The frames of a message that is not complete."""
        self._unread = b""
        self._at = 0
        """How many bytes of ``_unread`` were handed on."""
        self._next: asyncio.Handle | None = None
        self._closing = False
        """A closing handshake has begun."""
        self._ended = False
        """Bytes that still arrive are thrown away."""
        self._forgotten = False
        """The listener has forgotten the connection."""

    @property
    def made(self) -> bool:
        """Whether there is a transport. While TLS shakes hands there is none, and the listener
        bounds the time."""
        return self._socket_transport is not None

    @property
    def open(self) -> bool:
        """Whether messages can be sent: after the opening handshake, and before the closing one."""
        return self.protocol.state is State.OPEN

    # Budgets

    def allow(self, messages: int, download: int, upload: int) -> None:
        """Raise the peer's budgets to at least these: frames, bytes to fetch and bytes to send."""
        self.messages.raise_to(messages)
        self.downloads.raise_to(download)
        self.incoming.raise_to(upload + BYTE_BURST)

    def budgets(self) -> Budgets:
        """Return what the device has left."""
        return Budgets(self.messages, self.incoming, self.downloads)

    def go_on_with(self, budgets: Budgets) -> None:
        """Give the peer what its device has left of an earlier connection."""
        self.messages, self.incoming, self.downloads = budgets

    # Writing

    def send(self, text: str) -> None:
        """Send a text message, if the connection is open. What the peer does not read waits in the
        write buffer."""
        if self.protocol.state is State.OPEN:
            self.protocol.send_text(text.encode())
            self._write()

    async def drain(self) -> None:
        """Wait until the peer has read most of what was written, or the connection is closed."""
        while self.paused:
            if self._drained is None:
                self._drained = self.loop.create_future()
            await asyncio.shield(self._drained)

    def _write(self) -> None:
        """Write what websockets has to send: messages, answers to pings, closing frames."""
        for data in self.protocol.data_to_send():
            if data:
                self.transport.write(data)
            elif self.transport.can_write_eof():
                with suppress(OSError):  # the peer has gone already
                    self.transport.write_eof()
            else:  # TLS has no half-closed connection
                self.transport.close()

    def _writable(self) -> None:
        self.paused = False
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    # The end

    def close(self, code: int, reason: str) -> None:
        """Close in an orderly way: what was sent before goes out first. What arrives meanwhile is
        handled."""
        if self.protocol.state is State.OPEN:
            self.protocol.send_close(code, reason)
            self._write()
            self._limit_closing()

    def end(self, code: int, reason: str, *, reading: bool = False) -> None:
        """Close, and cut the connection off after LINGER seconds. What still arrives is not
        handled, and not even read unless ``reading``, with which the end of a well-behaved peer is
        seen sooner."""
        if self._ended:
            return
        self._stop_handling(reading)
        if self.protocol.state in (State.OPEN, State.CLOSING):
            self.protocol.fail(code, reason)
            self._write()
        else:
            self.transport.abort()

    def _stop_handling(self, reading: bool = False) -> None:
        self._ended, self._unread = True, b""
        if reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
        self.loop.call_later(LINGER, self.transport.abort)

    def _limit_closing(self) -> None:
        if not self._closing:
            self._closing = True
            self.loop.call_later(CLOSE_TIMEOUT, self.transport.abort)

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent. There are none before ``connection_made``: asyncio calls it
        one turn of the event loop after the connection is known."""
        transport: asyncio.Transport | None = getattr(self, "transport", None)
        return 0 if transport is None else transport.get_write_buffer_size()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._socket_transport = getattr(
            getattr(transport, "_ssl_protocol", None), "_transport", transport
        )
        transport.set_write_buffer_limits(DRAIN_ABOVE)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unread = self._unread[self._at :] + data if self._unread else data
        self._at = 0
        self._hand_on()

    def eof_received(self) -> None:
        self.protocol.receive_eof()
        self._write()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self._writable()
        self._hand_on_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._unread = True, b""
        if self._next is not None:
            self._next.cancel()
        if self._forgotten:  # the listener was closed while asyncio began with the connection
            return
        self.protocol.receive_eof()
        self._writable()
        self._owner.lost(self)

    def cut_cycles(self) -> None:
        """Let what belongs to the connection, which is closed, be freed now.

        Else it waits for the garbage collector, which runs rarely
        (``process_settings.collect_garbage_rarely``): some 30 objects and 4 KiB each, until 1,800
        connections have ended, or 36,000 where it ran while they were open, or four million where
        it ran often."""
        self._forgotten = True
        self.driver.cut_cycles()
        del self.driver
        # asyncio's transport refers to itself by this attribute.
        getattr(self._socket_transport, "__dict__", {}).pop("_read_ready_cb", None)
        self.protocol.parser.close()
        for error in (self.protocol.handshake_exc, self.protocol.parser_exc):
            if error is not None:
                error.__traceback__ = None

    # Reading

    def hold(self) -> None:
        """Hand on no message until ``go_on``, except those that are being handled now, of
        FRAMES_PER_TURN frames at most. Once more bytes have come, nothing is read."""
        self._held = True

    def go_on(self) -> None:
        """Hand on messages again, soon."""
        if self._held:
            self._held = False
            self._hand_on_soon()

    def _hand_on_soon(self, wait: float = 0.0) -> None:
        if self._next is None and not self._ended:
            self._next = (
                self.loop.call_later(wait, self._hand_on)
                if wait
                else self.loop.call_soon(self._hand_on)
            )

    def _hand_on(self) -> None:
        """Hand as much of the unread bytes to websockets as may be handled now."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._ended:
            return
        if self._unread and not self._held and not self._full():
            if self._request is not None:
                self._hand_on_request(self._request)
            elif not (wait := self._budget()):
                self._hand_on_frames()
            elif not self._ended:
                self._hand_on_soon(wait)
        self._set_reading()

    def _full(self) -> bool:
        """Return whether too many answers wait for the peer to read them. ``_hand_on_soon`` is
        called when that is over."""
        if self.paused and self.transport.get_write_buffer_size() > WRITE_PAUSE:
            self.stalled = self.stalled or self.loop.time()
            return True
        self.stalled = None
        return False

    def _set_reading(self) -> None:
        if self._ended:
            return
        if self._unread or self._full():
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
                self.driver.flooded()
                self.end(1008, "too many messages")
            self._patience.tokens -= wait
        elif self.use is not None and self._booked is NOTHING:
            # others share the address: it is no fault of this peer
            wait, self._booked = self.use.wait(now)
        return wait

    def _charge(self, use: AddressUse, frames: int, size: int) -> None:
        """Charge the address for what was handed on. The bytes that a task asked for are not
        charged."""
        size = min(size, max(0, round(self.incoming.burst - self.incoming.tokens)))
        use.messages.tokens -= frames - self._booked[0]
        use.bytes.tokens -= size - self._booked[1]
        self._booked = NOTHING

    def _hand_on_request(self, request: bytes) -> None:
        request += self._unread
        found = request.find(b"\r\n\r\n")
        end = found + 4 if found >= 0 else len(request)
        if request.startswith(TLS_BEGIN):
            self._owner.speaks_tls(self)
            # no TLS either: the peer's own error names a wrong version, at once
            self.transport.write(NO_TLS)
            self.transport.close()
        elif end > HANDSHAKE_BYTES:
            self._owner.is_no_request()
            self.transport.abort()
        elif found < 0:
            self._request, self._unread = request, b""
        else:
            self._request, self._unread, self._at = None, request[end:], 0
            self._answer(request[:end])
            if self._unread:
                self._hand_on_soon()

    def _answer(self, request: bytes) -> None:
        """Answer the request that opens the connection."""
        self.protocol.receive_data(request)
        events = self.protocol.events_received()
        if not events:  # websockets has refused what is no request
            self._owner.is_no_request()
        for event in events:
            assert isinstance(event, Request)
            response = self._owner.respond(self, event)
            if isinstance(response, Pending):
                self._held = True  # what else it sends waits
                response.then(partial(self._respond, response))
                return
            self.protocol.send_response(response)
        self._answered()

    def _respond(self, response: Pending[Response], now: float) -> None:
        """Send the answer to the request, which came later."""
        if not self._ended:
            self._held = False
            self.protocol.send_response(response.result())
            self._answered()
            self._hand_on_soon()

    def _answered(self) -> None:
        self._write()
        if self.protocol.state is not State.OPEN:
            self._stop_handling(reading=True)

    def _hand_on_frames(self) -> None:
        data, begin = self._unread, self._at
        end, counted = self._frames.advance(data, begin, FRAMES_PER_TURN, int(self.messages.tokens))
        self.messages.tokens -= counted
        self.incoming.tokens -= end - begin
        if self.use is not None:
            self._charge(self.use, counted, end - begin)
        if self._frames.fragments >= MAX_FRAGMENTS:
            self.end(1009, f"a message of more than {MAX_FRAGMENTS} fragments")
            return
        whole = end == len(data)
        if whole:
            self._unread = b""
        self._at = 0 if whole else end
        self._handle(data if whole and begin == 0 else data[begin:end])
        if self._ended:
            return
        # websockets closed it because of an error
        if self.protocol.eof_sent and self.protocol.close_rcvd is None:
            self._stop_handling()
        elif self.protocol.state is State.CLOSING:
            self._limit_closing()
        if self._unread:
            self._hand_on_soon()

    def _handle(self, data: bytes) -> None:
        """Handle the messages that are complete with these bytes."""
        self.protocol.receive_data(data)
        events = self.protocol.events_received()
        self._write()
        for frame in events:
            assert isinstance(frame, Frame)
            if frame.opcode in DATA_OPCODES and not self._ended:
                if frame.fin and not self._fragments:
                    self._deliver(frame.opcode, frame.data)
                    continue
                self._fragments += (frame,)
                if frame.fin:
                    first, payload = (
                        self._fragments[0],
                        b"".join([part.data for part in self._fragments]),
                    )
                    self._fragments = ()
                    self._deliver(first.opcode, payload)

    def _deliver(self, opcode: Opcode, payload: BytesLike) -> None:
        try:
            message = bytes(payload) if opcode is Opcode.BINARY else str(payload, "utf-8")
        except UnicodeDecodeError as error:
            self.end(CloseCode.INVALID_DATA, f"{error.reason} at position {error.start}")
        else:
            self.driver.received(message)
