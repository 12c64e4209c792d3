"""The port of HTTP caches: ``/contents/SHA256``, what devices may fetch, by ranges.

A cache between devices and coordinator (nginx, a CDN, a campus proxy) keeps a content for ever: its
bytes never change, as its name is their hash. There is no login: whoever can connect and knows a
hash may read the content. So the port is bounded as the page's is, and hashes are told to devices
alone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

import h11
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.frames import Buffer

from fleetlearn_coordinator.network.http_answers import (
    MOST_CONNECTIONS,
    Manner,
    answer_requests,
    check_reads_alone,
    request_rate,
)
from fleetlearn_coordinator.network.http_port import HttpPort, RefusedError, read_target
from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.network.static_files import FOR_EVER
from fleetlearn_coordinator.network.transfers.contents import FramedContent, StoredContent
from fleetlearn_coordinator.plan.service_settings import Limits, ServiceSettings, Tls

THREADS = 4
"""Chunks that are read from the disk at a time."""
CHUNK = 256 * 1024
"""Bytes that are read, and sent, at a time."""
CHUNK_TIMEOUT = 30.0
"""Seconds in which a peer takes a chunk: 8.7 KB/s at least."""
LIFE = 3600.0
"""Seconds that a connection lives at most."""
HEADERS = (
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Expose-Headers", "Content-Range, ETag"),
    ("Cross-Origin-Resource-Policy", "cross-origin"),
    ("X-Content-Type-Options", "nosniff"),
)
"""Headers of every answer: web pages of any origin may be devices."""
PREFLIGHT = (
    ("Access-Control-Allow-Methods", "GET, HEAD"),
    ("Access-Control-Allow-Headers", "Range"),
    ("Access-Control-Max-Age", "86400"),
)

FindContent = Callable[[str], FramedContent | StoredContent | None]
"""Returns a content that is served now, by its SHA-256."""


class ContentRange(NamedTuple):
    """What of a content is sent."""

    sha256: str
    begin: int
    end: int


class ContentAnswer(NamedTuple):
    """What a request is answered."""

    status: HTTPStatus
    headers: list[tuple[str, str]]
    body: bytes | ContentRange = b""


class ContentPort:
    """The port, within a running event loop."""

    def __init__(
        self,
        find: FindContent,
        *,
        tls: Tls | None,
        limits: Limits,
        proxies: Collection[str] = (),
    ) -> None:
        """``limits``: of each address. ``proxies``: networks without such limits. Raises FleetError
        where the files of TLS cannot be used."""
        self._find = find
        self._port = HttpPort(
            self._talk,
            "a cache",
            most=MOST_CONNECTIONS,
            threads=THREADS,
            timeout=LIFE,
            tls=tls,
            limits=limits,
            proxies=proxies,
        )
        self._loop = asyncio.get_running_loop()
        self._requests = request_rate(self._loop.time())

    async def listen(self, host: str, port: int, *, shared: bool = False) -> str:
        """Begin to accept connections. ``shared``: other processes listen there too. Returns the
        address, as a URL. Raises OSError."""
        return await self._port.listen(host, port, shared=shared)

    @property
    def connections(self) -> int:
        """How many there are now."""
        return self._port.connections

    async def close(self) -> None:
        """Accept nothing more, and end what is open."""
        await self._port.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer requests, one after the other. Returns whether one of them was for something that
        is there."""
        writer.transport.set_write_buffer_limits(high=CHUNK)
        return await answer_requests(
            self._port,
            reader,
            writer,
            self._requests,
            check=_check,
            answer=self._answer,
            refusal=_refusal,
            send=self._send,
        )

    async def _answer(self, request: h11.Request) -> ContentAnswer:
        """Return what a request is answered. Raises RefusedError."""
        if request.method == b"OPTIONS":
            return ContentAnswer(HTTPStatus.NO_CONTENT, [*PREFLIGHT])
        path, headers = read_target(request).path, dict(request.headers)
        content = self._find(path[1]) if len(path) == 2 and path[0] == "contents" else None
        if content is None:
            raise RefusedError(
                HTTPStatus.NOT_FOUND, "nothing of this name is served; it may be of an old round"
            )
        size, tag = content.size, f'"{path[1]}"'
        about = [("ETag", tag), ("Cache-Control", FOR_EVER), ("Accept-Ranges", "bytes")]
        known = headers.get(b"if-none-match", b"").decode("latin-1")
        if tag in known or known == "*":
            return ContentAnswer(HTTPStatus.NOT_MODIFIED, about)
        about.append(("Content-Type", "application/octet-stream"))
        begin, end, status = 0, size, HTTPStatus.OK
        if headers.get(b"if-range", tag.encode()) == tag.encode():
            found = read_range(headers.get(b"range", b"").decode("latin-1"), size)
            if found is not None:
                begin, end = found
                status = HTTPStatus.PARTIAL_CONTENT
                if begin >= end:
                    where = [("Content-Range", f"bytes */{size}")]
                    return ContentAnswer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, where)
                about.append(("Content-Range", f"bytes {begin}-{end - 1}/{size}"))
        return ContentAnswer(status, about, ContentRange(path[1], begin, end))

    async def _send(
        self,
        connection: h11.Connection,
        writer: asyncio.StreamWriter,
        answer: ContentAnswer,
        manner: Manner,
    ) -> None:
        """Send an answer. Raises TimeoutError where the peer does not take it, OSError where the
        peer is gone, EOFError where the content is served no more: the connection ends then, which
        tells the peer so."""
        body = answer.body
        size = body.end - body.begin if isinstance(body, ContentRange) else len(body)
        headers = [*answer.headers, *HEADERS]
        if answer.status not in (HTTPStatus.NOT_MODIFIED, HTTPStatus.NO_CONTENT):
            headers.append(("Content-Length", str(size)))
        if manner.last:
            headers.append(("Connection", "close"))
        head = h11.Response(status_code=answer.status, headers=headers, reason=answer.status.phrase)
        writer.write(connection.send(head) or b"")
        if isinstance(body, ContentRange) and not manner.silent:
            for place in range(body.begin, body.end, CHUNK):
                chunk = await self._read(body.sha256, place, min(CHUNK, body.end - place))
                # h11 frames the bytes, and counts them, whatever kind of buffer they are.
                data = h11.Data(data=chunk)  # type: ignore[arg-type]
                for piece in connection.send_with_data_passthrough(data) or ():
                    writer.write(piece)
                async with asyncio.timeout(CHUNK_TIMEOUT):
                    await writer.drain()
        elif isinstance(body, bytes) and body and not manner.silent:
            writer.write(connection.send(h11.Data(data=body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        async with asyncio.timeout(CHUNK_TIMEOUT):
            await writer.drain()

    async def _read(self, sha256: str, place: int, size: int) -> Buffer:
        """Return bytes of a content. It is looked up each time: a slow peer keeps no old model in
        memory. Raises EOFError where it is served no more, or cannot be read."""
        content = self._find(sha256)
        if content is None:
            raise EOFError
        if isinstance(content, FramedContent):
            await asyncio.sleep(0)  # others have their turn, even if the kernel takes everything
            return content.read(place, size)
        try:
            return await self._loop.run_in_executor(self._port.pool, content.read, place, size)
        except OSError as error:
            logger.warning("a content cannot be read for a cache: %s", in_words(error, file=True))
            raise EOFError from None


def read_range(text: str, size: int) -> tuple[int, int] | None:
    """Return where the bytes that a header Range asks for begin and end; None: all are to be sent
    (RFC 9110, 14.2: several ranges, or another unit, may be ignored). None of ``size`` bytes: begin
    and end are the same."""
    found = re.fullmatch(r"bytes=([0-9]{0,19})-([0-9]{0,19})", text)
    if found is None or found[0] == "bytes=-":
        return None
    if not found[1]:  # the last ones
        return max(0, size - int(found[2])), size
    begin = int(found[1])
    end = min(size, int(found[2]) + 1) if found[2] else size
    if found[2] and begin >= int(found[2]) + 1:  # no range at all
        return None
    return (begin, end) if begin < end else (size, size)


def _check(head: h11.Request) -> None:
    """Refuse a request before its body is read. Raises RefusedError."""
    check_reads_alone(head, (b"GET", b"HEAD", b"OPTIONS"))


def _refusal(refused: RefusedError) -> ContentAnswer:
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
    return ContentAnswer(refused.status, headers, f"{refused.text}\n".encode())


@asynccontextmanager
async def content_port(
    service: ServiceSettings, find: FindContent, *, shared: bool = False
) -> AsyncIterator[str]:
    """Listen on the caches' port, if the service file has one, until the block is left. ``shared``:
    as for ``ContentPort.listen``. Yields its address; empty where there is none. Raises FleetError
    (the files of TLS cannot be used), OSError (the address cannot be listened on)."""
    settings = service.contents
    if settings is None or settings.in_store:
        yield ""
        return
    # Whatever the devices' port asks of its peers, this one asks for no certificate.
    own = service.tls
    tls = None if own is None else Tls(certificate=own.certificate, key=own.key)
    port = ContentPort(find, tls=tls, limits=service.limits, proxies=service.proxies)
    address = await port.listen(settings.host, settings.port, shared=shared)
    logger.info("contents for caches: %s/contents/SHA256", address)
    try:
        yield address
    finally:
        await port.close()


def content_descriptors(service: ServiceSettings) -> int:
    """Return how many sockets the caches' port may have open."""
    listens = service.contents is not None and not service.contents.in_store
    return MOST_CONNECTIONS if listens else 0
