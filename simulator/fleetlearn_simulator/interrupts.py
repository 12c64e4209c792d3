"""Signals that stop a run: Ctrl-C, SIGTERM, SIGHUP. The first asks the run to stop at the end of a
round. The second stops it at once.

A signal may reach the command alone, and not the processes that it has begun: they follow it
(``follow_parent``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from threading import Event, Thread
from typing import Any

from fleetlearn_protocol.command_line import STOP_SIGNALS

STOP_REQUESTED = Event()
"""Set when this process was asked to stop."""


def catch_interrupts(also: Callable[[], object] = lambda: None) -> dict[signal.Signals, Any]:
    """Let the first of these signals set ``STOP_REQUESTED`` and call ``also`` from now on. Call
    this in the main thread. Returns the handlers that there were.

    SIGHUP stays ignored where it is: that is what ``nohup`` asks for."""
    STOP_REQUESTED.clear()
    numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number in numbers if before[number] is not signal.SIG_IGN]

    def interrupted(number: int, frame: Any) -> None:
        STOP_REQUESTED.set()
        for each in caught:
            signal.signal(each, signal.default_int_handler)
        also()

    for number in caught:
        signal.signal(number, interrupted)
    return before


@contextmanager
def interruptible(also: Callable[[], object] = lambda: None) -> Iterator[None]:
    """``catch_interrupts`` until the block is left."""
    before = catch_interrupts(also)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_parent(stop: Connection | None = None) -> None:
    """End this process as soon as its parent has died, however that was: nobody will take its
    results. What it computes is computed again from the last checkpoint.

    stop: set ``STOP_REQUESTED`` when its other end is closed.
    """
    parent = parent_process()
    assert parent is not None

    def look() -> None:
        watched: list[Any] = [parent.sentinel, *([] if stop is None else [stop])]
        while True:
            if parent.sentinel in wait(watched):
                # sys.exit would end this thread alone.
                os._exit(1)
            STOP_REQUESTED.set()
            watched = [parent.sentinel]

    Thread(target=look, name="follows the parent", daemon=True).start()


def begin_worker(stop: Connection) -> None:
    """Begin a process that does whole runs. ``stop``: as for ``follow_parent``."""
    catch_interrupts()
    follow_parent(stop)
