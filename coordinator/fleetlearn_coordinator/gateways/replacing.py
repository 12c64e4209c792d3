"""How processes are replaced while the service goes on: SIGUSR1 to the supervisor asks for it, and
SIGUSR1 from the supervisor has the engine process end with the status START_AGAIN."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

START_AGAIN = 75
"""The status with which a process ends that is to be started again: EX_TEMPFAIL of sysexits.h."""


@contextmanager
def asked_to_replace(called: Callable[[], None]) -> Iterator[None]:
    """Within the block, have ``called`` called on each SIGUSR1. Nothing is done where the system
    has no such signal, or outside of the main thread, where Python takes none."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGUSR1, called)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
