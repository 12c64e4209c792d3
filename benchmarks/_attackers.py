"""Peers that mean harm, for attacks.py and for tests: each function attacks one coordinator until it is told to stop.

``python _attackers.py MODULE NAME ADDRESS`` runs one of them in a process of its own, until it is ended.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import itertools
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    CheckIn,
    Content,
    Failed,
    Fetch,
    FromCoordinator,
    FromDevice,
    Heartbeat,
    Part,
    Report,
    Task,
    VectorReference,
    decode_from_coordinator,
    encode,
)

Attack = Callable[[str, asyncio.Event], Awaitable[None]]

CONTINUATION, TEXT, BINARY, CLOSE, PING = 0, 1, 2, 8, 9
"""Opcodes of RFC 6455, section 5.2."""
CONNECTIONS = 4
"""Of each attack, unless it says otherwise."""


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """A client's frame. Its mask is 0, which leaves the bytes as they are."""
    size = len(payload)
    length = (
        bytes([0x80 | size])
        if size < 126
        else b"\xfe" + size.to_bytes(2, "big")
        if size < 1 << 16
        else b"\xff" + size.to_bytes(8, "big")
    )
    return bytes([(0x80 if fin else 0) | opcode]) + length + bytes(4) + payload


def text(message: FromDevice) -> bytes:
    """A message as a frame."""
    return frame(TEXT, encode(message).encode())


class Wire:
    """A WebSocket connection on which any bytes can be sent. What comes is left in the buffers until it is read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address: str, **headers: str) -> Self:
        """Raises OSError, ConnectionError where the handshake is refused."""
        wire = cls(*await open_wire(address))
        try:
            status = await wire.handshake(address, **headers)
            if status != 101:
                raise ConnectionError(f"the handshake was answered with {status}")
        except BaseException:
            wire.abort()
            raise
        return wire

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
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the connection ended in the handshake") from error
        return int(head.split()[1])

    async def send(self, data: bytes) -> None:
        """Write bytes; waits while the coordinator does not read. Raises ConnectionError."""
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """The next frame: its opcode and payload. Raises asyncio.IncompleteReadError, ConnectionError."""
        first, size = await self.reader.readexactly(2)
        if size > 125:
            size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8), "big")
        return first & 15, await self.reader.readexactly(size)

    async def hear(self) -> FromCoordinator:
        """The next control message."""
        while True:
            opcode, payload = await self.receive()
            if opcode == TEXT:
                return decode_from_coordinator(payload.decode())

    async def check_in(self, device: str = "") -> None:
        await self.send(text(CheckIn(PROTOCOL_VERSION, device or f"attacker-{random.randrange(2**40)}", 1)))
        await self.hear()

    async def swallow(self) -> None:
        """Read everything, for ever."""
        while await self.reader.read(1 << 20):
            pass

    def abort(self) -> None:
        self.writer.transport.abort()


async def open_wire(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(address)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def again_and_again(
    address: str, stop: asyncio.Event, once: Callable[[Wire], Awaitable[None]], connections: int = CONNECTIONS
) -> None:
    """Do something on several connections at a time; on new ones where the coordinator ends them."""

    async def one() -> None:
        while True:
            try:
                wire = await Wire.connect(address)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            with suppress(OSError, asyncio.IncompleteReadError):
                await once(wire)
            wire.abort()

    tasks = [asyncio.ensure_future(one()) for _ in range(connections)]
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _flood(address: str, stop: asyncio.Event, data: bytes, *, check_in: bool = True, read: bool = True) -> None:
    """Send the same frames as fast as they are taken."""

    async def once(wire: Wire) -> None:
        if check_in:
            await wire.check_in()
        reading = asyncio.ensure_future(wire.swallow()) if read else None
        try:
            while True:
                await wire.send(data)
        finally:
            if reading is not None:
                reading.cancel()

    await again_and_again(address, stop, once)


async def unread_pings(address: str, stop: asyncio.Event) -> None:
    """Pings whose pongs are not read."""
    await _flood(address, stop, 500 * frame(PING, bytes(125)), read=False)


async def pings(address: str, stop: asyncio.Event) -> None:
    """Pings whose pongs are read."""
    await _flood(address, stop, 500 * frame(PING, b"x"))


async def heartbeats(address: str, stop: asyncio.Event) -> None:
    await _flood(address, stop, 500 * text(Heartbeat()))


async def failures(address: str, stop: asyncio.Event) -> None:
    """``failed`` of a task that never was."""
    await _flood(address, stop, 500 * text(Failed("t1-1", "diverged", "x" * 1000)))


async def garbage(address: str, stop: asyncio.Event) -> None:
    """What is no message, each refused and logged."""
    await _flood(address, stop, 500 * frame(TEXT, b"{" * 1000), check_in=False)


async def chunks(address: str, stop: asyncio.Event) -> None:
    """Chunks that were never granted."""
    await _flood(address, stop, frame(BINARY, b"\1" + bytes(3) + b"\1" + bytes(1 << 17)))


async def small_chunks(address: str, stop: asyncio.Event) -> None:
    await _flood(address, stop, 500 * frame(BINARY, b"\1" + bytes(3) + b"\1" + bytes(15)))


async def fragments(address: str, stop: asyncio.Event) -> None:
    """A message without an end, in empty fragments."""

    async def once(wire: Wire) -> None:
        await wire.check_in()
        await wire.send(frame(TEXT, b"{", fin=False))
        while True:
            await wire.send(500 * frame(CONTINUATION, fin=False))

    await again_and_again(address, stop, once)


async def oversize(address: str, stop: asyncio.Event) -> None:
    """A message of 8 GiB, as much of it as is taken."""

    async def once(wire: Wire) -> None:
        await wire.send(b"\x82\xff" + (1 << 33).to_bytes(8, "big") + bytes(4))
        while True:
            await wire.send(bytes(1 << 16))

    await again_and_again(address, stop, once)


async def _with_tasks(address: str, stop: asyncio.Event, data: Callable[[Task, int], bytes]) -> None:
    """Send one message after another about the latest task, read everything."""

    async def once(wire: Wire) -> None:
        await wire.check_in()
        model = VectorReference("model", "0" * 64, 4, "float32")
        task = Task("t1-1", 1, "0" * 64, (model,), {"update": "float32"}, {}, 1, 1, 1, 1.0)  # nobody has heard of it

        async def listen() -> None:
            nonlocal task
            while True:
                message = await wire.hear()
                if isinstance(message, Task):
                    task = message

        listening = asyncio.ensure_future(listen())
        try:
            for number in itertools.count():
                await wire.send(data(task, number))
                await asyncio.sleep(0)
        finally:
            listening.cancel()

    await again_and_again(address, stop, once)


async def reports(address: str, stop: asyncio.Event) -> None:
    """One report after another of its own task, each of another update."""

    def report(task: Task, number: int) -> bytes:
        part = Part("update", "float32", task.vector("model").size, number % 2**32)
        return text(Report(task.task, task.round, (part,), 1, 1, 1.0, True, 1.0))

    await _with_tasks(address, stop, report)


async def fetches(address: str, stop: asyncio.Event) -> None:
    """The round's model again and again."""
    await _with_tasks(address, stop, lambda task, number: text(Fetch(task.vector("model").sha256)))


