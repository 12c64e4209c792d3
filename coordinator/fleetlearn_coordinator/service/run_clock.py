"""A run's clock: the event loop's time without the time that the run was paused."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Clocks(NamedTuple):
    """One moment on both clocks, in seconds."""

    engine: float
    """Never goes back; the engine's."""
    wall: float
    """Unix time, for the records."""


class RunClock:
    """The clock of a run's engine, in seconds. While it is stopped no deadline comes closer."""

    def __init__(self, time: Callable[[], float]) -> None:
        """``time``: the event loop's."""
        self._time, self._behind = time, 0.0
        self._stopped: float | None = None
        """Since when it is stopped, on the event loop's clock."""

    def now(self) -> float:
        return self.read(self._time())

    def read(self, at: float) -> float:
        """Return what this clock says at a time of the event loop: now, or a moment ago."""
        return (at if self._stopped is None else self._stopped) - self._behind

    def when(self, time: float) -> float:
        """Return the event loop's time at which this clock, which is not stopped, says ``time``."""
        return time + self._behind

    def stop(self) -> None:
        """Harmless where it is stopped."""
        if self._stopped is None:
            self._stopped = self._time()

    def go_on(self) -> None:
        """Harmless where it is not stopped."""
        if self._stopped is not None:
            self._behind += self._time() - self._stopped
            self._stopped = None
