"""A TCP port for HTTP/1.1 whose cost is bounded: its connections, by their number, their rate,
their time, and for each address. h11 reads and writes HTTP without I/O; what is here is the
sockets, and the bounds.

The ports of administrators (``admin_listener``), of the page for people (``page_listener``) and of
caches (``content_port``) are such ports.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

from fleetlearn_coordinator.conversation.limits import (
    LINGER,
    REFUSED_LIFE,
    SHORT_LIFE,
    SHORT_LIFE_BURST,
    SHORT_LIFE_RATE,
    Bucket,
)
from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.network.addresses import AddressBook, AddressUse, Networks, read_address
from fleetlearn_coordinator.network.peer_log import logger, say_seldom
from fleetlearn_coordinator.network.tls import HANDSHAKE_TIMEOUT, Certificates
from fleetlearn_coordinator.plan.service_settings import Limits, Tls

MOST_HEADERS = 16 * 1024
"""Bytes of a request's line and headers."""
READ = 16 * 1024
"""Bytes that are read at a time."""
BACKLOG = 100
"""Connections that the kernel holds before they are accepted: those that an attack leaves there are
over in seconds."""
RETRY = 1.0
"""Seconds until connections are accepted again after the system had no descriptor or memory for
one."""

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]
"""Has the conversation of one connection. Returns whether it was of use to its peer: one that was
of none and was short counts against its address. Raises OSError, TimeoutError, EOFError (the peer
is gone, or too slow)."""


class RefusedError(Exception):
    """The request is answered by an error."""

    def __init__(self, status: HTTPStatus, text: str, *, silent: bool = False) -> None:
        """``silent``: the answer has no body."""
        super().__init__(text)
        self.status, self.text, self.silent = status, text, silent


class RequestTarget(NamedTuple):
    """What a request is for."""

    path: tuple[str, ...]
    """The parts between the slashes, decoded."""
    query: dict[str, str]


class HttpPort:
    """A port, within a running event loop."""

    def __init__(
        self,
        talk: Talk,
        name: str,
        *,
        most: int,
        threads: int,
        timeout: float,
        tls: Tls | None,
        limits: Limits | None = None,
        proxies: Collection[str] = (),
    ) -> None:
        """``name``: whose requests these are, for the log. ``most``: connections at a time.
        ``threads``: of ``pool``. ``timeout``: seconds that
        one lives. ``limits``: of each address; None: addresses have none. ``proxies``: networks
        whose addresses have none. Raises FleetError where the files of TLS cannot be used."""
        self._talk, self._name, self._most, self._timeout = talk, name, most, timeout
        self._certificates = None if tls is None else Certificates(tls)
        self._book, self._proxies = (
            None if limits is None else AddressBook(limits),
            Networks(proxies),
        )
        self._loop = asyncio.get_running_loop()
        self.pool = ThreadPoolExecutor(threads, name)
        """For what must not hold the event loop up."""
        self._accepts = Bucket(SHORT_LIFE_RATE, SHORT_LIFE_BURST, self._loop.time())
        self._listening: list[socket.socket] = []
        self._pause: asyncio.TimerHandle | None = None
        self._open: dict[asyncio.Task[None], asyncio.Timeout] = {}
        """The task of each connection -> when its time is over."""
        self._apart: set[asyncio.Task[None]] = set()
        """Connections that do not count among ``most``."""

    @property
    def connections(self) -> int:
        """How many connections there are, except those that ``set_apart`` was called for."""
        return len(self._open) - len(self._apart)

    def set_apart(self, seconds: float) -> None:
        """Let the connection that this task serves live for ``seconds`` from now on, and not
        count among the port's connections. The caller bounds how many do not."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task].reschedule(self._loop.time() + seconds)
        self._apart.add(task)

    async def listen(self, host: str, port: int, *, shared: bool = False) -> str:
        """Begin to accept connections. ``shared``: other processes listen there too. Returns the
        address, as a URL. Raises OSError."""
        self._listening = await process_settings.listening_sockets(
            host, port, BACKLOG, shared=shared
        )
        self._accept_again()
        found = self._listening[0].getsockname()
        name = f"[{found[0]}]" if ":" in found[0] else found[0]
        return f"{'http' if self._certificates is None else 'https'}://{name}:{found[1]}"

    async def close(self) -> None:
        """Accept nothing more, and end what is open."""
        if self._pause is not None:
            self._pause.cancel()
        for one in self._listening:
            self._loop.remove_reader(one)
            one.close()
        await asyncio.sleep(0)  # one that has not begun would leave its socket open
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
        self.pool.shutdown(wait=False, cancel_futures=True)

    # Accepting

    def _accept_again(self) -> None:
        self._pause = None
        for one in self._listening:
            self._loop.add_reader(one, self._accept, one)

    def _rest(self, seconds: float) -> None:
        """Accept nothing for a while: what waits, waits in the kernel, at no cost here."""
        if self._pause is None:
            self._pause = self._loop.call_later(seconds, self._accept_again)
            for one in self._listening:
                self._loop.remove_reader(one)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection: all others have their turn before the next."""
        try:
            accepted, peer = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left, or no memory
            logger.error(
                "no connection of %s can be accepted for %.0f s: %s", self._name, RETRY, error
            )
            self._rest(RETRY)
            return
        now, room, use = self._loop.time(), self._most - self.connections, self._enter(peer[0])
        # it is counted itself
        if room and (use is None or not (use.floods(now, room + 1) or use.refusal(now))):
            self._accepts.tokens -= 1
            limit = asyncio.timeout(self._timeout)
            self._open[self._loop.create_task(self._serve(accepted, use, limit))] = limit
        else:
            accepted.close()
            self._leave(use)
            self._accepts.tokens -= REFUSED_LIFE
        if wait := self._accepts.wait(now, 8):
            self._rest(wait)

    def _enter(self, host: str) -> AddressUse | None:
        """Count a connection of an address. Returns what the address has spent; None if it has no
        limits."""
        address = read_address(host)
        if self._book is None or address is None or address in self._proxies:
            return None
        use = self._book.find(address, self._loop.time())
        if use is not None:
            self._book.enter(use)
        return use

    def _leave(self, use: AddressUse | None) -> None:
        if use is not None and self._book is not None:
            self._book.leave(use, newcomer=True)

    # One connection

    async def _serve(
        self, accepted: socket.socket, use: AddressUse | None, limit: asyncio.Timeout
    ) -> None:
        began, useful = self._loop.time(), False
        transport: asyncio.Transport | None = None
        try:
            async with limit:
                accepted.setblocking(False)
                reader = asyncio.StreamReader(READ)
                protocol = asyncio.StreamReaderProtocol(reader)
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, accepted, **self._tls()
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                useful = await self._talk(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, EOFError) as error:  # of TLS, too
            if getattr(error, "reason", None) == "HTTP_REQUEST":
                say_seldom(
                    f"a request of {self._name} was refused",
                    "it is for http://, and this port has https:// alone",
                )
            _forget_frames(error)
        except Exception:
            logger.exception("a request of %s failed", self._name)
        finally:
            if transport is None:
                accepted.close()
            else:
                transport.abort()
            if use is not None and not useful and self._loop.time() - began < SHORT_LIFE:
                use.short_lives.tokens = max(0.0, use.short_lives.tokens - 1)
            self._leave(use)
            task = asyncio.current_task()
            assert task is not None
            del self._open[task]
            self._apart.discard(task)

    def _tls(self) -> dict[str, Any]:
        if self._certificates is None:
            return {}
        self._certificates.check()
        context: ssl.SSLContext = self._certificates.context
        return {
            "ssl": context,
            "ssl_handshake_timeout": HANDSHAKE_TIMEOUT,
            "ssl_shutdown_timeout": LINGER,
        }


