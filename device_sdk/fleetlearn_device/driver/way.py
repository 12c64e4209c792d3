"""The way to the coordinator: directly to one of its addresses, or through a proxy; and what went
wrong on it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, NamedTuple

from fleetlearn_protocol.addresses import is_loopback
from fleetlearn_protocol.errors import in_words
from websockets.exceptions import InvalidProxyStatus
from websockets.uri import WebSocketURI

from fleetlearn_device.driver.addresses import (
    NEXT_AFTER,
    Place,
    UnreachableError,
    connect_first,
    find_places,
)
from fleetlearn_device.driver.proxies import Proxy, configured_proxy, find_proxy


class Way(NamedTuple):
    """A way to the coordinator: its address with a connected socket, or a proxy."""

    place: Place | None = None
    socket: socket.socket | None = None
    proxy: Proxy | None = None

    def options(self) -> dict[str, Any]:
        """Return what websockets' ``connect`` is given for this way."""
        if self.proxy is None:
            return {"sock": self.socket, "proxy": None}
        # uvloop has no such argument, and tries a proxy's addresses one after the other. Without
        # need it is not given: asyncio before 3.12 leaves a socket open where it is cancelled at
        # the moment of the connection.
        happy = self.proxy.has_name and isinstance(
            asyncio.get_running_loop(), asyncio.BaseEventLoop
        )
        return {"proxy": self.proxy.url} | ({"happy_eyeballs_delay": NEXT_AFTER} if happy else {})

    def close(self) -> None:
        """Close the socket, if no connection has done so."""
        if self.socket is not None:
            self.socket.close()

    def __str__(self) -> str:
        return f"through {self.proxy}" if self.proxy is not None else f"{self.place}"


async def open_way(uri: WebSocketURI, seconds: float, turn: int) -> Way:
    """Return the way to a coordinator.

    ``seconds``: for the lookup of its name, and for the connection. ``turn``: the number of
    attempts before this one: each begins with the next address, since a network may let small
    packets through to one and lose large ones.

    Raises UnreachableError.
    """
    proxy = await find_proxy(uri)
    if proxy is not None:
        return Way(proxy=proxy)
    places = await find_places(uri.host, uri.port, seconds)
    first = turn % len(places)
    try:
        connected, place = await connect_first(places[first:] + places[:first], seconds)
    except UnreachableError as error:
        unused = None if uri.secure or is_loopback(uri.host) else configured_proxy(uri)
        if unused is None:
            raise
        raise UnreachableError(
            f"{error}. {unused[0]} names a proxy, which is not used for ws://: it would read the "
            "device's credential; use wss:// where the way leads through a proxy"
        ) from None
    return Way(place, connected)


def explain(error: Exception, uri: WebSocketURI, way: Way | None) -> str:
    """Return why a connection could not be opened on a way, and what to do where that is known."""
    if way is None:
        return str(error)
    if way.proxy is None:
        if isinstance(error, TimeoutError):
            return (
                "it took the connection, but gave no answer to the handshake: something else may "
                "listen there"
            )
        return str(error) or type(error).__name__
    name = f"[{uri.host}]" if ":" in uri.host else uri.host
    instead = f"check {way.proxy.setting}, or set NO_PROXY={uri.host} to connect without the proxy"
    if isinstance(error, InvalidProxyStatus):
        status = f"HTTP {error.response.status_code} {error.response.reason_phrase}".strip()
        if error.response.status_code == 407:
            instead = (
                "it asks for a name and a password, as in "
                f"{way.proxy.setting}=http://NAME:PASSWORD@HOST:PORT"
            )
        return f"the proxy refuses to connect to {name}:{uri.port} ({status}): {instead}"
    if isinstance(error, TimeoutError):
        return f"no answer: {instead}"
    if isinstance(error, socket.gaierror):
        return f"the proxy's name was not found ({in_words(error)}): {instead}"
    if isinstance(error, ConnectionRefusedError):
        return f"the proxy refused the connection: {instead}"
    return f"{in_words(error)}: {instead}"
