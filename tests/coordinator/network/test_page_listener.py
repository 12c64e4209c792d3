"""The port of the page for people, over real sockets: what it answers, and its bounds."""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import pytest
from fleetlearn_coordinator.network import http_answers, http_port, page_listener
from fleetlearn_coordinator.network.http_answers import MOST_CONNECTIONS
from fleetlearn_coordinator.network.http_port import MOST_HEADERS
from fleetlearn_coordinator.network.page_listener import PageListener
from fleetlearn_coordinator.network.static_files import StaticFolder
from fleetlearn_coordinator.plan.service_settings import Limits, Tls
from fleetlearn_coordinator.service.private_ca import CA, CERTIFICATE, KEY, make_certificate
from fleetlearn_protocol.errors import Code, FleetError

LARGE = 3_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<p>hello")
    (page / "status.json").write_text("a file of this name is not what is served")
    (page / "large.wasm").write_bytes(bytes(range(250)) * (LARGE // 250))
    (tmp_path / "secret").write_text("secret")
    return page


def broken() -> bytes:
    raise FleetError(Code.UNKNOWN_CONTENT, "/secret/run is no data directory")


@asynccontextmanager
async def listening(
    folder: Path,
    *,
    documents: Mapping[str, Callable[[], bytes]] = {
        "status.json": lambda: b"{}",
        "broken.json": broken,
    },
    limits: Limits = Limits(),  # noqa: B008
    **more: Any,
) -> AsyncIterator[int]:
    listener = PageListener(StaticFolder(folder), documents, limits=limits, **{"tls": None, **more})
    address = await listener.listen("127.0.0.1", 0)
    try:
        yield int(address.rpartition(":")[2])
    finally:
        await listener.close()


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


async def send(
    port: int, content: bytes, context: ssl.SSLContext | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request and read until the end. Returns status, headers, and the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(content.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
    async with asyncio.timeout(20):
        raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


async def receive(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read one answer with a length."""
    async with asyncio.timeout(20):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = dict(line.split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers.get("Content-Length", 0)))
    return int(first.split()[1]), headers, body


async def ended(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(10):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


def test_files_documents_and_their_headers(folder: Path) -> None:
    async def check() -> None:
        async with listening(folder) as port:
            status, headers, body = await send(port, get("/"))
            assert (status, body) == (200, b"<p>hello")
            assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
            assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            policy = headers["Content-Security-Policy"].split("; ")
            assert {
                "script-src 'self' 'wasm-unsafe-eval'",
                "connect-src 'self' wss: ws:",
                "worker-src 'self'",
            } <= {*policy}
            assert "frame-ancestors 'none'" in policy
            assert not [name for name in headers if name.lower().startswith("access-control")]
            status, headers, body = await send(port, get("/large.wasm"))
            assert (status, headers["Content-Type"]) == (200, "application/wasm")
            assert body == (folder / "large.wasm").read_bytes()
            tag = headers["ETag"]
            status, headers, body = await send(port, get("/large.wasm", f"If-None-Match: {tag}"))
            assert (status, headers["ETag"], body) == (304, tag, b"")
            assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
            status, headers, body = await send(port, get("/status.json?run=x"))
            assert (status, headers["Cache-Control"], json.loads(body)) == (200, "no-store", {})

    asyncio.run(check())


def test_one_connection_has_many_answers(folder: Path) -> None:
    """Also to requests that come before the answer to the one before, and to HEAD, which has no
    body."""

    async def check() -> None:
        async with listening(folder) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/") + get("/large.wasm") + get("/nothing"))
            assert [(await receive(reader))[0] for _ in range(3)] == [200, 200, 404]
            writer.write(
                get("/large.wasm", method="HEAD") + get("/nothing", method="HEAD") + get("/")
            )
            for status, size in ((200, LARGE), (404, len("there is no such file\n"))):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                assert head.startswith(f"HTTP/1.1 {status} ")
                assert f"Content-Length: {size}\r\n" in head
            assert (await receive(reader))[::2] == (200, b"<p>hello")
            writer.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (get("/../secret"), 404),
        (get("/%2e%2e/secret"), 404),
        (get("/..%2fsecret"), 404),
        (get("/%2e%2e%5csecret"), 404),
        (get("/index.html%00"), 404),
        (get("//etc/passwd"), 404),
        (get("http://elsewhere/../secret"), 404),
        (get("/%ff"), 400),
        (get("/broken.json"), 503),
        (get("/", "Content-Length: 5"), 413),
        (get("/", "Transfer-Encoding: chunked"), 413),
        (get("/", "Content-Length: -1"), 400),
        (get("/", f"X: {'x' * 3 * MOST_HEADERS}"), 431),
        (get("/", method="POST"), 405),
        (get("/", method="OPTIONS"), 405),
        (get("/", method="CONNECT"), 405),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
    ],
)
def test_what_is_refused(folder: Path, content: bytes, status: int) -> None:
    async def check() -> None:
        async with listening(folder) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(content)
            found, headers, body = await receive(reader)
            writer.close()
            assert found == status, body
            assert b"secret" not in body
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] == "no-store"
            assert (await send(port, get("/")))[0] == 200

    asyncio.run(check())


def test_a_head_that_is_refused_has_no_body(folder: Path) -> None:
    async def check() -> None:
        async with listening(folder) as port:
            status, _, body = await send(port, get("/", "Content-Length: 5", method="HEAD"))
            assert (status, body) == (413, b"")

    asyncio.run(check())


def test_who_says_nothing_or_does_not_read_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_answers, "REQUEST_TIMEOUT", 0.5)
    monkeypatch.setattr(page_listener, "CHUNK_TIMEOUT", 0.5)
    (folder / "large.wasm").write_bytes(bytes(12_000_000))

    async def check() -> None:
        async with listening(folder) as port:
            silent, first = await asyncio.open_connection("127.0.0.1", port)
            slow, second = await asyncio.open_connection("127.0.0.1", port)
            second.write(b"GET / HTTP/1.1\r\nX-Slow: ")
            stuck, third = await asyncio.open_connection("127.0.0.1", port, limit=1000)
            third.write(get("/large.wasm"))
            assert await ended(silent)
            assert await ended(slow)
            # it does not read meanwhile, and what the kernel takes is soon full
            await asyncio.sleep(1.5)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await stuck.readexactly(12_000_000)
            assert (await send(port, get("/")))[0] == 200
            for writer in (first, second, third):
                writer.close()

    asyncio.run(check())


def test_connections_are_bounded_and_an_address_gets_half_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # they are opened as fast as the machine can
    monkeypatch.setattr(http_port, "SHORT_LIFE_RATE", 1e6)
    everybody = Limits(exempt=())

    async def left_open(port: int) -> int:
        """Open twice as many connections as there may be, without a word. Returns how many are not
        ended at once."""
        opened = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MOST_CONNECTIONS)
        ]
        reads = [asyncio.create_task(ended(reader)) for reader, _ in opened]
        left = set(reads)
        while (
            left
            and (
                found := await asyncio.wait(left, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            )[0]
        ):
            left = found[1]
        for read in left:
            read.cancel()
        for _, writer in opened:
            writer.close()
        return len(left)

    async def check() -> None:
        async with listening(folder) as port:  # this machine has no limits of an address
            assert await left_open(port) == MOST_CONNECTIONS
        async with listening(folder, limits=everybody) as port:
            assert await left_open(port) == MOST_CONNECTIONS // 2
        async with listening(folder, limits=Limits(exempt=(), connections=5)) as port:
            assert await left_open(port) == 5
        async with listening(folder, limits=everybody, proxies=["127.0.0.1"]) as port:
            assert await left_open(port) == MOST_CONNECTIONS

    asyncio.run(check())


def test_connections_have_a_rate_and_the_kernel_holds_the_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "SHORT_LIFE_BURST", 10)
    monkeypatch.setattr(http_port, "SHORT_LIFE_RATE", 20.0)

    async def check() -> None:
        async with listening(folder) as port:
            began = asyncio.get_running_loop().time()
            assert {
                status
                for status, _, _ in await asyncio.gather(*(send(port, get("/")) for _ in range(30)))
            } == {200}
            assert asyncio.get_running_loop().time() - began > 0.9  # 20 of them at 20 a second

    asyncio.run(check())


def test_requests_and_bytes_have_a_rate_for_all_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_answers, "REQUEST_RATE", 20.0)
    monkeypatch.setattr(http_answers, "REQUEST_BURST", 10.0)
    monkeypatch.setattr(page_listener, "BYTE_RATE", 3e6)
    monkeypatch.setattr(page_listener, "BYTE_BURST", 1e5)

    async def took(port: int, *requests: bytes) -> float:
        began = asyncio.get_running_loop().time()
        assert {
            status
            for status, _, _ in await asyncio.gather(*(send(port, each) for each in requests))
        } == {200}
        return asyncio.get_running_loop().time() - began

    async def check() -> None:
        async with listening(folder) as port:
            assert await took(port, get("/large.wasm"), get("/large.wasm")) > 1.5  # 6 MB
            assert await took(port, *[get("/")] * 30) > 0.9

    asyncio.run(check())


def test_an_answer_is_the_last_where_many_are_connected(folder: Path) -> None:
    async def check() -> None:
        async with listening(folder) as port:
            opened = [
                await asyncio.open_connection("127.0.0.1", port)
                for _ in range(MOST_CONNECTIONS // 2 + 1)
            ]
            reader, writer = opened[-1]
            writer.write(get("/"))
            assert (await receive(reader))[1]["Connection"] == "close"
            assert await ended(reader)
            for _, each in opened:
                each.close()

    asyncio.run(check())


def test_an_error_of_ours_ends_the_connection_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> bytes:
        raise RuntimeError("broken")

    async def check() -> None:
        async with listening(folder, documents={"bad.json": make}) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/bad.json"))
            assert await ended(reader)
            writer.close()
            assert (await send(port, get("/")))[0] == 200

    asyncio.run(check())
    assert "a request of the page failed" in caplog.text


def test_with_tls(folder: Path, tmp_path: Path) -> None:
    make_certificate(tmp_path, ["127.0.0.1"], 30)
    tls = Tls(certificate=tmp_path / CERTIFICATE, key=tmp_path / KEY)

    async def check() -> None:
        async with listening(folder, tls=tls) as port:
            context = ssl.create_default_context(cafile=str(tmp_path / CA))
            assert (await send(port, get("/"), context))[2] == b"<p>hello"
            assert len((await send(port, get("/large.wasm"), context))[2]) == LARGE
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/"))  # plainly
            assert await ended(reader)
            writer.close()

    asyncio.run(check())


def test_what_a_bad_request_took_is_freed_without_a_garbage_collection(
    folder: Path, tmp_path: Path
) -> None:
    make_certificate(tmp_path, ["127.0.0.1"], 30)
    tls = Tls(certificate=tmp_path / CERTIFICATE, key=tmp_path / KEY)

    def left() -> int:
        # By its type: to ask other modules' lazy objects for their class would wake them up.
        return sum(
            issubclass(type(each), h11.Connection | SSLProtocol) for each in gc.get_objects()
        )

    async def check() -> None:
        async with listening(folder) as port, listening(folder, tls=tls) as tls_port:
            for _ in range(5):
                assert (await send(port, b"nonsense\r\n\r\n"))[0] == 400
                reader, writer = await asyncio.open_connection("127.0.0.1", tls_port)
                writer.write(get("/"))  # plainly
                assert await ended(reader)
                writer.close()
            async with asyncio.timeout(5):
                while left():
                    await asyncio.sleep(0.01)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(check())
    finally:
        gc.enable()


def test_the_page_may_fetch_where_its_devices_are_sent(folder: Path) -> None:
    async def policy(**more: Any) -> str:
        async with listening(folder, **more) as port:
            _, headers, _ = await send(port, get("/"))
            return headers["Content-Security-Policy"]

    for more, sources in (({}, ""), ({"downloads": "https://cdn.test"}, "https://cdn.test ")):
        assert f"connect-src 'self' {sources}wss: ws:;" in asyncio.run(policy(**more))
