"""The port of the page for people: the files of one folder, and a few documents that are made when
they are asked for.

Whoever can reach the port may read all of it. So it is bounded in every way, and what it costs the
event loop is a part of one core at most, whoever asks: requests and bytes have a rate for all peers
together. Files are read in other threads and sent in chunks. The peer must take a chunk before the
next is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from http import HTTPStatus

import h11
from fleetlearn_protocol.errors import FleetError

from fleetlearn_coordinator.conversation.limits import Bucket
from fleetlearn_coordinator.network.http_answers import (
    MOST_CONNECTIONS,
    Manner,
    answer_requests,
    check_reads_alone,
    request_rate,
)
from fleetlearn_coordinator.network.http_port import (
    HttpPort,
    RefusedError,
    RequestTarget,
    read_target,
)
from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.network.static_files import CHUNK, FileResponse, StaticFolder, document
from fleetlearn_coordinator.plan.service_settings import Limits, Tls

DESCRIPTORS = 2 * MOST_CONNECTIONS
"""File descriptors that the page needs: for each connection its socket, and the file that is
sent."""
THREADS = 4
"""Files that are opened or read, and documents that are made, at a time."""
CHUNK_TIMEOUT = 10.0
"""Seconds in which a peer takes a chunk: 6.4 KiB/s at least."""
LIFE = 900.0
"""Seconds that a connection lives at most: those of a large file for a slow peer."""
BYTE_RATE, BYTE_BURST = 32.0 * 2**20, 8.0 * 2**20
"""Bytes per second to all peers together, and at once."""
POLICY = (
    "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src "
    "'self'; img-src 'self' data: blob:; media-src 'self' blob:; connect-src 'self' wss: ws:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load, and run: its own files alone. It may speak to any coordinator."""
HEADERS = (
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Embedder-Policy", "require-corp"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)
"""Headers of every answer. The first two make threads possible: the page is "cross-origin isolated"
(HTML, 7.1.3)."""

Document = Callable[[], bytes]
"""Returns a document's JSON. Called in other threads. Raises FleetError, OSError where it cannot be
had now."""


class PageListener:
    """The port, within a running event loop."""

    def __init__(
        self,
        folder: StaticFolder,
        documents: Mapping[str, Document],
        *,
        tls: Tls | None,
        limits: Limits,
        proxies: Collection[str] = (),
        downloads: str = "",
    ) -> None:
        """``documents``: JSON by its name in the folder, in place of a file of that name.
        ``limits``: of each address. ``proxies``: networks without such limits. ``downloads``: the
        source (Content Security Policy, 2.3.1) from which its devices fetch by HTTP, if any. Raises
        FleetError where the files of TLS cannot be used."""
        policy = POLICY.replace("connect-src 'self'", f"connect-src 'self' {downloads}".rstrip())
        self._headers = [(name, policy if value is POLICY else value) for name, value in HEADERS]
        self._folder, self._documents = folder, documents
        self._port = HttpPort(
            self._talk,
            "the page",
            most=MOST_CONNECTIONS,
            threads=THREADS,
            timeout=LIFE,
            tls=tls,
            limits=limits,
            proxies=proxies,
        )
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._requests, self._bytes = request_rate(now), Bucket(BYTE_RATE, BYTE_BURST, now)

    async def listen(self, host: str, port: int) -> str:
        """Begin to accept connections. Returns the address, as a URL. Raises OSError."""
        return await self._port.listen(host, port)

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

    async def _answer(self, request: h11.Request) -> FileResponse:
        """Return what a request is answered. Raises RefusedError."""
        target = read_target(request)
        return await self._loop.run_in_executor(
            self._port.pool, self._find, target, dict(request.headers)
        )

    def _find(self, target: RequestTarget, headers: Mapping[bytes, bytes]) -> FileResponse:
        """Return what is asked for. Raises RefusedError."""
        make = self._documents.get("/".join(target.path))
        try:
            if make is not None:
                return document(make())
            return self._folder.find(target.path, headers)
        except (FleetError, OSError) as error:  # which names paths, and is not for everybody
            logger.warning("the page cannot be told %s: %s", "/".join(target.path)[:200], error)
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "this cannot be read now; try again later"
            ) from None

    async def _send(
        self,
        connection: h11.Connection,
        writer: asyncio.StreamWriter,
        answer: FileResponse,
        manner: Manner,
    ) -> None:
        """Send an answer, and close its file. Raises TimeoutError where the peer does not take it,
        OSError where the peer is gone."""
        with closing(answer.content):
            headers = [*answer.headers, *self._headers]
            if manner.last:
                headers.append(("Connection", "close"))
            head = h11.Response(
                status_code=answer.status, headers=headers, reason=answer.status.phrase
            )
            writer.write(connection.send(head) or b"")
            left = 0 if manner.silent else answer.size
            while left:
                chunk = await self._loop.run_in_executor(
                    self._port.pool, answer.content.read, min(left, CHUNK)
                )
                if not chunk:  # the file became shorter: the connection's end tells the peer so
                    raise EOFError
                left -= len(chunk)
                await asyncio.sleep(self._bytes.book(self._loop.time(), len(chunk)))
                writer.write(connection.send(h11.Data(data=chunk)) or b"")
                async with asyncio.timeout(CHUNK_TIMEOUT):
                    await writer.drain()
            writer.write(connection.send(h11.EndOfMessage()) or b"")


def _check(head: h11.Request) -> None:
    """Refuse a request before its body is read. Raises RefusedError."""
    check_reads_alone(head, (b"GET", b"HEAD"))


def _refusal(refused: RefusedError) -> FileResponse:
    return document(f"{refused.text}\n".encode(), refused.status, "text/plain; charset=utf-8")
