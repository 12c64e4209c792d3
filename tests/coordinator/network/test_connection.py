"""How a connection opens and what it makes of bytes that no library would send, over real
sockets."""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import PROTOCOL_NAME, PROTOCOL_VERSION, CheckIn, Refused, Welcome
from peers import PlanMaker, serving

from benchmarks._raw_peer import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    TEXT,
    RawPeer,
    frame,
    open_stream,
    text,
)

REQUEST = (
    "GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: "
    f"Upgrade\r\nSec-WebSocket-Key: {'A' * 22}==\r\nSec-WebSocket-Version: "
    f"13\r\nSec-WebSocket-Protocol: {PROTOCOL_NAME}\r\n\r\n"
).encode()
CHECK_IN = text(CheckIn(PROTOCOL_VERSION, "a", 1))


def run_async(test: Callable[[RawPeer], Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test with a peer that has sent nothing yet."""

    def run(make_plan: PlanMaker) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30), serving(make_plan()) as coordinator:
                peer = RawPeer(*await open_stream(coordinator.host.address))
                try:
                    await test(peer)
                finally:
                    peer.abort()

        asyncio.run(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def opened(peer: RawPeer) -> None:
    assert (await peer.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")


@run_async
async def test_the_request_may_come_in_pieces(peer: RawPeer) -> None:
    for at in range(0, len(REQUEST), 50):
        await peer.send(REQUEST[at : at + 50])
        await asyncio.sleep(0.001)  # else the system may join the pieces
    await opened(peer)


@run_async
async def test_a_message_may_come_with_the_request(peer: RawPeer) -> None:
    await peer.send(REQUEST + CHECK_IN)
    await opened(peer)
    assert isinstance(await peer.hear(), Welcome)


@run_async
async def test_what_is_no_request_is_answered_by_the_end(peer: RawPeer) -> None:
    await peer.send(b"hello\r\n\r\n")
    assert await peer.reader.read() == b""


@run_async
async def test_a_refused_request_is_answered(peer: RawPeer) -> None:
    await peer.send(REQUEST.replace(PROTOCOL_NAME.encode(), b"another"))
    answer = await peer.reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid subprotocol" in answer


@run_async
async def test_text_that_is_not_utf_8_ends_the_connection(peer: RawPeer) -> None:
    """Also where a message after it came in the same read."""
    await peer.send(REQUEST + frame(TEXT, b"\xff") + CHECK_IN)
    await opened(peer)
    opcode, payload = await peer.receive()
    assert (opcode, int.from_bytes(payload[:2], "big")) == (CLOSE, 1007)
    assert await peer.reader.read() == b""


@run_async
async def test_the_type_of_a_message_is_that_of_its_first_fragment(peer: RawPeer) -> None:
    await peer.send(REQUEST + CHECK_IN)
    await opened(peer)
    assert isinstance(await peer.hear(), Welcome)
    # The letter's two bytes are in different fragments.
    await peer.send(frame(TEXT, b'{"type": "\xc3', fin=False) + frame(CONTINUATION, b'\xb6"}'))
    await peer.send(frame(BINARY, b"\xff", fin=False) + frame(CONTINUATION, b"\xff"))
    for code in (Code.UNKNOWN_TYPE, Code.BAD_FRAME):
        answer = await peer.hear()
        assert isinstance(answer, Refused)
        assert answer.code == code


@run_async
async def test_a_closing_peer_is_answered(peer: RawPeer) -> None:
    await peer.send(REQUEST + frame(CLOSE, (1000).to_bytes(2, "big")))
    await opened(peer)
    assert await peer.receive() == (CLOSE, (1000).to_bytes(2, "big"))
    assert await peer.reader.read() == b""


@run_async
async def test_compression_is_not_negotiated_and_a_bomb_is_not_unpacked(peer: RawPeer) -> None:
    offer = b"\r\nSec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
    await peer.send(REQUEST[:-4] + offer)
    head = await peer.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    assert b"extensions" not in head.lower()
    packer = zlib.compressobj(wbits=-15)
    bomb = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_SYNC_FLUSH)
    compressed = bytearray(frame(TEXT, bomb))
    compressed[0] |= 0x40  # the reserved bit 1 (RFC 7692, section 6)
    await peer.send(bytes(compressed))
    opcode, payload = await peer.receive()
    assert (opcode, int.from_bytes(payload[:2], "big")) == (CLOSE, 1002)
    assert await peer.reader.read() == b""


@run_async
async def test_a_control_frame_is_short_and_whole(peer: RawPeer) -> None:
    """RFC 6455, section 5.5: 125 bytes at most, so that a peer cannot have it kept, or answered at
    length."""
    await peer.send(REQUEST + frame(PING, bytes(126)))
    await opened(peer)
    opcode, payload = await peer.receive()
    assert (opcode, int.from_bytes(payload[:2], "big")) == (CLOSE, 1002)


def test_a_connection_that_comes_while_the_coordinator_stops_is_closed(
    make_plan: PlanMaker,
) -> None:
    """asyncio begins with it in the same turn of the loop in which the listener is closed."""
    errors: list[dict[str, Any]] = []

    async def test() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        with socket.socket() as peer:
            peer.setblocking(False)
            async with serving(make_plan()) as coordinator:
                host, _, port = coordinator.host.address.removeprefix("ws://").rpartition(":")
                await loop.sock_connect(peer, (host, int(port)))
                listener = coordinator.host._listener
                while not listener._beginning:
                    await asyncio.sleep(0)
                await listener.close()
                assert not listener.connections
            assert await loop.sock_recv(peer, 100) == b""

    asyncio.run(asyncio.wait_for(test(), 30))
    assert errors == []


def test_a_connection_that_comes_as_the_coordinator_stops_is_closed(make_plan: PlanMaker) -> None:
    """It is accepted, and its handshake has not begun."""

    async def run() -> None:
        async with serving(make_plan()) as coordinator:
            listener, address = coordinator.host._listener, urlsplit(coordinator.host.address)
            with socket.create_connection((address.hostname, address.port)) as peer:
                listener._accept(listener._listening[0])
                assert listener.connections
                await listener.close()
                assert not listener.connections
                peer.settimeout(10)
                assert await asyncio.to_thread(peer.recv, 1) == b"", "it was closed"

    asyncio.run(run())
