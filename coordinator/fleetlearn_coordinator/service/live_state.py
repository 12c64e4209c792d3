"""Where a run stands at this moment, for ``status``, the status page and metrics: an observer
(observers.py).

The observer notes that something happened. What it then reads of the run is recorded at the next
look, a second later at most. A run in which nothing happens is recorded every ``QUIET`` seconds:
a coordinator on a memory card that waits for devices overnight writes a tenth as often.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from fleetlearn_coordinator.service.observers import RunEvent
from fleetlearn_coordinator.storage.ledger import Metadata, Row

QUIET = 10.0
"""Seconds between two records of a run in which nothing happens. Bytes that move are no event."""


class LiveState:
    """An observer that says when the run's state is to be recorded."""

    def __init__(
        self, read: Callable[[], Mapping[str, Any]], now: Callable[[], float] = time.time
    ) -> None:
        """``read``: returns the state of this moment. ``now``: returns the Unix time."""
        self._read, self._now = read, now
        self._began = now()
        self._news = True
        self._recorded = -inf

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Note that something happened."""
        self._news = True

    def take_rows(self, *, ended: bool = False) -> list[Row]:
        """Return what is to be written; the caller writes it. Empty: nothing happened since the
        last call. ``ended``: the run is not served any more."""
        now = self._now()
        # A clock that was set back must not silence the run.
        quiet = 0 <= now - self._recorded < QUIET
        if quiet and not self._news and not ended:
            return []
        self._news, self._recorded = False, now
        own = {"pid": None if ended else os.getpid(), "began": self._began}
        return [Metadata("live", msgspec.json.encode({**self._read(), **own}).decode())]
