"""For tests: a coordinator on a real socket that does, message by message, what the test says."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import MAX_FRAME_BYTES, pack_chunk, unpack_chunk
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    Accepted,
    CheckIn,
    Content,
    Fetch,
    FromCoordinator,
    FromDevice,
    Grant,
    Heartbeat,
    Report,
    Task,
    Uploaded,
    Welcome,
    decode_from_device,
    encode,
)
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

PATIENCE = 20.0
"""Seconds after which waiting for the device is a failure."""

Kind = TypeVar("Kind", bound=FromDevice)


class Line:
    """One connection of the device."""

    def __init__(self, connection: ServerConnection, contents: Mapping[str, bytes]) -> None:
        self.connection, self.contents = connection, contents
        self.released = asyncio.Event()
        self.heartbeats: list[Heartbeat] = []
        self.fetches: list[Fetch] = []

    async def say(self, message: FromCoordinator | str | bytes) -> None:
        await self.connection.send(message if isinstance(message, str | bytes) else encode(message))

    async def hear(self) -> FromDevice | bytes:
        """The next message other than a heartbeat."""
        async with asyncio.timeout(PATIENCE):
            while True:
                frame = await self.connection.recv()
                if isinstance(frame, bytes):
                    return frame
                message = decode_from_device(frame)
                if not isinstance(message, Heartbeat):
                    return message
                self.heartbeats.append(message)

    async def expect(self, kind: type[Kind]) -> Kind:
        message = await self.hear()
        assert isinstance(message, kind), f"{message!r:.300} came; expected {kind.__name__}"
        return message

    async def check_in(
        self, *, heartbeat: float = 5.0, chunk_bytes: int = MAX_FRAME_BYTES - 16
    ) -> CheckIn:
        check_in = await self.expect(CheckIn)
        await self.say(Welcome("scripted", heartbeat, chunk_bytes))
        return check_in

    async def send_content(
        self, fetch: Fetch, *, chunk: int = 4096, stop_after: int | None = None
    ) -> None:
        """Answer a fetch; ``stop_after`` bytes or more, go no further."""
        content, transfer = self.contents[fetch.sha256], 1 + list(self.contents).index(fetch.sha256)
        await self.say(Content(transfer, fetch.sha256, len(content), fetch.offset))
        for start in range(fetch.offset, len(content), chunk):
            if stop_after is not None and start >= stop_after:
                return
            await self.say(pack_chunk(transfer, start, content[start : start + chunk]))

    async def answer_fetches(self, until: type[Kind]) -> Kind:
        while True:
            message = await self.hear()
            if isinstance(message, until):
                return message
            assert isinstance(message, Fetch), (
                f"{message!r:.300} came; expected Fetch or {until.__name__}"
            )
            self.fetches.append(message)
            await self.send_content(message)

    async def take_upload(
        self, report: Report, offset: int = 0, *, transfer: int = 7, bytes_: int | None = None
    ) -> bytes:
        """Grant the upload and take its bytes: all of them and ``uploaded``, or the first
        ``bytes_`` or more."""
        await self.say(Grant(report.task, transfer, offset))
        taken = bytearray()
        while offset + len(taken) < report.size:
            frame = await self.hear()
            assert isinstance(frame, bytes), frame
            chunk = unpack_chunk(frame)
            assert (chunk.transfer, chunk.offset) == (transfer, offset + len(taken))
            taken += chunk.payload
            if bytes_ is not None and len(taken) >= bytes_:
                return bytes(taken)
        assert await self.expect(Uploaded) == Uploaded(report.task)
        return bytes(taken)

    async def accept(self, report: Report) -> bytes:
        """Take the upload and accept it. Returns its bytes: the update's, and then the other
        parts'."""
        upload, begin = await self.take_upload(report), 0
        for part in report.parts:
            assert zlib.crc32(upload[begin : begin + part.size]) == part.crc32
            begin += part.size
        await self.say(Accepted(report.task))
        return upload

    def cut(self) -> None:
        """Cut the connection as a cable would: without a closing handshake."""
        self.connection.transport.abort()
        self.released.set()

    async def closed(self) -> int | None:
        """Wait until the device has closed. Returns the closing code."""
        async with asyncio.timeout(PATIENCE):
            try:
                while True:
                    await self.connection.recv()
            except ConnectionClosed as closed:
                self.released.set()
                return closed.rcvd.code if closed.rcvd is not None else None


class Scripted:
    """The coordinator: hands the test each connection that the device makes."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self.contents = contents
        self.port = 0
        self.lines: list[Line] = []
        self._new: asyncio.Queue[Line] = asyncio.Queue()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def line(self) -> Line:
        """The device's next connection."""
        async with asyncio.timeout(PATIENCE):
            return await self._new.get()

    async def _handle(self, connection: ServerConnection) -> None:
        line = Line(connection, self.contents)
        self.lines.append(line)
        self._new.put_nowait(line)
        await line.released.wait()


@asynccontextmanager
async def scripted(
    contents: Mapping[str, bytes] | None = None, port: int = 0, **options: Any
) -> AsyncIterator[Scripted]:
    """A coordinator that serves ``contents`` (by SHA-256), listening on 127.0.0.1."""
    coordinator = Scripted(contents or {})
    async with serve(
        coordinator._handle,
        None if "sock" in options else "127.0.0.1",
        None if "sock" in options else port,
        compression=None,
        subprotocols=[Subprotocol(PROTOCOL_NAME)],
        max_size=MAX_FRAME_BYTES,
        close_timeout=1,
        **options,
    ) as server:
        coordinator.port = next(iter(server.sockets)).getsockname()[1]
        try:
            yield coordinator
        finally:
            for line in coordinator.lines:
                line.cut()


class Served:
    """A bundle as a coordinator serves it."""

    def __init__(self, path: Path) -> None:
        self.bundle = open_bundle(path)
        self.model = self.bundle.parameters()[: self.bundle.manifest.size]
        self.contents = {self.bundle.sha256: self.bundle.read("manifest.json")}
        for file, entry in self.bundle.manifest.files.items():
            self.contents[entry.sha256] = self.bundle.read(file)
        self.contents[self.model_sha256] = self.model.tobytes()

    @property
    def model_sha256(self) -> str:
        return hashlib.sha256(self.model.tobytes()).hexdigest()

    def file(self, name: str) -> str:
        return self.bundle.manifest.file(name).sha256

    def task(self, name: str = "t1", **changes: Any) -> Task:
        settings: dict[str, Any] = {
            "round": 1,
            "parts": dict.fromkeys(
                ["update", "buffers"] if self.bundle.manifest.buffers else ["update"], "float32"
            ),
            "hyper": {"lr": 0.1, "mu": 0.01},
            "epochs": 2,
            "batch_size": 8,
            "seed": 5,
            "deadline": 300.0,
        } | changes
        model = FLOAT32.reference("model", self.model)
        return Task(name, bundle=self.bundle.sha256, vectors=(model,), **settings)


@contextmanager
def small_buffers() -> Iterator[socket.socket]:
    """A listening socket whose connections take little before their reader reads."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening
