"""A slow link that breaks, between devices and a coordinator on this machine, and a device that
comes back each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunk, unpack_chunk
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    Accepted,
    CheckIn,
    ComeBack,
    Content,
    Fetch,
    Grant,
    Held,
    Report,
    Task,
    Uploaded,
    Waiting,
    Welcome,
    decode_from_coordinator,
    encode,
)
from fleetlearn_protocol.vector import Vector
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

PIECE = 64 * 1024
"""Bytes that cross the link at a time."""
RETRY = 0.2
"""Seconds between a device's attempts to connect."""


@dataclass
class SlowLink:
    """A TCP proxy on 127.0.0.1 with so many bytes a second in each direction of each connection."""

    port: int
    """Of the coordinator."""
    rate: float
    """Bytes a second."""
    rate_up: float | None = None
    """From devices to the coordinator. None: as ``rate``."""
    address: str = ""
    """Where devices connect, as a URL."""
    up: int = 0
    """Bytes that crossed from devices to the coordinator."""
    down: int = 0
    breaks: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    def break_now(self) -> None:
        """End all connections. What crossed the link before arrives."""
        self.breaks += bool(self._connections)
        for task in self._connections:
            task.cancel()

    async def break_each(self, seconds: float) -> None:
        """Break again and again."""
        while True:
            await asyncio.sleep(seconds)
            self.break_now()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until it ends, breaks, or the coordinator is away."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        far: asyncio.StreamWriter | None = None
        with suppress(OSError, asyncio.CancelledError):
            coordinator, far = await asyncio.open_connection("127.0.0.1", self.port)
            both = self._move(reader, far, "up"), self._move(coordinator, writer, "down")
            ways = [asyncio.ensure_future(way) for way in both]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        self._connections.discard(task)
        writer.transport.abort()
        if far is not None:
            far.close()

    async def _move(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        loop = asyncio.get_running_loop()
        free = loop.time()
        rate = self.rate_up if way == "up" and self.rate_up is not None else self.rate
        with suppress(OSError):
            while piece := await reader.read(PIECE):
                writer.write(piece)
                setattr(self, way, getattr(self, way) + len(piece))
                await writer.drain()
                free = max(free, loop.time()) + len(piece) / rate
                await asyncio.sleep(free - loop.time())


@asynccontextmanager
async def slow_link(port: int, rate: float) -> AsyncIterator[SlowLink]:
    """Have a slow link to the coordinator that listens on this port of 127.0.0.1, or will."""
    link = SlowLink(port, rate)
    server = await asyncio.start_server(link.carry, "127.0.0.1", 0)
    link.address = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        link.break_now()
        await asyncio.sleep(0)


@dataclass
class ReturningDevice:
    """A device that does one task with an update made beforehand, and comes back whenever its
    connection is lost."""

    link: SlowLink
    update: Vector
    task: Task | None = None
    model: bytearray = field(default_factory=bytearray)
    """What was fetched so far."""
    report: Report | None = None
    """Made when the model is here."""
    offsets: list[int] = field(default_factory=list)
    """Where each grant let the upload go on."""
    up_before: list[int] = field(default_factory=list)
    """Bytes that had crossed the link before each grant."""

    def came(self) -> int:
        """Return how many bytes of the update have crossed the link, without what was lost."""
        if not self.offsets:
            return 0
        return self.offsets[-1] + self.link.up - self.up_before[-1]

    async def deliver(self) -> None:
        """Return when the update was accepted."""
        while True:
            with suppress(OSError, ConnectionClosed, InvalidHandshake):
                async with connect(
                    self.link.address,
                    subprotocols=[Subprotocol(PROTOCOL_NAME)],
                    compression=None,
                    max_size=1 << 20,
                    ping_interval=None,
                ) as connection:
                    if await self._speak(connection):
                        return
            await asyncio.sleep(RETRY)

    async def _speak(self, connection: ClientConnection) -> bool:
        held = None
        if self.report is not None and self.task is not None:
            held = Held(self.task.task, self.task.round)
        await connection.send(encode(CheckIn(PROTOCOL_VERSION, "far", 10, held=held)))
        upload: asyncio.Task[None] | None = None
        try:
            async for message in connection:
                if isinstance(message, bytes):
                    self.model += unpack_chunk(message).payload
                    await self._go_on(connection)
                    continue
                match decode_from_coordinator(message):
                    case Task() as task:
                        self.task = task
                        await self._go_on(connection, fetch=True)
                    case Welcome() if held is not None:
                        await self._go_on(connection)
                    case Grant() as grant:
                        self.offsets.append(grant.offset)
                        self.up_before.append(self.link.up)
                        upload = asyncio.create_task(self._upload(connection, grant))
                    case Accepted():
                        return True
                    case ComeBack(reason="stopping"):
                        return False
                    case Welcome() | Content() | Waiting():
                        pass
                    case other:
                        raise RuntimeError(f"the coordinator sent {other}")
        finally:
            if upload is not None:
                upload.cancel()
                with suppress(asyncio.CancelledError, ConnectionClosed):
                    await upload
        return False

    async def _go_on(self, connection: ClientConnection, *, fetch: bool = False) -> None:
        """Fetch what is not here of the model, or report."""
        assert self.task is not None
        reference = self.task.vector("model")
        if len(self.model) < reference.size:
            if fetch:
                await connection.send(encode(Fetch(reference.sha256, len(self.model))))
            return
        if self.report is None:
            part = FLOAT32.part("update", self.update.tobytes())
            self.report = Report(self.task.task, self.task.round, (part,), 10, 1, 1.0, True, 1.0)
        await connection.send(encode(self.report))

    async def _upload(self, connection: ClientConnection, grant: Grant) -> None:
        content = memoryview(self.update.tobytes())
        for begin in range(grant.offset, len(content), CHUNK_BYTES):
            payload = content[begin : begin + CHUNK_BYTES]
            await connection.send(pack_chunk(grant.transfer, begin, payload))
        await connection.send(encode(Uploaded(grant.task)))
