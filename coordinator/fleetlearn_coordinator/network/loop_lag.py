"""How late the event loop does what is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK = 0.5
"""Seconds between two looks. One costs some 20 microseconds."""


class LoopLag:
    """Sets itself a time and looks how late it is called, again and again, while somebody watches.
    A process has one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watchers: list[Callable[[float], object]] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, watcher: Callable[[float], object]) -> None:
        """From now on call ``watcher`` at each look, with how late it was, in seconds."""
        self._watchers.append(watcher)
        if self._timer is None:
            self._set()

    def leave(self, watcher: Callable[[float], object]) -> None:
        """Call ``watcher`` no more. Harmless where it is not called."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        due = self._loop.time() + LOOK
        self._timer = self._loop.call_at(due, self._look, due)

    def _look(self, due: float) -> None:
        late = max(0.0, self._loop.time() - due)
        self._set()
        for watcher in list(self._watchers):
            watcher(late)
