"""The administrators' port: HTTP/1.1 with JSON, one request for each connection, bounded in every
way.

A request is answered in another thread, a few at a time, so that whatever is asked the event loop
goes on answering devices. The port is for programs, and for a page of its own: a browser's request
is refused where another page sends it, or where it has a token in place of the page's cookie.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NamedTuple

import h11
import msgspec

from fleetlearn_coordinator.network.http_port import (
    MOST_HEADERS,
    HttpPort,
    RefusedError,
    read_request,
    read_target,
    send_answer,
)
from fleetlearn_coordinator.plan.service_settings import Tls

MOST_CONNECTIONS = 32
"""Connections at a time; further ones are ended."""
MOST_BODY = 64 * 1024
"""Bytes of a request's body."""
TIMEOUT = 10.0
"""Seconds that a connection lives, from its first byte to the last of its answer."""
THREADS = 2
"""Requests that are answered at a time."""
REFUSED_PAUSE = 0.5
"""Seconds before a refused token is answered: whoever tries tokens waits, and costs little."""
BROWSER = (b"origin", b"sec-fetch-site", b"sec-fetch-mode")
"""Headers that browsers alone send."""
COOKIE = "fleetlearn-session"
"""What the name of the page's cookie begins with. The port follows: browsers give a cookie to all
ports of a host, and each may have a coordinator."""
MOST_VIEWERS = 64
"""Answers that go on, at a time: pages that are open somewhere."""
VIEWER_LIFE = 600.0
"""Seconds after which such an answer ends. The page asks again at once, with its cookie."""
CHUNK_TIMEOUT = 10.0
"""Seconds in which a viewer takes what is sent, or is dropped."""
MOST_UNSENT = 64 * 1024
"""Bytes that wait in the socket's buffer for one viewer, and one message."""


class Request(NamedTuple):
    """What an administrator asks."""

    method: str
    path: tuple[str, ...]
    """The parts between the slashes, decoded."""
    query: dict[str, str]
    token: str
    """Empty: none was given."""
    body: bytes
    cookie: str = ""
    """The page's cookie. Empty: no page of this port asks, or nobody has signed in there."""
    cookie_name: str = COOKIE
    csrf: str = ""
    """The header X-CSRF-Token, which another site's page cannot send."""
    known: str = ""
    """The header If-None-Match."""


class HttpContent(NamedTuple):
    """An answer that is not JSON with status 200."""

    status: HTTPStatus
    headers: list[tuple[str, str]]
    """Beside those that every answer has. Content-Type among them."""
    body: bytes


class Stream(NamedTuple):
    """An answer that goes on."""

    events: Callable[[], AsyncGenerator[bytes, None]]
    """Called in the event loop. It ends where the viewer is to be dropped."""
    content_type: str = "text/event-stream"
    """Default: server-sent events."""


Answer = Callable[[Request], Any]
"""Returns what is answered as JSON, or HttpContent or Stream. Called in other threads. Raises
RefusedError."""


class AdminListener:
    """The port, within a running event loop."""

    def __init__(self, answer: Answer, tls: Tls | None, *, browsers: bool = False) -> None:
        """``browsers``: whether the port has a page, which browsers may load and ask from. Raises
        FleetError where the files of TLS cannot be used."""
        self._answer, self._browsers = answer, browsers
        self._viewers = 0
        self._port = HttpPort(
            self._talk,
            "an administrator",
            most=MOST_CONNECTIONS,
            threads=THREADS,
            timeout=TIMEOUT,
            tls=tls,
        )

    async def listen(self, host: str, port: int) -> str:
        """Begin to accept connections. Returns the address, as a URL. Raises OSError."""
        return await self._port.listen(host, port)

    async def close(self) -> None:
        """Accept nothing more, and end what is open."""
        await self._port.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read the request, and answer it. Returns whether it was answered as asked."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
        try:
            head, body = await read_request(connection, reader, self._check)
            request = _request(head, body)
            loop = asyncio.get_running_loop()
            content = await loop.run_in_executor(self._port.pool, self._answer, request)
            if isinstance(content, Stream) and self._viewers >= MOST_VIEWERS:
                text = f"{MOST_VIEWERS} pages are open already; close one of them"
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, text)
        except RefusedError as refused:
            content = await _refusal(refused)
        if isinstance(content, Stream):
            await self._stream(connection, writer, content)
            return True
        if not isinstance(content, HttpContent):
            content = json_content(content)
        return await send_answer(connection, writer, content.status, content.headers, content.body)

    def _check(self, head: h11.Request) -> None:
        _check(head)
        if any(name in BROWSER for name, _ in head.headers):
            _check_browser(head, has_page=self._browsers)

    async def _stream(
        self, connection: h11.Connection, writer: asyncio.StreamWriter, stream: Stream
    ) -> None:
        """Send events until the viewer is gone, does not take them, or has looked for long."""
        self._viewers += 1
        try:
            self._port.set_apart(VIEWER_LIFE + CHUNK_TIMEOUT)
            writer.transport.set_write_buffer_limits(high=MOST_UNSENT)
            headers = [
                ("Connection", "close"),
                ("Cache-Control", "no-store"),
                ("Content-Type", stream.content_type),
                ("X-Content-Type-Options", "nosniff"),
            ]
            writer.write(connection.send(h11.Response(status_code=200, headers=headers)) or b"")
            loop = asyncio.get_running_loop()
            until = loop.time() + VIEWER_LIFE
            async with aclosing(stream.events()) as events:
                async for event in events:
                    writer.write(connection.send(h11.Data(data=event)) or b"")
                    async with asyncio.timeout(CHUNK_TIMEOUT):
                        await writer.drain()
                    if loop.time() > until:
                        break
            writer.write(connection.send(h11.EndOfMessage()) or b"")
        finally:
            self._viewers -= 1


