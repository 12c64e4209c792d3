"""Keeping to a share of the processors: a pause after each step."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_REST = 60.0
"""Most seconds of one pause: a step that stood still for another reason, such as a machine that
slept, must not be paid for."""


class Pacing:
    """Rests after each step for as long as brings the processor time that the process uses down to
    its share."""

    def __init__(
        self,
        share: float,
        threads: int,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        """``share``: processors that may be used, such as 0.5. ``threads``: that a step has.
        ``used``: returns the process's seconds of processor time."""
        self._share, self._threads, self._clock, self._used = share, threads, clock, used
        self._since: tuple[float, float] | None = None

    def begin(self) -> None:
        """A task begins: what was before it does not count."""
        self._since = self._clock(), self._used()

    def after_step(self) -> float:
        """Return for how many seconds to rest now, and count from the end of that rest on."""
        if self._since is None:
            self.begin()
            return 0.0
        since, used = self._since
        seconds = self._clock() - since
        # Other threads of the program may use more: they are not this training's.
        busy = min(self._used() - used, self._threads * seconds)
        return min(max(busy / self._share - seconds, 0.0), LONGEST_REST)
