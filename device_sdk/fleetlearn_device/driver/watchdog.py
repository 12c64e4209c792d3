"""Tells systemd that the device is alive, for as long as it is: the event loop turns, and training
gets on. Where it is not, systemd ends the process and starts it again (WatchdogSec=)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from fleetlearn_protocol.systemd import ALIVE, notify_systemd

STILL = 300.0
"""Seconds after which training that neither computes nor ends a step is taken to stand still: a
lock that nobody frees, or a network disk that does not answer."""
BUSY = 0.002
"""Part of one core that a step which computes uses at least, be the device limited to 1 % of a
core. Heartbeats alone use less."""
OVERDUE = 600.0
"""Seconds that a step may go on behind the task's deadline: it may compute in a circle."""
LONGEST = 3600.0
"""The same for a step of a task that was cancelled."""


class WorkNow(NamedTuple):
    """How far the work in the training's thread is."""

    task: str
    batches: int
    """Batches that are done."""
    deadline: float | None
    """When the result must have arrived. None: the task was cancelled, and its last step goes
    on."""


class ProgressWatch:
    """Tells work that stands still from a step that takes long: a step uses the CPU.

    ``clock``: seconds that never go back, those of ``WorkNow.deadline``. ``cpu``: CPU seconds of
    the process.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu = clock, cpu
        self._seen: tuple[str, int] | None = None
        self._since = self._computed = self._looked = clock()
        """When the last batch was done, when the CPU was last used, and when this was called."""
        self._used = cpu()

    def gets_on(self, work: WorkNow | None) -> bool:
        """Return whether the work gets on. Call it about as often as systemd is told. None: there
        is no work."""
        now, used = self._clock(), self._cpu()
        busy = used - self._used >= BUSY * (now - self._looked)
        self._looked, self._used = now, used
        seen = None if work is None else (work.task, work.batches)
        if seen is None or seen != self._seen:
            self._seen, self._since, self._computed = seen, now, now
            return True
        if busy:
            self._computed = now
        if now - self._computed >= STILL:
            return False
        assert work is not None
        if work.deadline is None:
            return now - self._since < LONGEST
        return now < max(work.deadline, self._since) + OVERDUE


async def tell_alive(work: Callable[[], WorkNow | None]) -> None:
    """Tell systemd that the device is alive, as often as it asks for, until cancelled. Where it
    does not ask, nothing is done."""
    seconds = asked_for()
    if seconds is None:
        return
    watch = ProgressWatch()
    while True:
        if watch.gets_on(work()):
            notify_systemd(ALIVE)
        await asyncio.sleep(seconds / 3)


def asked_for() -> float | None:
    """Return the seconds within which systemd wants to be told (sd_watchdog_enabled(3)), or
    None."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # a process above this one is watched
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) else None
