"""Attacks with connections: too many, too short, or of peers that do not go on. Each runs until
``stop`` is set.

``address`` is the coordinator's ws:// URL.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from _flood_attacks import Attack, again_and_again
from _raw_peer import TEXT, RawPeer, frame, open_stream

PEERS = 3000
"""Of the attacks that need thousands of connections."""
PAUSE = 0.05
"""Seconds until a connection that has ended is followed by another."""


async def handshakes(address: str, stop: asyncio.Event) -> None:
    """Connections that end after the handshake."""

    async def once(peer: RawPeer) -> None:
        pass

    await again_and_again(address, stop, once, 32)


async def returns(address: str, stop: asyncio.Event) -> None:
    """Devices that check in, leave and return."""
    names = itertools.count()

    async def once(peer: RawPeer) -> None:
        await peer.check_in(f"returns-{next(names) % 16}")

    await again_and_again(address, stop, once, 32)


async def idle(address: str, stop: asyncio.Event) -> None:
    """Thousands of connections that say nothing, not even in HTTP."""

    async def once(peer: RawPeer) -> None:
        await peer.swallow()

    await _many(address, stop, once)


async def slow_headers(address: str, stop: asyncio.Event) -> None:
    """Thousands whose request comes byte by byte and has no end."""

    async def once(peer: RawPeer) -> None:
        ended = asyncio.ensure_future(peer.swallow())
        peer.writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
        try:
            while not ended.done():
                await peer.send(b"x")
                await asyncio.sleep(1.0)
        finally:
            ended.cancel()

    await _many(address, stop, once)


async def half_open(address: str, stop: asyncio.Event) -> None:
    """Devices that go away in the middle of a message: some say so (FIN), some do not. None reads
    any more."""
    number = itertools.count()

    async def once(peer: RawPeer) -> None:
        await peer.check_in()
        await peer.send(frame(TEXT, b"x" * 1000)[:500])
        if next(number) % 2:
            peer.writer.write_eof()
        await asyncio.sleep(10.0)

    await again_and_again(address, stop, once, min(PEERS, 200))


async def stolen_names(address: str, stop: asyncio.Event) -> None:
    """Connect under the names of honest devices (``honest-0`` to ``honest-5``) with made-up
    credentials and tokens."""

    async def steal(name: str) -> None:
        while True:
            secret, token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
            headers = {
                "Authorization": f"Bearer {secret}",
                "Fleetlearn-Device": name,
                "Fleetlearn-Enrolment": token,
            }
            with suppress(OSError, asyncio.IncompleteReadError):
                peer = await RawPeer.connect(address, **headers)
                try:
                    await peer.check_in(name)
                    await peer.swallow()
                finally:
                    peer.abort()
            await asyncio.sleep(0)

    await _until(stop, [steal(f"honest-{number % 6}") for number in range(24)])


async def _many(
    address: str, stop: asyncio.Event, once: Callable[[RawPeer], Awaitable[None]]
) -> None:
    """Keep PEERS connections open that have sent no request."""

    async def hold() -> None:
        while True:
            with suppress(OSError):
                peer = RawPeer(*await open_stream(address))
                try:
                    await once(peer)
                finally:
                    peer.abort()
            await asyncio.sleep(PAUSE)

    await _until(stop, [hold() for _ in range(PEERS)])


async def _until(stop: asyncio.Event, attackers: list[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.ensure_future(attacker) for attacker in attackers]
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


ATTACKS: tuple[Attack, ...] = (handshakes, returns, idle, slow_headers, half_open, stolen_names)