async def whole_fetches(address: str, stop: asyncio.Event) -> None:
    """The round's model again and again, each time to its end."""

    async def once(wire: Wire) -> None:
        await wire.check_in()
        model, left = "", 0
        while True:
            opcode, payload = await wire.receive()
            message = decode_from_coordinator(payload.decode()) if opcode == TEXT else None
            if isinstance(message, Task):
                model = message.vector("model").sha256
            elif isinstance(message, Content):
                left = message.size
            elif opcode == BINARY:
                left -= len(payload) - 16
            if model and left == 0 and not isinstance(message, Content):
                left = -1
                await wire.send(text(Fetch(model)))

    await again_and_again(address, stop, once)


async def handshakes(address: str, stop: asyncio.Event) -> None:
    """Connections that end after the handshake."""

    async def once(wire: Wire) -> None:
        pass

    await again_and_again(address, stop, once, 32)


async def returns(address: str, stop: asyncio.Event) -> None:
    """Devices that check in, leave and return."""
    names = itertools.count()

    async def once(wire: Wire) -> None:
        await wire.check_in(f"returns-{next(names) % 16}")

    await again_and_again(address, stop, once, 32)


async def idle(address: str, stop: asyncio.Event) -> None:
    """Some thousand connections that say nothing, not even in HTTP."""

    async def hold() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await open_wire(address)
                with suppress(OSError):
                    await reader.read()
                writer.transport.abort()
            await asyncio.sleep(0.05)

    tasks = [asyncio.ensure_future(hold()) for _ in range(3000)]
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


ATTACKS: tuple[Attack, ...] = (
    unread_pings, pings, heartbeats, failures, garbage, chunks, small_chunks, fragments, oversize, reports, fetches,
    whole_fetches, handshakes, returns, idle,
)  # fmt: skip


def main(arguments: Iterable[str]) -> None:
    module, name, address = arguments
    attack: Attack = getattr(importlib.import_module(module), name)
    asyncio.run(attack(address, asyncio.Event()))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
