"""Ctrl-C. The first asks to stop, and the run stops at the end of a round. The second stops it at once."""

from __future__ import annotations

import signal
from threading import Event
from typing import Any

STOP_REQUESTED = Event()
"""Set when this process was asked to stop."""


def catch_interrupts() -> None:
    """Let Ctrl-C set ``STOP_REQUESTED`` from now on. Call this in the main thread."""
    STOP_REQUESTED.clear()
    signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: Any) -> None:
    STOP_REQUESTED.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)
