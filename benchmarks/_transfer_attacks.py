"""Attacks on the places of transfers, by peers that take places and hardly use them. Each runs
until ``stop`` is set.

Otherwise an attacker keeps to the protocol: it sends heartbeats, takes the tasks that it is given,
and connects again when it is cut off. ``address`` is the coordinator's ws:// URL. The round's
cohort must have room for the attackers beside the honest devices (over_selection = 15 for six), or
the attackers also take their tasks.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.manifest_file import read_manifest
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    CheckIn,
    Content,
    Failed,
    Fetch,
    FromCoordinator,
    FromDevice,
    Grant,
    Heartbeat,
    Part,
    Report,
    Task,
    Waiting,
    decode_from_coordinator,
    encode,
)
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.typing import Subprotocol

PAUSE = 0.2
"""Seconds until an attacker that was cut off connects again."""
BEAT = 5.0
"""Seconds between an attacker's heartbeats."""


async def crawling_uploads(
    address: str,
    stop: asyncio.Event,
    *,
    count: int = 16,
    every: float = 10.0,
    size: int = 4,
    new_names: bool = False,
) -> None:
    """Report at once, take the grant, and send ``size`` bytes of it each ``every`` seconds.
    ``new_names``: each round comes another connection with another name."""

    async def crawl(number: int) -> None:
        name = f"crawler-{secrets.token_hex(4)}" if new_names else f"crawler-{number}"
        async with _checked_in(address, name) as connection:
            reported: Report | None = None
            sending: asyncio.Task[None] | None = None
            try:
                async for message in _messages(connection):
                    match message:
                        case Task():
                            if reported is not None and new_names:
                                return
                            reported = _report(message)
                            await _send(connection, reported)
                        case Waiting(task=str()) if reported is not None:
                            if sending is not None:
                                sending.cancel()
                            await _send(connection, reported)
                        case Grant(transfer=transfer, offset=offset):
                            if sending is not None:
                                sending.cancel()
                            sending = asyncio.create_task(
                                _crawl(connection, transfer, offset, every, size)
                            )
            finally:
                if sending is not None:
                    sending.cancel()

    await _many(crawl, count, stop)


async def silent_uploads(
    address: str, stop: asyncio.Event, *, count: int = 16, new_names: bool = False
) -> None:
    """Report at once, take the grant, and send nothing."""
    await crawling_uploads(address, stop, count=count, every=1e6, size=0, new_names=new_names)


async def slow_readers(
    address: str, stop: asyncio.Event, *, count: int = 64, rate: float = 1024.0, lease: bool = False
) -> None:
    """Fetch the bundle's largest file again and again, and read ``rate`` bytes a second. Without
    ``lease`` each gives its task back before it fetches, and gets no other; the others keep
    theirs."""
    sha256 = await _largest_file(address)

    async def read(number: int) -> None:
        reader = _SlowReader(address)
        try:
            await reader.open(CheckIn(PROTOCOL_VERSION, f"reader-{number}", 1))
            while not lease:
                tasks = [message for message in await reader.hear() if isinstance(message, Task)]
                if tasks:
                    await reader.send(Failed(tasks[-1].task, "stopping"))
                    break
            for _ in range(3):  # one replaces another, which may be seen as one more
                await reader.send(Fetch(sha256))
            next_beat = 0.0
            while True:
                await reader.read(rate)
                if (now := asyncio.get_running_loop().time()) > next_beat:
                    await reader.send(Heartbeat())
                    next_beat = now + BEAT
        finally:
            reader.close()

    await _many(read, count, stop)


async def slow_readers_without_a_task(address: str, stop: asyncio.Event) -> None:
    """320 of them."""
    await slow_readers(address, stop, count=320)


async def slow_readers_with_a_task(address: str, stop: asyncio.Event) -> None:
    """The attack of ``crawling_uploads`` with 64 attackers that take new names."""
    await slow_readers(address, stop, count=64, lease=True)


async def crawling_uploads_of_new_names(address: str, stop: asyncio.Event) -> None:
    """The attack of ``crawling_uploads`` with 64 attackers that take new names."""
    await crawling_uploads(address, stop, count=64, new_names=True)


ATTACKS: tuple[Callable[[str, asyncio.Event], Coroutine[Any, Any, None]], ...] = (
    crawling_uploads,
    crawling_uploads_of_new_names,
    silent_uploads,
    slow_readers_without_a_task,
    slow_readers_with_a_task,
)


