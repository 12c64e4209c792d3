"""Target: bytes before a connection of the coordinator without a socket, which is quicker than with
one."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from fleetlearn_coordinator.conversation.limits import LARGEST_MESSAGE, RECEIVE
from fleetlearn_coordinator.network.connection import DeviceConnection
from fleetlearn_coordinator.network.listener import SUBPROTOCOLS
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from tests.fuzz.targets.sockets import DEVICES, handshake


class _Transport(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.reading = True
        self.aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        self.written += len(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.aborted = True


class _Peer:
    """Owner and handler of a connection."""

    def __init__(self) -> None:
        self.messages: list[str | bytes] = []
        self.closed_times = self.flooded_times = 0
        self.over = False

    def respond(self, connection: DeviceConnection, request: Request) -> Response:
        return connection.protocol.accept(request)

    def is_no_request(self) -> None:
        pass

    def lost(self, connection: DeviceConnection) -> None:
        self.closed_times += 1

    def received(self, message: str | bytes) -> None:
        assert len(message) <= LARGEST_MESSAGE
        self.messages.append(message)

    def flooded(self) -> None:
        self.flooded_times += 1

    def closed(self) -> None:
        raise AssertionError("the listener says that")


def stop() -> None:
    """Close the event loop."""
    _loop().close()
    _loop.cache_clear()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def streams(data: bytes) -> None:
    """The first byte says how the rest is cut: what arrives at once. ``=`` first: after a good
    handshake."""
    _loop().run_until_complete(_stream(data))


async def _stream(data: bytes) -> None:
    peer, transport = _Peer(), _Transport()
    protocol = ServerProtocol(subprotocols=SUBPROTOCOLS, max_size=LARGEST_MESSAGE)
    connection = DeviceConnection(protocol, peer)
    connection.driver = peer
    connection.connection_made(transport)
    size = 1 + (data[0] if data else 0) ** 2
    content = data[1:]
    if content[:1] == b"=":
        content = handshake(DEVICES[0]) + content[1:]
        connection.messages.tokens = 1e6
    for place in range(0, len(content), size):
        if not transport.reading or transport.aborted:
            break
        connection.data_received(content[place : place + size])
        await asyncio.sleep(0)
        assert len(connection._unread) <= RECEIVE
    for _ in range(3):
        await asyncio.sleep(0)
    connection.eof_received()
    connection.connection_lost(None)
    assert peer.closed_times == 1
    if content.startswith(handshake(DEVICES[0])):
        whole = ServerProtocol(subprotocols=SUBPROTOCOLS, max_size=LARGEST_MESSAGE)
        assert peer.messages == _messages(whole, content)[: len(peer.messages)], (
            "other messages than were sent"
        )


def _messages(protocol: ServerProtocol, content: bytes) -> list[str | bytes]:
    """Return the messages in these bytes as websockets by itself reads them, all at once."""
    end = content.index(b"\r\n\r\n") + 4
    protocol.receive_data(content[:end])
    for event in protocol.events_received():
        assert isinstance(event, Request)
        protocol.send_response(protocol.accept(event))
    protocol.receive_data(content[end:])
    found: list[str | bytes] = []
    parts: list[bytes] = []
    text = False
    for frame_ in protocol.events_received():
        assert not isinstance(frame_, Request | Response)
        if frame_.opcode in (0, 1, 2):
            text = frame_.opcode == 1 if frame_.opcode else text
            parts.append(bytes(frame_.data))
            if frame_.fin:
                whole, parts = b"".join(parts), []
                try:
                    found.append(whole.decode() if text else whole)
                except UnicodeDecodeError:
                    break
    return found
