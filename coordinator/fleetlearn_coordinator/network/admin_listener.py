"""The administrators' port: HTTP/1.1 with JSON, one request for each connection, bounded in every
way.

A request is answered in another thread, a few at a time, so that whatever is asked the event loop
goes on answering devices. The port is for programs: a browser's request is refused, whatever page
it comes from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


class Request(NamedTuple):
    """What an administrator asks."""

    method: str
    path: tuple[str, ...]
    """The parts between the slashes, decoded."""
    query: dict[str, str]
    token: str
    """Empty: none was given."""
    body: bytes


Answer = Callable[[Request], Any]
"""Returns what is answered as JSON. Called in other threads. Raises RefusedError."""


class AdminListener:
    """The port, within a running event loop."""

    def __init__(self, answer: Answer, tls: Tls | None) -> None:
        """Raises FleetError where the files of TLS cannot be used."""
        self._answer = answer
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
        status, headers = HTTPStatus.OK, [("Connection", "close"), ("Cache-Control", "no-store")]
        silent = False
        try:
            head, body = await read_request(connection, reader, _check)
            request = _request(head, body)
            loop = asyncio.get_running_loop()
            content = await loop.run_in_executor(self._port.pool, self._answer, request)
        except RefusedError as refused:
            status, content = refused.status, {"error": refused.text}
            if status == HTTPStatus.UNAUTHORIZED:
                headers.append(("WWW-Authenticate", "Bearer"))
                await asyncio.sleep(REFUSED_PAUSE)
            silent = refused.silent
        answer = b"" if silent else msgspec.json.encode(content) + b"\n"
        headers += [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(answer))),
            ("X-Content-Type-Options", "nosniff"),
        ]
        response = h11.Response(status_code=status, headers=headers, reason=status.phrase)
        for event in (response, h11.Data(data=answer), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        return status == HTTPStatus.OK


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
    if any(name in headers for name in BROWSER):
        raise RefusedError(HTTPStatus.FORBIDDEN, "web pages are refused: this port is for programs")


def _request(head: h11.Request, body: bytes) -> Request:
    """Return a request that ``_check`` let through."""
    scheme, _, token = (
        dict(head.headers).get(b"authorization", b"").decode("latin-1").partition(" ")
    )
    token = token.strip() if scheme.lower() == "bearer" else ""
    return Request(head.method.decode(), *read_target(head), token, body)