def _forget_frames(error: BaseException) -> None:
    """Let an error's frames go. Those of h11, and of asyncio's TLS, hold the error themselves, and
    so the connection's buffers until the next garbage collection, which is rare here."""
    error.__traceback__ = None


async def send_answer(
    connection: h11.Connection,
    writer: asyncio.StreamWriter,
    status: HTTPStatus,
    headers: Iterable[tuple[str, str]],
    body: bytes,
    *,
    silent: bool = False,
) -> bool:
    """Send the only answer of a connection. Returns whether its status is 200.

    headers: those about the connection's end and the body's length are added. silent: send the
    headers alone, as the answer to HEAD.
    """
    own = [
        ("Connection", "close"),
        *headers,
        ("Content-Length", str(len(body))),
        ("X-Content-Type-Options", "nosniff"),
    ]
    response = h11.Response(status_code=status, headers=own, reason=status.phrase)
    for event in (response, h11.Data(data=b"" if silent else body), h11.EndOfMessage()):
        writer.write(connection.send(event) or b"")
    await writer.drain()
    return status == HTTPStatus.OK


async def read_request(
    connection: h11.Connection, reader: asyncio.StreamReader, check: Callable[[h11.Request], None]
) -> tuple[h11.Request, bytes]:
    """Return the next request and its body. ``check``: looks at a request before its body is read,
    and raises RefusedError. Raises RefusedError (what the request is answered), EOFError (the peer
    is gone)."""
    head, body = None, bytearray()
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            _forget_frames(error)
            raise RefusedError(
                HTTPStatus(error.error_status_hint), f"this is not HTTP/1.1: {error}"
            ) from None
        match event:
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(READ))
            case h11.Request():
                check(event)
                head = event
            case h11.Data(data=data):
                body += data
            case h11.EndOfMessage():
                assert head is not None
                return head, bytes(body)
            case _:  # it closed the connection
                raise EOFError


def read_target(request: h11.Request) -> RequestTarget:
    """Return what a request is for. Raises RefusedError."""
    with suppress(ValueError):
        target = urlsplit(request.target.decode("ascii"))
        path = tuple(unquote(part, errors="strict") for part in target.path.strip("/").split("/"))
        return RequestTarget(
            path,
            dict(
                parse_qsl(target.query, keep_blank_values=True, errors="strict", max_num_fields=20)
            ),
        )
    raise RefusedError(HTTPStatus.BAD_REQUEST, "the request's target is no path that can be read")
