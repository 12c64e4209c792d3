"""How late the event loop does what is due."""

from __future__ import annotations

import asyncio

from fleetlearn_coordinator.service.monitoring.catalogue import Buckets

LOOK = 0.5
"""Seconds between two looks. One costs some 20 microseconds."""


class LoopLag:
    """Sets itself a time and looks how late it is called, again and again, until ``stop``."""

    def __init__(self, buckets: Buckets) -> None:
        """``buckets``: counts the seconds."""
        self._loop, self._buckets = asyncio.get_running_loop(), buckets
        self._set()

    def _set(self) -> None:
        self._due = self._loop.time() + LOOK
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._buckets.count(max(0.0, self._loop.time() - self._due))
        self._set()

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()
