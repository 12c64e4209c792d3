"""The administrators' port: its bounds, over real sockets."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.network import admin_listener
from fleetlearn_coordinator.network.admin_listener import (
    MOST_BODY,
    MOST_CONNECTIONS,
    AdminListener,
    Request,
    Stream,
)
from fleetlearn_coordinator.network.http_port import MOST_HEADERS, RefusedError
from fleetlearn_coordinator.plan.service_settings import Tls
from fleetlearn_coordinator.service.private_ca import CA, CERTIFICATE, KEY, make_certificate


def echo(request: Request) -> Any:
    """Answer with what was understood."""
    if request.path == ("refuse",):
        raise RefusedError(HTTPStatus.FORBIDDEN, "no")
    return {**request._asdict(), "body": request.body.decode()}


@asynccontextmanager
async def listening(
    answer: Callable[[Request], Any] = echo, tls: Tls | None = None, *, browsers: bool = False
) -> AsyncIterator[int]:
    listener = AdminListener(answer, tls, browsers=browsers)
    address = await listener.listen("127.0.0.1", 0)
    assert address.startswith("http://127.0.0.1:" if tls is None else "https://127.0.0.1:")
    try:
        yield int(address.rpartition(":")[2])
    finally:
        await listener.close()


async def send(
    port: int, content: bytes, context: ssl.SSLContext | None = None
) -> tuple[int, dict[str, str], Any]:
    """Send bytes and read until the end. Returns status, headers, and the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(content)
    async with asyncio.timeout(20):
        raw = await reader.read()
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), json.loads(body)


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def test_a_request_is_understood_and_the_connection_ends() -> None:
    async def check() -> None:
        async with listening() as port:
            body = b'{"a": 1}'
            request = (
                b"POST /v1/runs/a%20b/x?last=3 HTTP/1.1\r\nHost: x\r\nAuthorization: bearer  T\r\n"
            )
            request += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            status, headers, answer = await send(port, request)
            assert status == 200
            assert answer == {
                "method": "POST",
                "path": ["v1", "runs", "a b", "x"],
                "query": {"last": "3"},
                "token": "T",
                "body": '{"a": 1}',
                "cookie": "",
                "cookie_name": "fleetlearn-session",
                "csrf": "",
                "known": "",
            }
            assert (headers["Connection"], headers["Cache-Control"]) == ("close", "no-store")
            assert not [name for name in headers if name.lower().startswith("access-control")]
            status, _, answer = await send(port, get("/refuse"))
            assert (status, answer) == (403, {"error": "no"})

    asyncio.run(check())


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (get("/", "Origin: http://127.0.0.1:8766"), 403),
        (get("/", "Sec-Fetch-Site: same-origin"), 403),
        (get("/", f"Content-Length: {MOST_BODY + 1}"), 413),
        (get("/", "Transfer-Encoding: chunked"), 411),
        (get("/", "Content-Length: -1"), 400),
        (get("/", f"X: {'x' * 3 * MOST_HEADERS}"), 431),
        (get("/%ff"), 400),
        (get("/?" + "&".join(f"a{number}=1" for number in range(30))), 400),
        (get("/").replace(b"GET", b"CONNECT", 1), 405),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
    ],
)
def test_what_is_refused_before_anybody_reads_it(content: bytes, status: int) -> None:
    asked: list[Request] = []

    async def check() -> None:
        async with listening(asked.append) as port:
            found, headers, answer = await send(port, content)
            assert found == status, answer
            assert headers["Content-Type"] == "application/json"
            assert "error" in answer
            assert (await send(port, get("/")))[0] == 200

    asyncio.run(check())
    assert len(asked) == 1


def test_head_is_refused_without_a_body(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer has none. With one, the connection ended without an answer, and a traceback was
    logged."""

    async def check() -> None:
        async with listening(lambda request: {}) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/").replace(b"GET", b"HEAD", 1))
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 405 ")
            assert answer.endswith(b"\r\n\r\n")

    asyncio.run(check())
    assert "failed" not in caplog.text


def test_connections_are_bounded_in_number_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that say nothing hold their places for TIMEOUT at most, and no more of them are let
    in."""
    monkeypatch.setattr(admin_listener, "TIMEOUT", 1.0)

    async def check() -> None:
        async with listening() as port:
            slow = [
                await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_CONNECTIONS)
            ]
            for _, writer in slow[::2]:
                writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await ended(reader)
            writer.close()
            assert all(await asyncio.gather(*(ended(reader) for reader, _ in slow)))
            assert (await send(port, get("/")))[0] == 200
            for _, writer in slow:
                writer.close()

    asyncio.run(check())


