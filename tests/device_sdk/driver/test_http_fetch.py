"""A content by HTTP, from real sockets: what is taken, and what is not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from awaited import awaited
from fleetlearn_coordinator.service.private_ca import CA, make_certificate
from fleetlearn_device.driver.http_fetch import PART, HttpFetchError, http_parts
from fleetlearn_device.driver.timing import Timing
from networks import give_names, http_proxy

MODEL = np.random.default_rng(0).bytes(3 * PART + 17)
SIZE = len(MODEL)
QUICK = Timing(open=5.0, send=0.5)


class Server:
    """Answers each connection with the same bytes."""

    def __init__(self, answer: bytes, *, ends: bool) -> None:
        self._answer, self._ends = answer, ends
        self.requests: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self._answer)
            await writer.drain()
            if not self._ends:
                await reader.read()  # until the device leaves
        except (OSError, EOFError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def answering(
    answer: bytes, *, ends: bool = True, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    server = Server(answer, ends=ends)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


def answer(status: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def part_from(begin: int) -> bytes:
    where = f"Content-Range: bytes {begin}-{SIZE - 1}/{SIZE}"
    return answer("206 Partial Content", MODEL[begin:], where)


async def fetched(url: str, begin: int = 0, ca: Path | None = None) -> bytes:
    parts = [part async for part in http_parts(url, begin, SIZE, QUICK, ca)]
    assert all(len(part) <= PART for part in parts)
    return b"".join(parts)


@pytest.mark.parametrize("begin", [0, 1, PART + 5, SIZE - 1])
@awaited
async def test_bytes_from_one_place_to_the_last(begin: int) -> None:
    async with answering(part_from(begin)) as server:
        url = f"http://127.0.0.1:{server.port}/contents/abc?a=b"
        assert await fetched(url, begin) == MODEL[begin:]
        lines = server.requests[0].decode().split("\r\n")
        assert lines[0] == "GET /contents/abc?a=b HTTP/1.1"
        names = {line.partition(":")[0] for line in lines[1:] if line}
        assert names == {"Host", "Range", "Accept-Encoding", "Connection"}
        assert f"Range: bytes={begin}-" in lines


@awaited
async def test_the_whole_content_is_taken_where_all_is_wanted() -> None:
    async with answering(answer("200 OK", MODEL)) as server:
        assert await fetched(f"http://127.0.0.1:{server.port}/x") == MODEL


@pytest.mark.parametrize(
    ("given", "begin", "why"),
    [
        (answer("404 Not Found", b"no"), 0, "HTTP 404"),
        (answer("302 Found", b"", "Location: http://127.0.0.1/x"), 0, "HTTP 302"),
        (answer("200 OK", MODEL), 5, "knows no ranges"),
        (answer("200 OK", MODEL[:-1]), 0, "length is"),
        (answer("200 OK", MODEL, "Content-Encoding: gzip"), 0, "compressed"),
        (part_from(6), 5, "has the range bytes 6-"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 0, "not said"),
        (b"hello\r\n\r\n", 0, "gave no answer of HTTP"),
        (b"HTTP/1.1 200 OK\r\n", 0, "without an answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 10**5, 0, "gave no answer of HTTP"),
        (b"", 0, "without an answer"),
    ],
)
@awaited
async def test_answers_that_are_not_taken(given: bytes, begin: int, why: str) -> None:
    async with answering(given) as server:
        with pytest.raises(HttpFetchError, match=why):
            await fetched(f"http://127.0.0.1:{server.port}/x", begin)


@awaited
async def test_what_came_before_a_break_is_kept() -> None:
    async with answering(answer("200 OK", MODEL[:1000], length=SIZE)) as server:
        parts = http_parts(f"http://127.0.0.1:{server.port}/x", 0, SIZE, QUICK)
        received = b""
        while len(received) < 1000:
            received += await anext(parts)
        assert received == MODEL[:1000]
        with pytest.raises(HttpFetchError, match=f"ended the answer at byte 1000 of {SIZE}"):
            await anext(parts)


@pytest.mark.parametrize("given", [b"", answer("200 OK", MODEL[:1000], length=SIZE)])
@awaited
async def test_a_server_that_stands_still(given: bytes) -> None:
    async with answering(given, ends=False) as server:
        with pytest.raises(HttpFetchError, match="for too long"):
            await fetched(f"http://127.0.0.1:{server.port}/x")


@awaited
async def test_a_server_that_sends_a_byte_now_and_then() -> None:
    """It would hold the device up for ever: each byte comes in time."""
    ended = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part_from(0)[:-SIZE])
        with suppress(OSError):
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.transport.abort()
        ended.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(HttpFetchError, match="hardly anything, for too long"):
            async with asyncio.timeout(20):
                await fetched(f"http://127.0.0.1:{port}/x")
        await ended.wait()


@awaited
async def test_nobody_listens() -> None:
    with pytest.raises(HttpFetchError, match="refused the connection"):
        await fetched("http://127.0.0.1:9/x")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder, ["cdn.test"], 1)
    return folder


def server_tls(certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "certificate.pem", certificates / "key.pem")
    return context


@awaited
async def test_tls_by_the_device_s_ca_and_not_without(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_names(monkeypatch, {"cdn.test": [("127.0.0.1", None)]})
    async with answering(part_from(0), tls=server_tls(certificates)) as server:
        url = f"https://cdn.test:{server.port}/x"
        assert await fetched(url, ca=certificates / CA) == MODEL
        with pytest.raises(HttpFetchError, match="certificate verify failed"):
            await fetched(url)


@awaited
async def test_through_a_proxy(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        answering(part_from(7), tls=server_tls(certificates)) as server,
        http_proxy(server.port) as proxy,
    ):
        monkeypatch.setenv("HTTPS_PROXY", f"http://name:secret@127.0.0.1:{proxy.port}")
        url = f"https://cdn.test:{server.port}/x"
        assert await fetched(url, 7, ca=certificates / CA) == MODEL[7:]
    async with http_proxy(answer=b"HTTP/1.1 403 Forbidden\r\n\r\n") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://name:secret@127.0.0.1:{proxy.port}")
        with pytest.raises(HttpFetchError, match=r"refuses to connect to cdn\.test:443") as raised:
            await fetched("https://cdn.test/x")
        assert "secret" not in str(raised.value)
