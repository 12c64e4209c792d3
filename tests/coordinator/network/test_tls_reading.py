"""TLS connections share what they are read into: each gets its own bytes, whoever pauses."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import hashlib
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.network.tls_reading import (
    READ,
    SharedBufferProtocol,
    share_read_buffers,
)
from fleetlearn_coordinator.service.private_ca import make_certificate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    assert make_certificate(folder, ["127.0.0.1"], 30)
    return folder


@pytest.fixture(autouse=True)
def _shared_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.sslproto, "SSLProtocol", asyncio.sslproto.SSLProtocol)
    share_read_buffers()


class Digesting(asyncio.Protocol):
    """Answers the SHA-256 of what came, and stops reading now and then, in the middle of what is
    there."""

    def __init__(self) -> None:
        self.digest, self.calls = hashlib.sha256(), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        protocol = transport._ssl_protocol  # type: ignore[attr-defined]
        assert isinstance(protocol, SharedBufferProtocol)

    def data_received(self, data: bytes) -> None:
        self.digest.update(data)
        self.calls += 1
        if self.calls % 7 == 0:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self.transport.resume_reading)
        if data.endswith(b"end"):
            self.transport.write(self.digest.digest())


async def exchange(folder: Path, seed: int, connections: int = 5) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    trusts = ssl.create_default_context(cafile=folder / "ca.pem")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Digesting, "127.0.0.1", 0, ssl=context)

    async def send(number: int) -> None:
        content = np.random.default_rng([seed, number]).bytes(3 * READ + 12_345 * number) + b"end"
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusts)
        writer.write(content)
        assert await reader.readexactly(32) == hashlib.sha256(content).digest()
        writer.close()
        await writer.wait_closed()

    async with server:
        await asyncio.gather(*map(send, range(connections)))


def test_each_connection_gets_its_own_bytes(folder: Path) -> None:
    asyncio.run(exchange(folder, 1))


def test_event_loops_in_other_threads_have_buffers_of_their_own(folder: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(asyncio.run, exchange(folder, seed)) for seed in range(3)]
        for job in jobs:
            job.result()