async def _many(
    attack: Callable[[int], Coroutine[Any, Any, None]], count: int, stop: asyncio.Event
) -> None:
    """Run ``count`` attackers, each again and again, until ``stop`` is set."""

    async def again(number: int) -> None:
        while True:
            with suppress(OSError, WebSocketException, EOFError):
                await attack(number)
            await asyncio.sleep(PAUSE)

    attackers = [asyncio.create_task(again(number)) for number in range(count)]
    await stop.wait()
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)


@asynccontextmanager
async def _checked_in(address: str, name: str) -> AsyncIterator[ClientConnection]:
    async with connect(
        address,
        subprotocols=[Subprotocol(PROTOCOL_NAME)],
        compression=None,
        max_size=1 << 20,
        close_timeout=0.1,
    ) as connection:
        await _send(connection, CheckIn(PROTOCOL_VERSION, name, 1))
        beating = asyncio.create_task(_beat(connection))
        try:
            yield connection
        finally:
            beating.cancel()


async def _beat(connection: ClientConnection) -> None:
    with suppress(WebSocketException):
        while True:
            await asyncio.sleep(BEAT)
            await _send(connection, Heartbeat())


async def _messages(connection: ClientConnection) -> AsyncIterator[FromCoordinator]:
    async for message in connection:
        if isinstance(message, str):
            yield decode_from_coordinator(message)


async def _send(connection: ClientConnection, message: FromDevice) -> None:
    await connection.send(encode(message))


async def _crawl(
    connection: ClientConnection, transfer: int, offset: int, every: float, size: int
) -> None:
    with suppress(WebSocketException):
        while size:
            await connection.send(pack_chunk(transfer, offset, bytes(size)))
            offset += size
            await asyncio.sleep(every)


def _report(task: Task) -> Report:
    part = Part("update", "float32", task.vector("model").size, 0)
    return Report(task.task, task.round, (part,), 1, 1, 1.0, True, 1.0)


async def _largest_file(address: str) -> str:
    """Return the SHA-256 of the bundle's largest file. A device takes part until it has the
    manifest, which says."""
    async with _checked_in(address, "scout") as connection:
        manifest, size = bytearray(), -1
        async for message in connection:
            if isinstance(message, bytes):
                manifest += message[16:]
                if len(manifest) == size:
                    files = read_manifest(bytes(manifest)).files
                    return max(files.values(), key=lambda file: file.size).sha256
                continue
            match decode_from_coordinator(message):
                case Task(task=task, bundle=bundle):
                    await _send(connection, Failed(task, "stopping"))
                    await _send(connection, Fetch(bundle))
                case Content(size=size):
                    pass
    raise RuntimeError("the coordinator gave the scout no task")


class _SlowReader:
    """A WebSocket on a bare socket, whose kernel buffer is small: what it does not read stays with
    the coordinator."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        assert parts.hostname is not None
        assert parts.port is not None
        self._at = (parts.hostname, parts.port)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()

    async def open(self, check_in: CheckIn) -> None:
        await self._loop.sock_connect(self._socket, self._at)
        host, port = self._at
        request = (
            f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: "
            "Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: "
            f"13\r\nSec-WebSocket-Protocol: {PROTOCOL_NAME}\r\n\r\n"
        )
        await self._loop.sock_sendall(self._socket, request.encode())
        while b"\r\n\r\n" not in self._received:
            self._received += await self._some(1024)
        self._received = self._received.partition(b"\r\n\r\n")[2]
        await self.send(check_in)

    async def send(self, message: FromDevice) -> None:
        frame = Frame(Opcode.TEXT, encode(message).encode())
        await self._loop.sock_sendall(self._socket, frame.serialize(mask=True))

    async def hear(self) -> list[FromCoordinator]:
        """Read what is there, or comes next. Returns the control messages among it."""
        self._received += await self._some(1 << 16)
        return self._parse()

    async def read(self, rate: float) -> None:
        """Read for a second, and forget it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._some(int(rate))
                await asyncio.sleep(1.0)

    async def _some(self, most: int) -> bytes:
        data = await self._loop.sock_recv(self._socket, most)
        if not data:
            raise EOFError("closed by the coordinator")
        return data

    def _parse(self) -> list[FromCoordinator]:
        messages: list[FromCoordinator] = []
        for _ in itertools.count():
            data = self._received
            if len(data) < 2:
                break
            length, head = data[1] & 127, 2
            if length >= 126:
                head = 4 if length == 126 else 10
                length = int.from_bytes(data[2:head])
            if len(data) < head + length:
                break
            if data[0] & 15 == Opcode.TEXT:
                messages.append(decode_from_coordinator(bytes(data[head : head + length])))
            del data[: head + length]
        return messages

    def close(self) -> None:
        self._socket.close()
