"""Keeping to a share of the processors: a pause after each step."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_REST = 60.0
"""Most seconds of one pause: a step that stood still for another reason, such as a machine that
slept, must not be paid for."""
CREDIT = 1.0
"""Seconds without use that steps to come may make up for."""


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
        self._last: tuple[float, float] | None = None
        """The time and the processor time after the last step."""
        self._paid_until = 0.0
        """Up to when what was used so far keeps the share."""

    def begin(self) -> None:
        """A task begins: what was before it does not count."""
        self._last = self._clock(), self._used()
        self._paid_until = self._last[0]

    def after_step(self) -> float:
        """Return for how many seconds to rest now. A step in which the machine was busy with other
        programs leaves a little for those after it."""
        if self._last is None:
            self.begin()
        assert self._last is not None
        (then, used), now, used_now = self._last, self._clock(), self._used()
        self._last = now, used_now
        # Other threads of the program may use more: they are not this training's.
        busy = min(used_now - used, self._threads * (now - then))
        self._paid_until = max(self._paid_until, then - CREDIT) + busy / self._share
        self._paid_until = min(self._paid_until, now + LONGEST_REST)
        return max(self._paid_until - now, 0.0)
