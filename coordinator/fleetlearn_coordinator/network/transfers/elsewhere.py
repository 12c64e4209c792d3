"""Where contents can be fetched by HTTP, in place of the devices' WebSockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer

if TYPE_CHECKING:  # contents.py is imported by nobody who asks for a URL
    from fleetlearn_coordinator.network.transfers.contents import Older

LEAST_ELSEWHERE = CHUNK_BYTES + 1
"""Bytes of a content from which on a device is told a URL: what fits into one chunk comes sooner by
its WebSocket."""


COMING = ""
"""In place of a URL: there will be one soon."""


class Elsewhere:
    """Where one run's contents are beside this process, within a running event loop. This one:
    nowhere."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def url(self, sha256: str) -> str | None:
        """Return where a content is, which the run serves, for a while from now on; COMING. None:
        only the WebSocket has it."""
        return None

    async def changed(self) -> None:
        """Wait until there are other URLs."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def wake(self) -> None:
        """There are other URLs."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # it was cancelled
                waiter.set_result(None)

    def publish(self, newest: Mapping[str, Buffer], older: Mapping[str, Older]) -> None:
        """The run serves these vectors, its bundles' files, and no others."""

    def add_older(self, sha256: str, where: Older) -> None:
        """The run serves this vector too, until others are published."""

    def sweep(self) -> None:
        """Time has passed. Called each second."""

    def close(self) -> None:
        """The run is served here no more."""


NOWHERE = Elsewhere()
