"""The port of caches, over real sockets: what it answers, and its bounds."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awaited import awaited
from fleetlearn_coordinator.network import content_port as content_port_module
from fleetlearn_coordinator.network.content_port import CHUNK, ContentPort, read_range
from fleetlearn_coordinator.network.transfers.contents import Contents, Older
from fleetlearn_coordinator.plan.service_settings import Limits, Tls
from fleetlearn_coordinator.service.private_ca import CA, CERTIFICATE, KEY, make_certificate
from fleetlearn_coordinator.storage.file_bytes import FileBytes

NEWEST, OLDER = "a" * 64, "b" * 64
MODEL = np.random.default_rng(0).bytes(5 * CHUNK + 123)


@pytest.fixture
def contents(tmp_path: Path) -> Contents:
    """The newest model is in memory, an older one on the disk."""
    (tmp_path / "older").write_bytes(MODEL)
    contents = Contents()
    file = FileBytes(tmp_path / "older")
    contents.publish({NEWEST: MODEL}, {OLDER: Older(file, file.size)})
    return contents


@asynccontextmanager
async def listening(contents: Contents, **more: Any) -> AsyncIterator[int]:
    port = ContentPort(contents.get, **{"tls": None, "limits": Limits(), **more})
    address = await port.listen("127.0.0.1", 0)
    try:
        yield int(address.rpartition(":")[2])
    finally:
        await port.close()


async def ask(
    port: int, sha256: str, *headers: str, method: str = "GET", tls: ssl.SSLContext | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    lines = [f"{method} /contents/{sha256} HTTP/1.1", "Host: x", "Connection: close", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    async with asyncio.timeout(20):
        raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body


@pytest.mark.parametrize("sha256", [NEWEST, OLDER])
@awaited
async def test_a_content_and_any_range_of_it(contents: Contents, sha256: str) -> None:
    async with listening(contents) as port:
        status, headers, body = await ask(port, sha256)
        assert (status, body) == (200, MODEL)
        assert headers["ETag"] == f'"{sha256}"'
        assert headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert headers["Access-Control-Allow-Origin"] == "*"
        for wanted, begin, end in (
            ("7-", 7, len(MODEL)),
            (f"{CHUNK + 1}-{3 * CHUNK}", CHUNK + 1, 3 * CHUNK + 1),
            ("-5", len(MODEL) - 5, len(MODEL)),
            (f"0-{10 * len(MODEL)}", 0, len(MODEL)),
        ):
            status, headers, body = await ask(port, sha256, f"Range: bytes={wanted}")
            assert (status, body) == (206, MODEL[begin:end])
            assert headers["Content-Range"] == f"bytes {begin}-{end - 1}/{len(MODEL)}"


@awaited
async def test_what_a_cache_asks(contents: Contents) -> None:
    async with listening(contents) as port:
        status, headers, body = await ask(port, NEWEST, method="HEAD")
        assert (status, headers["Content-Length"], body) == (200, str(len(MODEL)), b"")
        status, _, body = await ask(port, NEWEST, f'If-None-Match: "{NEWEST}"')
        assert (status, body) == (304, b"")
        status, _, body = await ask(port, NEWEST, "Range: bytes=9-", 'If-Range: "another"')
        assert (status, body) == (200, MODEL)
        status, headers, _ = await ask(port, NEWEST, f"Range: bytes={len(MODEL)}-")
        assert (status, headers["Content-Range"]) == (416, f"bytes */{len(MODEL)}")
        status, headers, body = await ask(port, NEWEST, "Origin: https://page", method="OPTIONS")
        assert (status, headers["Access-Control-Allow-Headers"], body) == (204, "Range", b"")


@pytest.mark.parametrize(
    ("sha256", "method", "status"),
    [
        ("c" * 64, "GET", 404),
        ("../secret", "GET", 404),
        (f"{NEWEST}/more", "GET", 404),
        (NEWEST, "POST", 405),
        ("", "GET", 404),
    ],
)
@awaited
async def test_what_is_refused(contents: Contents, sha256: str, method: str, status: int) -> None:
    async with listening(contents) as port:
        found, headers, body = await ask(port, sha256, method=method)
        assert found == status
        assert headers["Cache-Control"] == "no-store"
        assert b"model" not in body


@awaited
async def test_several_requests_of_one_connection(contents: Contents) -> None:
    async with listening(contents) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for begin in (0, len(MODEL) - 4, 17):
            request = f"GET /contents/{NEWEST} HTTP/1.1\r\nHost: x\r\nRange: bytes={begin}-\r\n\r\n"
            writer.write(request.encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 206 ")
            assert await reader.readexactly(len(MODEL) - begin) == MODEL[begin:]
        writer.close()


@awaited
async def test_a_model_that_is_over_is_sent_no_further(
    contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow peer would keep it in memory. The connection ends before the last byte."""
    large = bytes(2**25)
    contents.publish({NEWEST: large}, {})
    async with listening(contents) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(f"GET /contents/{NEWEST} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        contents.publish({OLDER: MODEL}, {})
        received = 0
        async with asyncio.timeout(20):
            while part := await reader.read(2**20):
                received += len(part)
        assert received < len(large)
        writer.close()


@awaited
async def test_a_peer_that_takes_nothing_is_ended(
    contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_port_module, "CHUNK_TIMEOUT", 0.2)
    contents.publish({NEWEST: bytes(2**25)}, {})
    port = ContentPort(contents.get, tls=None, limits=Limits())
    address = await port.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(f"GET /contents/{NEWEST} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    assert port.connections == 1
    async with asyncio.timeout(20):
        while port.connections:
            await asyncio.sleep(0.01)
    writer.transport.abort()
    await port.close()


@awaited
async def test_with_tls(contents: Contents, tmp_path: Path) -> None:
    make_certificate(tmp_path, ["127.0.0.1"], 1)
    tls = Tls(certificate=tmp_path / CERTIFICATE, key=tmp_path / KEY)
    async with listening(contents, tls=tls) as port:
        context = ssl.create_default_context(cafile=tmp_path / CA)
        status, _, body = await ask(port, OLDER, "Range: bytes=100-", tls=context)
        assert (status, body) == (206, MODEL[100:])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("bytes=-", None),
        ("bytes=3-2", None),
        ("bytes=0-1,5-6", None),
        ("items=0-1", None),
        ("bytes=0-0", (0, 1)),
        ("bytes=9-", (9, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("bytes=10-", (10, 10)),
        ("bytes=99-100", (10, 10)),
        ("bytes=-0", (10, 10)),
        (f"bytes={'9' * 20}-", None),
    ],
)
def test_ranges(text: str, found: tuple[int, int] | None) -> None:
    assert read_range(text, 10) == found