async def ended(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(10):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


def test_the_event_loop_goes_on_while_answers_take_long() -> None:
    """And whoever is waiting for one when the port is closed is not waited for."""
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def answer(request: Request) -> Any:
        begun.release()
        go_on.wait(20)
        return {}

    async def check() -> None:
        async with listening(answer) as port:
            waiting = [asyncio.create_task(send(port, get("/"))) for _ in range(5)]
            for _ in range(admin_listener.THREADS):
                assert await asyncio.to_thread(begun.acquire, timeout=10)
            assert not begun.acquire(blocking=False), "no more than THREADS at a time"
            go_on.set()
            assert {(await each)[0] for each in waiting} == {200}
            go_on.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/"))
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        writer.close()
        go_on.set()

    asyncio.run(check())


def test_an_error_of_ours_ends_the_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: Request) -> Any:
        if request.path == ("bad",):
            raise RuntimeError("broken")
        return {}

    async def check() -> None:
        async with listening(answer) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/bad"))
            assert await ended(reader)
            writer.close()
            assert (await send(port, get("/")))[0] == 200

    asyncio.run(check())
    assert "a request of an administrator failed" in caplog.text


def test_with_tls(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["127.0.0.1"], 30)
    tls = Tls(certificate=tmp_path / CERTIFICATE, key=tmp_path / KEY)

    async def check() -> None:
        async with listening(tls=tls) as port:
            context = ssl.create_default_context(cafile=str(tmp_path / CA))
            assert (await send(port, get("/v1"), context))[2]["path"] == ["v1"]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/"))  # plainly
            assert await ended(reader)
            writer.close()
            make_certificate(tmp_path, ["127.0.0.1"], 60)  # renewed: the next connection has it
            assert (await send(port, get("/v1"), context))[0] == 200

    asyncio.run(check())


OWN = "Host: x:8766", "Origin: http://x:8766"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((*OWN, "Sec-Fetch-Site: same-origin"), 200),
        (("Host: x:8766", "Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate"), 200),
        # a link on another page leads here
        (("Host: x:8766", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"), 200),
        (("Host: x:8766", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"), 403),
        # another port of this host
        (("Host: x:8766", "Origin: http://x:8767", "Sec-Fetch-Site: same-site"), 403),
        (("Host: x:8766", "Origin: http://x:8767"), 403),
        (("Host: x:8766", "Origin: null"), 403),
        # whoever has a token is a program
        ((*OWN, "Authorization: Bearer T"), 403),
    ],
)
def test_which_browsers_requests_are_heard_where_there_is_a_page(
    headers: tuple[str, ...], status: int
) -> None:
    async def check() -> None:
        async with listening(browsers=True) as port:
            lines = [*headers, "Cookie: a=b; fleetlearn-session-8766=S; fleetlearn-session-1=T"]
            request = "\r\n".join(["GET / HTTP/1.1", *lines, "X-CSRF-Token: C", "", ""])
            found, _, answer = await send(port, request.encode())
            assert found == status
            if status == 200:
                assert (answer["cookie"], answer["csrf"], answer["token"]) == ("S", "C", "")

    asyncio.run(check())


def test_a_navigation_from_elsewhere_changes_nothing() -> None:
    async def check() -> None:
        async with listening(browsers=True) as port:
            request = b"POST /v1/runs HTTP/1.1\r\nHost: x:8766\r\nSec-Fetch-Site: cross-site\r\n"
            request += b"Sec-Fetch-Mode: navigate\r\nContent-Length: 0\r\n\r\n"
            assert (await send(port, request))[0] == 403

    asyncio.run(check())


def test_viewers_are_bounded_and_take_no_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_listener, "MOST_VIEWERS", 2)
    monkeypatch.setattr(admin_listener, "MOST_CONNECTIONS", 2)
    ended = 0

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal ended
        try:
            while True:
                yield b"data: 1\n\n"
                await asyncio.sleep(0.01)
        finally:
            ended += 1

    def answer(request: Request) -> Any:
        return Stream(events) if request.path == ("live",) else {}

    async def check() -> None:
        async with listening(answer) as port:
            viewers = []
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(get("/live"))
                await reader.readuntil(b"data: 1")
                viewers.append(writer)
            assert (await send(port, get("/")))[0] == 200
            assert (await send(port, get("/live")))[0] == 503
            for writer in viewers:
                writer.close()
            while ended < 2:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("/live"))
            await reader.readuntil(b"data: 1")
            writer.close()

    asyncio.run(asyncio.wait_for(check(), 20))


def test_a_viewer_who_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what the buffers hold, and no more is made for it."""
    monkeypatch.setattr(admin_listener, "CHUNK_TIMEOUT", 0.2)
    made, ended = 0, asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal made
        try:
            while True:
                made += 1
                yield bytes(64 * 1024)
        finally:
            ended.set()

    async def check() -> None:
        async with listening(lambda request: Stream(events)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(get("/live"))
            await ended.wait()
            assert made * 64 * 1024 < 32 * 2**20
            writer.close()

    asyncio.run(asyncio.wait_for(check(), 20))
