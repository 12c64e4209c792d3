"""The floor that connections.py compares with: a coordinator with nothing behind it.

It speaks the same messages over the same ``websockets`` settings to the same devices, over TLS
where it is given a certificate and its key, sends the same bytes and adds the updates up in
float32. It has no engine, no database, no disk, no check of
anything, and no exact sum.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
from collections import deque
from dataclasses import dataclass

import numpy as np
from fleetlearn_coordinator.conversation.limits import LARGEST_MESSAGE
from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.network.transfers.contents import FramedContent as Frames
from fleetlearn_protocol.frames import CHUNK_BYTES, unpack_chunk
from fleetlearn_protocol.messages import (
    Accepted,
    CheckIn,
    ComeBack,
    Content,
    Fetch,
    FromCoordinator,
    Grant,
    Report,
    Task,
    Uploaded,
    VectorReference,
    Welcome,
    decode_from_device,
    encode,
)
from websockets.asyncio.server import ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed

UPLOADS, DOWNLOADS = 16, 64
"""As the plan's defaults."""


@dataclass
class Round:
    """The one round, for ``devices`` devices and a model of ``size`` float32."""

    devices: int
    size: int

    def __post_init__(self) -> None:
        model = np.zeros(self.size, np.float32)
        self.frames = list(Frames(1, model.data.cast("B")).frames(0))
        self.total, self.product = np.zeros((2, self.size), np.float32)
        self.connections: list[ServerConnection] = []
        self.waiting: deque[tuple[ServerConnection, str]] = deque()
        self.uploading = self.accepted = 0
        self.downloads = asyncio.Semaphore(DOWNLOADS)
        self.running: set[asyncio.Task[None]] = set()

    async def converse(self, connection: ServerConnection) -> None:
        try:
            while True:
                message = await connection.recv()
                if isinstance(message, bytes):
                    self._add(message)
                else:
                    self._answer(connection, message)
        except ConnectionClosed:
            pass

    def _add(self, message: bytes) -> None:
        chunk = unpack_chunk(message)
        part = np.frombuffer(chunk.payload, np.float32)
        elements = slice(chunk.offset // 4, chunk.offset // 4 + len(part))
        np.multiply(part, np.float32(1 / self.devices), out=self.product[elements])
        np.add(self.total[elements], self.product[elements], out=self.total[elements])

    def _answer(self, connection: ServerConnection, message: str) -> None:
        match decode_from_device(message):
            case CheckIn():
                _send(connection, Welcome("bare", 60.0, CHUNK_BYTES))
                self.connections.append(connection)
                if len(self.connections) == self.devices:
                    model = VectorReference("model", "0" * 64, 4 * self.size, "float32")
                    for number, other in enumerate(self.connections):
                        _send(
                            other,
                            Task(
                                f"t{number}",
                                1,
                                "0" * 64,
                                (model,),
                                {"update": "float32"},
                                {},
                                1,
                                20,
                                0,
                                600.0,
                            ),
                        )
            case Fetch(sha256):
                download = asyncio.create_task(self._download(connection, sha256))
                self.running.add(download)
                download.add_done_callback(self.running.discard)
            case Report(name):
                self.waiting.append((connection, name))
                self._grant()
            case Uploaded(name):
                _send(connection, Accepted(name))
                self.uploading -= 1
                self.accepted += 1
                self._grant()
                if self.accepted == self.devices:
                    for other in self.connections:
                        _send(other, ComeBack(1.0, "finished"))

    async def _download(self, connection: ServerConnection, sha256: str) -> None:
        async with self.downloads:
            _send(connection, Content(1, sha256, 4 * self.size, 0))
            for frame in self.frames:
                await connection.drain()
                await asyncio.sleep(0)
                connection.transport.write(frame)

    def _grant(self) -> None:
        while self.waiting and self.uploading < UPLOADS:
            connection, name = self.waiting.popleft()
            self.uploading += 1
            _send(connection, Grant(name, 1, 0))


def _send(connection: ServerConnection, message: FromCoordinator) -> None:
    broadcast((connection,), encode(message))


async def main(devices: int, size: int, *tls: str) -> None:
    """Listen until SIGTERM. ``tls``: the files of a certificate and of its key, or nothing."""
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
    process_settings.keep_freed_memory()
    process_settings.raise_file_limit()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with serve(
        Round(devices, size).converse,
        "127.0.0.1",
        0,
        ssl=context,
        backlog=process_settings.BACKLOG,
        compression=None,
        max_size=LARGEST_MESSAGE,
        max_queue=(2, 0),
        ping_interval=None,
        server_header=None,
    ) as server:
        for listener in server.sockets:
            process_settings.tune_listener(listener)
        process_settings.collect_garbage_rarely()
        print(
            f"listening on {'wss' if tls else 'ws'}://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}",
            flush=True,
        )
        await stopped.wait()
        for connection in server.connections:
            connection.transport.abort()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]))
