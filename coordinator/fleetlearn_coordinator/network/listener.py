"""Accepts connections, a few at a time, and only as many as there are places and descriptors for.

websockets' own listener accepts without a bound, and asyncio's, at the process's limit of descriptors, logs 4,096
errors at once and tries again.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from fleetlearn_protocol.messages import PROTOCOL_NAME
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from fleetlearn_coordinator.conversation.limits import (
    ACCEPTS_PER_TURN,
    LARGEST_MESSAGE,
    LINGER,
    MESSAGE_RATE,
    NEWCOMERS,
    SHORT_LIFE,
    SHORT_LIFE_BURST,
    SHORT_LIFE_RATE,
    Bucket,
)
from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.network.connection import Connection, Handler
from fleetlearn_coordinator.network.gate import Gate, RefusalError
from fleetlearn_coordinator.network.peer_log import logger, websockets_logger
from fleetlearn_coordinator.network.tls import HANDSHAKE_TIMEOUT, Certificates

SUBPROTOCOLS = [Subprotocol(PROTOCOL_NAME)]
RETRY = 1.0
"""Seconds until connections are accepted again after the system had no descriptor or memory for one."""


class Listener:
    """Accepts connections on an address."""

    def __init__(
        self,
        handler_of: Callable[[Connection], Handler],
        *,
        origins: Collection[str] = (),
        newcomers: int = NEWCOMERS,
        speaking: Callable[[], int] = lambda: 0,
        heartbeat: float = 86400.0,
        certificates: Certificates | None = None,
        gate: Gate | None = None,
    ) -> None:
        """``handler_of``: makes the handler of a new connection; ``origins``: web pages that may connect;
        ``newcomers``: connections beside those that are ``speaking`` for a device; ``heartbeat``: seconds between a
        device's signs of life; ``certificates``: for TLS, if it is to be had; ``gate``: who
        may connect, if not everybody."""
        self._certificates, self._gate = certificates, gate
        self._handler_of, self._origins = handler_of, frozenset(origins)
        self._newcomers, self._speaking = newcomers, speaking
        self._message_rate = max(MESSAGE_RATE, 8 / heartbeat)
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._accepting = False
        self._open = False
        self._short_lives = Bucket(SHORT_LIFE_RATE, SHORT_LIFE_BURST, self._loop.time())
        self._retry: asyncio.TimerHandle | None = None
        self._beginning: set[asyncio.Task[None]] = set()
        """One task for each connection that has no transport yet."""
        self.connections: set[Connection] = set()
        """All whose sockets are accepted and not closed."""
        self._all_lost = asyncio.Event()
        """Set when the last connection is closed."""

    async def listen(self, host: str, port: int) -> str:
        """Begin to listen. Returns the address as host:port. Raises OSError."""
        # asyncio looks up the name, makes the sockets, and has the better errors.
        server = await self._loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        self._listening = [one.dup() for one in server.sockets]
        server.close()
        for one in self._listening:
            process_settings.tune_listener(one)
            one.listen(process_settings.BACKLOG)
            one.setblocking(False)
        self._open = True
        self.check()
        host, port = self._listening[0].getsockname()[:2]
        return f"{host}:{port}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections, within little more than LINGER seconds, whatever the peers do."""
        self._open = False
        self.check()
        if self._retry is not None:
            self._retry.cancel()
        for one in self._listening:
            one.close()
        for task in self._beginning:  # handshakes
            task.cancel()
        if self._beginning:
            await asyncio.wait(self._beginning)
        for connection in self.connections:
            connection.end(1001, "the coordinator is stopping", reading=True)
        await self._wait_until_all_are_lost(LINGER)
        for connection in self.connections:
            connection.transport.abort()
        await self._wait_until_all_are_lost(LINGER / 2)

    async def _wait_until_all_are_lost(self, longest: float) -> None:
        if self.connections:
            self._all_lost.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(longest):
                    await self._all_lost.wait()

    # Accepting

    def check(self) -> None:
        """Begin or stop to accept connections, depending on whether there is room for more."""
        wait = self._short_lives.wait(self._loop.time(), 8)
        room = len(self.connections) - self._speaking() < self._newcomers
        accepting = self._open and room and not wait and self._retry is None
        if self._open and wait and self._retry is None:
            self._pause(wait)
        if accepting != self._accepting:
            self._accepting = accepting
            for one in self._listening:
                if accepting:
                    self._loop.add_reader(one, self._accept, one)
                else:
                    self._loop.remove_reader(one)

    def _pause(self, seconds: float) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(seconds, self._end_pause)

    def _end_pause(self) -> None:
        self._retry = None
        self.check()

    def _accept(self, listening: socket.socket) -> None:
        room = self._newcomers - len(self.connections) + self._speaking()
        for _ in range(min(room, ACCEPTS_PER_TURN)):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # no descriptor is left, or no memory
                logger.error("no connection can be accepted for %.0f s: %s", RETRY, error)
                self._pause(RETRY)
                break
            protocol = ServerProtocol(subprotocols=SUBPROTOCOLS, max_size=LARGEST_MESSAGE, logger=websockets_logger)
            connection = Connection(protocol, self, self._message_rate)
            connection.driver = self._handler_of(connection)
            self.connections.add(connection)
            self._beginning.add(self._loop.create_task(self._begin(connection, accepted)))
        self.check()

    async def _begin(self, connection: Connection, accepted: socket.socket) -> None:
        tls: dict[str, Any] = {}
        if self._certificates is not None:
            tls = {
                "ssl": self._certificates.context,
                "ssl_handshake_timeout": HANDSHAKE_TIMEOUT,
                "ssl_shutdown_timeout": LINGER,
            }
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted, **tls)
        except (OSError, asyncio.CancelledError) as error:  # the peer has gone already, or speaks no TLS
            if isinstance(error, ssl.SSLError):
                logger.info("a connection was refused in its TLS handshake: %s", error.reason or error)
            accepted.close()
            self.lost(connection)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._beginning.discard(task)

    def lost(self, connection: Connection) -> None:
        """Called by a connection when it is closed."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        if not self.connections:
            self._all_lost.set()
        if self._loop.time() - connection.since < SHORT_LIFE and not connection.finished:
            self._short_lives.tokens = max(0.0, self._short_lives.tokens - 1)
        connection.driver.closed()
        self.check()

    def respond(self, connection: Connection, request: Request) -> Response:
        """Return the answer to the request that opens the connection. Web pages that ``origins`` does not name are
        refused: browsers send the page's Origin; devices send none. So are devices that the gate does not know."""
        protocol = connection.protocol
        for origin in request.headers.get_all("Origin"):
            if origin not in self._origins:
                logger.info("a web page of %.200s was refused; the service's origins do not name it", origin)
                return protocol.reject(
                    HTTPStatus.FORBIDDEN,
                    f"The origin {origin[:200]} may not connect: web pages must be named in origins, in the "
                    "coordinator's service file.\n",
                )
        if self._gate is not None:
            try:
                certificate = connection.transport.get_extra_info("peercert")
                connection.known = self._gate.check(request.headers, certificate)
            except RefusalError as refusal:
                logger.info("a connection was refused: %s", refusal.text)
                response = protocol.reject(refusal.status, f"{refusal.text}\n")
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
        return protocol.accept(request)