def json_content(
    content: Any, status: HTTPStatus = HTTPStatus.OK, headers: list[tuple[str, str]] | None = None
) -> HttpContent:
    """Return an answer in JSON, which nobody keeps."""
    own = [("Cache-Control", "no-store"), ("Content-Type", "application/json"), *(headers or [])]
    return HttpContent(status, own, msgspec.json.encode(content) + b"\n")


async def _refusal(refused: RefusedError) -> HttpContent:
    """Return the answer to a request that is refused. Guesses of a token are answered late."""
    headers = []
    if refused.status == HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", "Bearer"))
        await asyncio.sleep(REFUSED_PAUSE)
    content = json_content({"error": refused.text}, refused.status, headers)
    return content._replace(body=b"") if refused.silent else content


def _check(head: h11.Request) -> None:
    """Refuse a request before its body is read. Raises RefusedError."""
    headers = dict(head.headers)
    # the answer to HEAD has no body, and CONNECT would end HTTP
    if head.method in (b"HEAD", b"CONNECT"):
        text = f"{head.method.decode()} is no method of this port"
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, text, silent=head.method == b"HEAD")
    # each of many small chunks would cost the event loop as much as a large one
    if b"transfer-encoding" in headers:
        raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "a body needs the header Content-Length")
    if int(headers.get(b"content-length", 0)) > MOST_BODY:
        raise RefusedError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {MOST_BODY} bytes"
        )


def _check_browser(head: h11.Request, *, has_page: bool) -> None:
    """Refuse a browser's request unless the port's own page sends it, or a person opens that page.
    Raises RefusedError."""
    headers = dict(head.headers)
    host, origin = headers.get(b"host", b""), headers.get(b"origin")
    site = headers.get(b"sec-fetch-site", b"same-origin")
    # A link on another page may lead here: the page's files are no secret, and the cookie is not
    # sent then (SameSite=Strict).
    opens = head.method == b"GET" and headers.get(b"sec-fetch-mode") == b"navigate"
    same = origin is None or origin.partition(b"://")[2] == host
    own = same and (site in (b"same-origin", b"none") or opens)
    if not has_page or not own or b"authorization" in headers:
        raise RefusedError(HTTPStatus.FORBIDDEN, "web pages are refused: this port is for programs")


def _request(head: h11.Request, body: bytes) -> Request:
    """Return a request that ``_check`` let through."""
    headers = {name: value.decode("latin-1") for name, value in head.headers}
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    port = headers.get(b"host", "").rpartition(":")[2]
    name = f"{COOKIE}-{port}" if port.isdecimal() else COOKIE
    return Request(
        head.method.decode(),
        *read_target(head),
        token=token.strip() if scheme.lower() == "bearer" else "",
        body=body,
        cookie=_cookie(headers.get(b"cookie", ""), name),
        cookie_name=name,
        csrf=headers.get(b"x-csrf-token", ""),
        known=headers.get(b"if-none-match", ""),
    )


def _cookie(header: str, name: str) -> str:
    """Return a cookie's value (RFC 6265, 5.4). Empty: there is none."""
    for each in header.split(";"):
        key, _, value = each.strip().partition("=")
        if key == name:
            return value
    return ""
