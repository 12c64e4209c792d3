"""Accepts connections, a few at a time, and only as many as there are places and descriptors for.

websockets' own listener accepts without a bound, and asyncio's, at the process's limit of
descriptors, logs 4,096 errors at once and tries again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
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
    REFUSED_LIFE,
    SHORT_LIFE,
    SHORT_LIFE_BURST,
    SHORT_LIFE_RATE,
    Bucket,
)
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.network.addresses import (
    AddressBook,
    AddressUse,
    Networks,
    read_address,
    retry_after,
)
from fleetlearn_coordinator.network.connection import DeviceConnection, Handler
from fleetlearn_coordinator.network.device_budgets import DeviceBudgets
from fleetlearn_coordinator.network.forwarded import origin_of
from fleetlearn_coordinator.network.gate import CAUSES, Doorkeeper, RefusalError, too_often
from fleetlearn_coordinator.network.peer_log import logger, say_seldom, websockets_logger
from fleetlearn_coordinator.network.tls import HANDSHAKE_TIMEOUT, Certificates
from fleetlearn_coordinator.network.tls_failures import HELLO, Hello, explain
from fleetlearn_coordinator.plan.service_settings import Limits
from fleetlearn_coordinator.storage.identities import Known

SUBPROTOCOLS = [Subprotocol(PROTOCOL_NAME)]
RETRY = 1.0
"""Seconds until connections are accepted again after the system had no descriptor or memory for
one."""


class Listener:
    """Accepts connections on an address."""

    def __init__(
        self,
        handler_of: Callable[[DeviceConnection], Handler],
        *,
        origins: Collection[str] = (),
        newcomers: int = NEWCOMERS,
        speaking: Callable[[], int] = lambda: 0,
        heartbeat: float = 86400.0,
        certificates: Certificates | None = None,
        gate: Doorkeeper | None = None,
        limits: Limits,
        proxies: Collection[str] = (),
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """``handler_of``: makes the handler of a new connection; ``origins``: web pages that may
        connect; ``newcomers``: connections beside those that are ``speaking`` for a device;
        ``heartbeat``: seconds between a device's signs of life; ``certificates``: for TLS, if it is
        to be had; ``gate``: who may connect, if not everybody; ``limits``: of addresses and
        devices; ``proxies``: networks that say truly whom they connect for; ``ready``: whether
        devices are to come here, for whoever asks for /readyz."""
        self._certificates, self._gate, self._ready = certificates, gate, ready
        self._handler_of, self._origins = handler_of, frozenset(origins)
        self.page_port: int | None = None
        """Where the coordinator's own page is served, if it is."""
        self._newcomers, self._speaking = newcomers, speaking
        self._message_rate = max(MESSAGE_RATE, 8 / heartbeat)
        self._loop = asyncio.get_running_loop()
        self._book, self._proxies = AddressBook(limits), Networks(proxies)
        self.budgets = DeviceBudgets(limits.device_check_ins)
        self._listening: list[socket.socket] = []
        self._accepting = False
        self._open = False
        self._short_lives = Bucket(SHORT_LIFE_RATE, SHORT_LIFE_BURST, self._loop.time())
        self._retry: asyncio.TimerHandle | None = None
        self._beginning: set[asyncio.Task[None]] = set()
        """One task for each connection that has no transport yet."""
        self.refused = dict.fromkeys(CAUSES, 0)
        """Cause -> connections that were refused before they were open."""
        self.connections: set[DeviceConnection] = set()
        """All whose sockets are accepted and not closed."""
        self._all_lost = asyncio.Event()
        """Set when the last connection is closed."""

    async def listen(self, host: str, port: int, *, shared: bool = False) -> str:
        """Begin to listen. ``shared``: as for ``process_settings.listening_sockets``. Returns the
        address as host:port. Raises OSError."""
        return self.listen_on(await process_settings.listening_sockets(host, port, shared=shared))

    def listen_on(self, sockets: Sequence[socket.socket]) -> str:
        """Begin to accept connections of these sockets, which listen and do not block. Returns the
        address as host:port."""
        self._listening = list(sockets)
        self._open = True
        self.check()
        host, port = self._listening[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def accept_no_more(self) -> None:
        """Close the sockets that listen. Connections that wait there to be accepted would be lost,
        unless another process has the same sockets (``listen_on``); so those are accepted first."""
        for one in self._listening:
            if self._accepting:
                self._accept(one)
        self._open = False
        self.check()
        for one in self._listening:
            one.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections, within little more than LINGER seconds, whatever the peers do."""
        self._open = False
        self.check()
        if self._retry is not None:
            self._retry.cancel()
        for one in self._listening:
            one.close()  # harmless where it was closed before
        await asyncio.sleep(0)  # a handshake that is cancelled before it begins could not clean up
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
        room = self._room() > 0
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

    def _room(self) -> int:
        """Return how many more newcomers there is room for."""
        return self._newcomers - len(self.connections) + self._speaking()

    def _pause(self, seconds: float) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(seconds, self._end_pause)

    def _end_pause(self) -> None:
        self._retry = None
        self.check()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(min(self._room(), ACCEPTS_PER_TURN)):
            try:
                accepted, name = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # no descriptor is left, or no memory
                logger.error("no connection can be accepted for %.0f s: %s", RETRY, error)
                self._pause(RETRY)
                break
            use = self._use_of(name[0])
            if use is not None and use.floods(self._loop.time(), self._room()):
                self._close_unread(accepted, use)
                continue
            protocol = ServerProtocol(
                subprotocols=SUBPROTOCOLS, max_size=LARGEST_MESSAGE, logger=websockets_logger
            )
            connection = DeviceConnection(protocol, self, self._message_rate)
            connection.driver = self._handler_of(connection)
            self._enter(connection, name[0], use)
            self.connections.add(connection)
            self._beginning.add(self._loop.create_task(self._begin(connection, accepted)))
        self.check()

    def _use_of(self, host: str) -> AddressUse | None:
        """Return what an address has spent; None if it has no limits, or is a proxy's, whose
        clients have them."""
        address = read_address(host)
        if address is None or address in self._proxies:
            return None
        return self._book.find(address, self._loop.time())

    def _enter(self, connection: DeviceConnection, host: str, use: AddressUse | None) -> None:
        connection.address, connection.use = host, use
        if use is not None:
            self._book.enter(use)

    def _close_unread(self, accepted: socket.socket, use: AddressUse) -> None:
        accepted.close()
        self.refused["too-many"] += 1
        self._end_short_life(REFUSED_LIFE)
        say_seldom(
            f"a connection of {use.key} was closed unread",
            "too many of them end at once or do not check in",
            logging.INFO,
        )

    def _end_short_life(self, weight: float) -> None:
        self._short_lives.tokens = max(0.0, self._short_lives.tokens - weight)

    async def _begin(self, connection: DeviceConnection, accepted: socket.socket) -> None:
        tls: dict[str, Any] = {}
        if self._certificates is not None:
            HELLO.set(hello := Hello(_address_of(accepted)))
            tls = {
                "ssl": self._certificates.context,
                "ssl_handshake_timeout": HANDSHAKE_TIMEOUT,
                "ssl_shutdown_timeout": LINGER,
            }
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted, **tls)
        except (OSError, asyncio.CancelledError) as error:
            # the peer has gone already, or speaks no TLS
            if self._certificates is not None and (
                why := explain(error, hello, self._certificates.own, time.time())
            ):
                self.refused["tls"] += 1
                say_seldom(f"a connection of {connection.address} failed in its TLS handshake", why)
            accepted.close()
            self.lost(connection)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._beginning.discard(task)

    def speaks_tls(self, connection: DeviceConnection) -> None:
        """Called by a connection without TLS whose peer begins a TLS handshake."""
        self.refused["tls"] += 1
        say_seldom(
            f"a connection of {connection.address} was refused",
            "it speaks TLS, and this port has none: it must connect to ws:// instead of wss://, or "
            "the service file must have [tls]",
        )

    def is_no_request(self) -> None:
        """Called by a connection whose peer sends what is no request of HTTP, or too long a one."""
        self.refused["bad-request"] += 1

    def lost(self, connection: DeviceConnection) -> None:
        """Called by a connection when it is closed."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        if not self.connections:
            self._all_lost.set()
        use, short = connection.use, self._loop.time() - connection.since < SHORT_LIFE
        if short and connection.sent_away != "finished":
            self._end_short_life(REFUSED_LIFE if connection.refused else 1.0)
        if use is not None:
            if short and not connection.sent_away:
                use.short_lives.tokens = max(0.0, use.short_lives.tokens - 1)
            self._book.leave(use, newcomer=connection.newcomer)
        connection.driver.closed()
        connection.cut_cycles()
        self.check()

    def checked_in(self, connection: DeviceConnection) -> None:
        """A device has checked in on this connection."""
        connection.newcomer = False
        if connection.use is not None:
            connection.use.newcomers -= 1
        self.check()

    # The request that opens a connection

    def respond(
        self, connection: DeviceConnection, request: Request
    ) -> Response | Pending[Response]:
        """Return the answer to the request that opens the connection, here or later."""
        try:
            self._check_address(connection, request)
            if (health := self._health(request)) is not None:
                return connection.protocol.reject(health, f"{health.phrase.lower()}\n")
            self._check_origin(request)
            known = self._check_credential(connection, request)
        except RefusalError as refusal:
            return self._refuse(connection, refusal)
        if not isinstance(known, Pending):
            return self._let_in(connection, request, known)
        later: Pending[Response] = Pending()

        def answered(now: float) -> None:
            found = known.result()
            if isinstance(found, RefusalError):
                later.answer(self._refuse(connection, found), now)
            else:
                later.answer(self._let_in(connection, request, found), now)

        known.then(answered)
        return later

    def _refuse(self, connection: DeviceConnection, refusal: RefusalError) -> Response:
        self.refused[refusal.cause] += 1
        say_seldom(f"a connection of {connection.address} was refused", refusal.text, logging.INFO)
        response = connection.protocol.reject(refusal.status, f"{refusal.text}\n")
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refusal.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            response.headers["Retry-After"] = retry_after()
        connection.refused = refusal.status == HTTPStatus.TOO_MANY_REQUESTS
        return response

    def _let_in(
        self, connection: DeviceConnection, request: Request, known: Known | None
    ) -> Response:
        connection.known = known
        response = connection.protocol.accept(request)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self.refused["bad-request"] += 1
            offered = ", ".join(request.headers.get_all("Sec-WebSocket-Protocol"))[:200] or "none"
            say_seldom(
                f"a connection of {connection.address} was refused",
                f"it is no WebSocket of this protocol (subprotocols offered: {offered}; expected: "
                f"{PROTOCOL_NAME}). A device with another version of fleetlearn, or another "
                "program, connects there",
                logging.INFO,
            )
        return response

    def _health(self, request: Request) -> HTTPStatus | None:
        """Return the answer to whoever watches this process: a load balancer, or Kubernetes. None:
        it is not asked for."""
        match request.path:
            case "/healthz":
                return HTTPStatus.OK
            case "/readyz":
                return HTTPStatus.OK if self._ready() else HTTPStatus.SERVICE_UNAVAILABLE
        return None

    def _check_address(self, connection: DeviceConnection, request: Request) -> None:
        """Find out which address a proxy connects for, and hold the address to its limits. Raises
        RefusalError."""
        now, proxy = self._loop.time(), read_address(connection.address)
        if proxy is not None and proxy in self._proxies:
            client = str(origin_of(request.headers, proxy, self._proxies))
            use = self._use_of(client)
            # it has one of the places itself
            floods = use is not None and use.floods(now, self._room() + 1)
            self._enter(connection, client, use)
            if floods:
                raise RefusalError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"too many connections of {client} end at once, or do not check in",
                )
        why = "" if connection.use is None else connection.use.refusal(now)
        if why:
            raise RefusalError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{why}; [limits] of the coordinator's service file says how many. Try again later",
            )

    def _check_origin(self, request: Request) -> None:
        """Refuse web pages that are not the coordinator's own and that ``origins`` does not name:
        browsers send the page's Origin, devices send none."""
        for origin in request.headers.get_all("Origin"):
            if origin not in self._origins and not self._is_own_page(origin, request):
                raise RefusalError(
                    HTTPStatus.FORBIDDEN,
                    f"the origin {origin[:200]} may not connect: web pages must be named in "
                    "origins, in the coordinator's service file",
                    "web-page",
                )

    def _is_own_page(self, origin: str, request: Request) -> bool:
        """Return whether a page's origin is the page's port of the host that the request is for.

        Without TLS the host must be an address: a name may have been pointed here by somebody else,
        for a page of their own (DNS rebinding). With TLS no such name has a certificate here."""
        hosts = request.headers.get_all("Host")
        if self.page_port is None or len(hosts) != 1:
            return False
        named = hosts[0].lower()
        host = named if named.endswith("]") else named.rpartition(":")[0] or named
        tls = self._certificates is not None
        if not tls and host != "localhost" and read_address(host.strip("[]")) is None:
            return False
        port = "" if self.page_port == (443 if tls else 80) else f":{self.page_port}"
        return origin == f"{'https' if tls else 'http'}://{host}{port}"

    def _check_credential(
        self, connection: DeviceConnection, request: Request
    ) -> Known | Pending[Known | RefusalError | None] | None:
        """Find out whose credential or certificate it is, and hold the device to its limit. None:
        everybody may connect. Raises RefusalError."""
        if self._gate is None:
            return None
        certificate = connection.transport.get_extra_info("peercert")
        return self._gate.check(request.headers, certificate, self._count_check_in)

    def _count_check_in(self, device: str) -> None:
        if self.budgets.check_in(device, self._loop.time()):
            raise too_often(device)


def _address_of(accepted: socket.socket) -> str:
    """Return the address of this machine to which a peer connected."""
    host = accepted.getsockname()[0]
    return str(read_address(host) or host)
