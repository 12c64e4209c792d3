"""Ctrl-C: the first one asks to stop, which a run does at the end of a round; the second does not wait for that."""

from __future__ import annotations

import signal
from threading import Event
from typing import Any

STOP = Event()
"""Whether this process was asked to."""


def heed() -> None:
    """From now on. Call it in the main thread."""
    STOP.clear()
    signal.signal(signal.SIGINT, _asked)


def _asked(number: int, frame: Any) -> None:
    STOP.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)
