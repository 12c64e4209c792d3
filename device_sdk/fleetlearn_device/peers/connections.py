"""A peer's connections: it dials the neighbours that stand behind it in the address book, and
listens for those before it. TLS shows each side who the other is, before a WebSocket's first byte.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import NamedTuple

from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.frames import MAX_FRAME_BYTES
from fleetlearn_protocol.peer_messages import PEER_PROTOCOL_NAME
from websockets.asyncio.client import connect
from websockets.asyncio.connection import Connection as Socket
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from fleetlearn_device.driver.addresses import connect_first, find_places
from fleetlearn_device.driver.connection import QUEUED_FRAMES, RepeatedLine, printable

log = logging.getLogger("fleetlearn.device")

OPEN = 10.0
"""Seconds for a connection to open."""
AGAIN, AGAIN_AT_MOST = 0.5, 10.0
"""Seconds, about, after which a neighbour is dialled again; they double up to the second."""
PING = 20.0
"""Seconds between two signs of life, and for one to be answered."""
_OPTIONS = {
    "compression": None,
    "max_size": MAX_FRAME_BYTES,
    "max_queue": QUEUED_FRAMES,
    "open_timeout": OPEN,
    "close_timeout": 2.0,
    "ping_interval": PING,
    "ping_timeout": 3 * PING,
    "subprotocols": [Subprotocol(PEER_PROTOCOL_NAME)],
}

Opened = Callable[[Socket, str], Awaitable[None]]
"""Called with each connection and the neighbour whose certificate it showed; returns at its end."""


class Listening(NamedTuple):
    """Where a peer listens."""

    host: str | None
    """None: on all addresses of this machine."""
    port: int


class PeerConnections:
    """Keeps a peer connected with its neighbours.

    Args:
        dialling, listening: TLS, as ``certificate.tls_contexts`` makes it.
        certificates: Certificate (DER) -> neighbour.
        opened: What is done with each connection.
    """

    def __init__(
        self,
        dialling: ssl.SSLContext,
        listening: ssl.SSLContext,
        certificates: dict[bytes, str],
        opened: Opened,
    ) -> None:
        self._dialling, self._listening = dialling, listening
        self._certificates, self._opened = certificates, opened

    async def listen(self, at: Listening) -> Server:
        """Begin to listen. Raises OSError."""
        return await serve(
            self._accept,
            at.host,
            at.port,
            ssl=self._listening,
            ssl_handshake_timeout=OPEN,
            server_header=None,
            logger=_silent(),
            **_OPTIONS,  # type: ignore[arg-type]
        )

    async def _accept(self, socket: ServerConnection) -> None:
        neighbour = self._shown(socket)
        if neighbour is not None:
            await self._opened(socket, neighbour)

    async def dial(
        self, neighbour: str, places: Callable[[], list[tuple[str, int]]], moved: asyncio.Event
    ) -> None:
        """Connect to a neighbour, again after each end, until this is cancelled.

        places: its addresses now, the best first. moved: set when there are others.
        """
        line, wait = RepeatedLine(), AGAIN
        while True:
            moved.clear()
            for place in places():
                if await self._dial_one(neighbour, place, line):
                    wait = AGAIN
                    break
            seconds = wait * random.uniform(0.5, 1.0)
            wait = min(2 * wait, AGAIN_AT_MOST)
            try:
                await asyncio.wait_for(moved.wait(), seconds)
            except asyncio.TimeoutError:
                continue

    async def _dial_one(self, neighbour: str, place: tuple[str, int], line: RepeatedLine) -> bool:
        """Connect once, and return at the connection's end whether there was one."""
        host, port = place
        try:
            found = await find_places(host, port, OPEN)
            raw, _ = await connect_first(found, OPEN, neighbour)
            async with connect(
                f"wss://{host if ':' not in host else f'[{host}]'}:{port}",
                sock=raw,
                ssl=self._dialling,
                server_hostname=neighbour,
                proxy=None,
                ssl_handshake_timeout=OPEN,
                **_OPTIONS,  # type: ignore[arg-type]
            ) as socket:
                line.clear()
                if self._shown(socket) != neighbour:
                    return False  # the address is another peer's, as the warning says
                await self._opened(socket, neighbour)
                return True
        except (OSError, WebSocketException, EOFError) as error:
            line.warn(f"no connection to {neighbour}: {why_not(error, neighbour, place)}")
            return False

    def _shown(self, socket: Socket) -> str | None:
        """Return whose certificate the other end of a connection has shown."""
        tls = socket.transport.get_extra_info("ssl_object")
        return self._certificates.get(tls.getpeercert(binary_form=True))


def why_not(error: Exception, neighbour: str, place: tuple[str, int]) -> str:
    """Return why a neighbour cannot be connected to, for people."""
    host, port = place
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"whoever answers at {host} port {port} has another certificate than {neighbour} has "
            "in the address book: print its card on that device again, and give all peers the new "
            "book"
        )
    if isinstance(error, ssl.SSLError):
        return (
            f"TLS with {host} port {port} fails ({error.reason}): {neighbour} may have another "
            "address book, with another certificate of this peer"
        )
    return printable(in_words(error))


def _silent() -> logging.Logger:
    """Return a logger for websockets, which would write a traceback for each port scan."""
    logger = logging.getLogger("fleetlearn.device.websockets")
    logger.setLevel(logging.CRITICAL)
    return logger


def listening_at(text: str | None, place: tuple[str, int] | None) -> Listening:
    """Return where to listen: as the owner says, or at the peer's own address in the book; on all
    addresses where that is a name, which may lead elsewhere. Raises ValueError."""
    if text is not None:
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{text!r} was given; expected HOST:PORT, or :PORT for all addresses")
        return Listening(host or None, int(port))
    if place is None:
        raise ValueError("this peer has no address in the address book; say where it listens")
    try:
        ip_address(place[0])
    except ValueError:
        return Listening(None, place[1])
    return Listening(*place)
