"""A coordinator that stands by: it waits until nobody serves the run, and then serves it.

Two of them that reach the same store are a pair: one serves, and the other goes on within seconds
of its end, whatever ended it. One that loses the run, because its store is away or it was paused
for too long, stands by again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.systemd import READY, notify_systemd

from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.storage.errors import StoreAwayError, StoreError

logger = logging.getLogger("fleetlearn.coordinator")
T = TypeVar("T")

LOOK = 0.5
"""Seconds between looks at whether another coordinator serves the run."""


async def serve_when_free(
    is_locked: Callable[[], bool],
    serve: Callable[[], Awaitable[T]],
    stopped: asyncio.Future[str],
) -> T | None:
    """Serve as soon as nobody else does, and again after each loss of the store. Returns what
    ``serve`` did; None: ``stopped`` was set before.

    ``is_locked``: whether another coordinator serves the run; called in a thread. Raises what
    ``serve`` raises, unless it is that another coordinator has the run or the port, or that the
    store is away.
    """
    last, taken = "", "another coordinator serves the run"
    notify_systemd(READY)
    while not stopped.done():
        try:
            if not await asyncio.to_thread(is_locked):
                last = ""
                return await serve()
            why = taken
        except (FleetError, OSError) as error:
            if not _may_pass(error):
                raise
            # Another one was faster.
            why = taken if isinstance(error, StoreError) else in_words(error)
        if why != last:
            logger.warning("standing by: %s", why, extra=said("standing-by", reason=why))
        last = why
        await asyncio.wait({stopped}, timeout=LOOK)
    return None


def _may_pass(error: Exception) -> bool:
    """Return whether it may be otherwise later, without anybody's doing here."""
    if isinstance(error, StoreError):
        return error.code == Code.BUSY
    if isinstance(error, OSError):
        return error.errno == errno.EADDRINUSE
    return isinstance(error, StoreAwayError)
