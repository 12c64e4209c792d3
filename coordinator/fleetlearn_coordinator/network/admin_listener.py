"""The administrators' port: HTTP/1.1 with JSON, one request for each connection, bounded in every way.

h11 reads and writes HTTP without I/O; what is here is the socket, and the bounds. A request is answered in another
thread, a few at a time, so that whatever is asked the event loop goes on answering devices. The port is for programs: a
browser's request is refused, whatever page it comes from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import h11
import msgspec

from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.network.tls import HANDSHAKE_TIMEOUT, Certificates
from fleetlearn_coordinator.plan.service_settings import Tls

MOST_CONNECTIONS = 32
"""Connections at a time; further ones are ended."""
MOST_HEADERS = 16 * 1024
"""Bytes of a request's line and headers."""
MOST_BODY = 64 * 1024
"""Bytes of a request's body."""
READ = 16 * 1024
"""Bytes that are read at a time."""
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


class RefusedError(Exception):
    """The request is answered by an error."""

    def __init__(self, status: HTTPStatus, text: str, *, silent: bool = False) -> None:
        """``silent``: the answer has no body."""
        super().__init__(text)
        self.status, self.text, self.silent = status, text, silent


Answer = Callable[[Request], Any]
"""Returns what is answered as JSON. Called in other threads. Raises RefusedError."""


class AdminListener:
    """The port, within a running event loop."""

    def __init__(self, answer: Answer, tls: Tls | None) -> None:
        """Raises FleetError where the files of TLS cannot be used."""
        self._answer = answer
        self._certificates = None if tls is None else Certificates(tls)
        self._open: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(THREADS, "administration")
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> str:
        """Begin to accept connections. Returns the address, as a URL. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=READ)
        found = self._server.sockets[0].getsockname()
        name = f"[{found[0]}]" if ":" in found[0] else found[0]
        return f"{'http' if self._certificates is None else 'https'}://{name}:{found[1]}"

    async def close(self) -> None:
        """Accept nothing more, and end what is open."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            async with asyncio.timeout(TIMEOUT):
                if self._certificates is not None:
                    self._certificates.check()
                    await writer.start_tls(self._certificates.context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT)
                await self._talk(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, EOFError):  # of TLS, too
            pass
        except Exception:
            logger.exception("a request of an administrator failed")
        finally:
            writer.transport.abort()
            self._open.discard(task)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the request, and answer it."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
        status, headers = HTTPStatus.OK, [("Connection", "close"), ("Cache-Control", "no-store")]
        silent = False
        try:
            request = await _read(connection, reader)
            loop = asyncio.get_running_loop()
            content = await loop.run_in_executor(self._pool, self._answer, request)
        except RefusedError as refused:
            status, content = refused.status, {"error": refused.text}
            if status == HTTPStatus.UNAUTHORIZED:
                headers.append(("WWW-Authenticate", "Bearer"))
                await asyncio.sleep(REFUSED_PAUSE)
            silent = refused.silent
        body = b"" if silent else msgspec.json.encode(content) + b"\n"
        headers += [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("X-Content-Type-Options", "nosniff"),
        ]
        answer = h11.Response(status_code=status, headers=headers, reason=status.phrase)
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()


async def _read(connection: h11.Connection, reader: asyncio.StreamReader) -> Request:
    """Return the connection's request. Raises RefusedError (what it is answered), EOFError (the peer is gone)."""
    head, body = None, b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            raise RefusedError(HTTPStatus(error.error_status_hint), f"this is not HTTP/1.1: {error}") from None
        match event:
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(READ))
            case h11.Request():
                head = _head_of(event)
            case h11.Data(data=data):
                body += bytes(data)
            case h11.EndOfMessage():
                assert head is not None
                return head._replace(body=body)
            case _:  # it closed the connection
                raise EOFError


def _head_of(event: h11.Request) -> Request:
    """Return a request without its body. Raises RefusedError."""
    headers = dict(event.headers)
    if event.method in (b"HEAD", b"CONNECT"):  # the answer to HEAD has no body, and CONNECT would end HTTP
        text = f"{event.method.decode()} is no method of this port"
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, text, silent=event.method == b"HEAD")
    if b"transfer-encoding" in headers:  # each of many small chunks would cost the event loop as much as a large one
        raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "a body needs the header Content-Length")
    if int(headers.get(b"content-length", 0)) > MOST_BODY:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {MOST_BODY} bytes")
    if any(name in headers for name in BROWSER):
        raise RefusedError(HTTPStatus.FORBIDDEN, "web pages are refused: this port is for programs")
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    with contextlib.suppress(ValueError):
        target = urlsplit(event.target.decode("ascii"))
        path = tuple(unquote(part, errors="strict") for part in target.path.strip("/").split("/"))
        query = dict(parse_qsl(target.query, keep_blank_values=True, errors="strict", max_num_fields=20))
        return Request(event.method.decode(), path, query, token.strip() if scheme.lower() == "bearer" else "", b"")
    raise RefusedError(HTTPStatus.BAD_REQUEST, "the request's target is no path that can be read")
