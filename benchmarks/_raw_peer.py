"""A WebSocket client without a WebSocket library: it can send what a library would not, also half a
frame.

It imports no other benchmark, so that tests use it too.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
from typing import Self
from urllib.parse import urlsplit

from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    CheckIn,
    FromCoordinator,
    FromDevice,
    decode_from_coordinator,
    encode,
)

CONTINUATION, TEXT, BINARY, CLOSE, PING = 0, 1, 2, 8, 9
"""Opcodes of RFC 6455, section 5.2."""


def masked_header(opcode: int, size: int, *, fin: bool = True) -> bytes:
    """Return the header of a client's frame of ``size`` bytes. Its mask is 0: masking changes no
    byte and costs nothing."""
    length = (
        bytes([0x80 | size])
        if size < 126
        else b"\xfe" + size.to_bytes(2, "big")
        if size < 1 << 16
        else b"\xff" + size.to_bytes(8, "big")
    )
    return bytes([(0x80 if fin else 0) | opcode]) + length + bytes(4)


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """Return a client's frame."""
    return masked_header(opcode, len(payload), fin=fin) + payload


def text(message: FromDevice) -> bytes:
    """Return a control message as a frame."""
    return frame(TEXT, encode(message).encode())


class RawPeer:
    """A WebSocket connection on which any bytes can be sent. What arrives stays in the buffers
    until it is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.head = b""
        """The answer to the handshake, without its text."""

    @classmethod
    async def connect(cls, address: str, **headers: str) -> Self:
        """Connect and do the handshake. Raises OSError; ConnectionError if the handshake is
        refused."""
        peer = cls(*await open_stream(address))
        try:
            status = await peer.handshake(address, **headers)
            if status != 101:
                raise ConnectionError(f"the handshake was answered with {status}")
        except BaseException:
            peer.abort()
            raise
        return peer

    async def handshake(self, address: str, **headers: str) -> int:
        """Send the HTTP request; returns the answer's status."""
        fields = {
            "Host": urlsplit(address).netloc,
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": PROTOCOL_NAME,
        } | headers
        lines = ["GET / HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        self.writer.write("\r\n".join(lines).encode())
        try:
            self.head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the connection ended in the handshake") from error
        return int(self.head.split()[1])

    async def send(self, data: bytes) -> None:
        """Write bytes; waits while the coordinator does not read. Raises ConnectionError."""
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame: its opcode and payload. Raises asyncio.IncompleteReadError,
        ConnectionError."""
        first, size = await self.reader.readexactly(2)
        if size > 125:
            size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8), "big")
        return first & 15, await self.reader.readexactly(size)

    async def hear(self) -> FromCoordinator:
        """Return the next control message."""
        while True:
            opcode, payload = await self.receive()
            if opcode == TEXT:
                return decode_from_coordinator(payload.decode())

    async def check_in(self, device: str = "") -> None:
        await self.send(
            text(CheckIn(PROTOCOL_VERSION, device or f"attacker-{random.randrange(2**40)}", 1))
        )
        await self.hear()

    async def swallow(self) -> None:
        """Read everything until the connection ends."""
        while await self.reader.read(1 << 20):
            pass

    def abort(self) -> None:
        self.writer.transport.abort()


async def open_stream(
    address: str, source: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a TCP connection to a ws:// URL. ``source``: the address that it comes from; None:
    any."""
    parts, local = urlsplit(address), None if source is None else (source, 0)
    return await asyncio.open_connection(parts.hostname, parts.port, local_addr=local)
