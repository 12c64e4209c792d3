"""Connecting to the first of a host's addresses that answers ("happy eyeballs", RFC 8305).

A name often has an IPv6 and an IPv4 address, and the network at home only one that works. Addresses
are tried one after the other, a quarter of a second apart, and the first connection wins. asyncio's
``happy_eyeballs_delay`` does the same, but does not say which addresses it tried, and uvloop has no
such argument.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple

from fleetlearn_protocol.addresses import is_loopback
from fleetlearn_protocol.errors import in_words

from fleetlearn_device.driver.timeouts import timeout

NEXT_AFTER = 0.25
"""Seconds after which the next address is tried, if those before have not answered (RFC 8305,
section 5)."""


class UnreachableError(OSError):
    """No address of a host could be connected to. The text says which were tried, what happened,
    and what to do."""


class Place(NamedTuple):
    """One address of a host, as ``getaddrinfo`` gives it."""

    family: int
    address: tuple[str, int]
    """The IP address and the port; more for IPv6."""

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.address[0].partition("%")[0]).is_loopback

    def __str__(self) -> str:
        return f"{self.address[0]} port {self.address[1]}"


async def find_places(host: str, port: int, seconds: float) -> list[Place]:
    """Return the addresses of a host, in the order in which to try them: families take turns (RFC
    8305, section 4).

    Only addresses of this machine are addresses of a name such as ``localhost``. ``seconds``: for
    the lookup. Raises UnreachableError.
    """
    loop = asyncio.get_running_loop()
    try:
        async with timeout(seconds):
            rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise UnreachableError(
            f"no DNS server answered for the name {host} in {seconds:g} s: check the network"
        ) from None
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have such a name
        raise UnreachableError(
            f"the name {host} was not found ({in_words(error)}): check its spelling, and this "
            "device's network and DNS"
        ) from None
    # A dict, since some systems give an address twice.
    places = list(dict.fromkeys(Place(row[0], row[4]) for row in rows))  # type: ignore[arg-type]
    if is_loopback(host):
        places = [place for place in places if place.is_loopback]
        if not places:
            raise UnreachableError(
                f"the name {host} leads to another machine here; write 127.0.0.1 in its place"
            )
    first = [place for place in places if place.family == places[0].family]
    others = [place for place in places if place.family != places[0].family]
    turns = [place for pair in zip(first, others, strict=False) for place in pair]
    return turns + first[len(others) :] + others[len(first) :]


async def connect_first(
    places: Sequence[Place], seconds: float, who: str = "the coordinator"
) -> tuple[socket.socket, Place]:
    """Return a socket that is connected to the first of the places that answers, and which it is.

    ``seconds``: for all of them together. ``who``: what should listen there, for people. Raises
    UnreachableError.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    waiting = deque(places)
    running: dict[asyncio.Task[socket.socket], Place] = {}
    failures: dict[Place, OSError] = {}
    try:
        while (waiting or running) and loop.time() < end:
            if waiting:
                place = waiting.popleft()
                running[asyncio.create_task(_connect(place))] = place
            patience = NEXT_AFTER if waiting else end - loop.time()
            done, _ = await asyncio.wait(
                running, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                error = task.exception()
                if error is None:
                    return task.result(), running.pop(task)
                if not isinstance(error, OSError):
                    raise error
                failures[running.pop(task)] = error
    finally:
        for task in running:
            task.add_done_callback(_close)
            task.cancel()
    raise UnreachableError(_said(places, failures, seconds, who))


async def _connect(place: Place) -> socket.socket:
    connected = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connected, place.address)
    except BaseException:
        connected.close()
        raise
    return connected


def _close(task: asyncio.Task[socket.socket]) -> None:
    """Close the connection that came too late."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _said(places: Sequence[Place], failures: dict[Place, OSError], seconds: float, who: str) -> str:
    """Return what happened at each place, and what to do about it."""
    refused = [place for place in places if isinstance(failures.get(place), ConnectionRefusedError)]
    happened = ", ".join(f"{place} {_happened(failures.get(place), seconds)}" for place in places)
    if len(refused) == len(places):
        here = all(place.is_loopback for place in places)
        where = "on this machine" if here else "and listens for other machines"
        todo = f"nothing listens there. Check the port, and that {who} runs {where}"
    elif len(failures) < len(places):
        todo = "check the address and the port; a firewall may be in between"
    else:
        todo = "check the address, and this device's network"
    return f"{happened}: {todo}"


def _happened(error: OSError | None, seconds: float) -> str:
    if error is None or error.errno == errno.ETIMEDOUT:
        return f"gave no answer in {seconds:.3g} s"
    if isinstance(error, ConnectionRefusedError):
        return "refused the connection"
    words = {
        errno.ENETUNREACH: "cannot be reached from here",
        errno.EHOSTUNREACH: "cannot be reached from here",
    }
    return words.get(error.errno or 0) or f"failed ({in_words(error)})"
