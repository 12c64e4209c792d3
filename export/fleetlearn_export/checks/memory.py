"""Memory that was freed goes back to the operating system."""

from __future__ import annotations

import ctypes
import sys

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


LARGE = 2**27
"""The system maps separate memory for a result of at least this many bytes. Before one is made,
freed memory goes back: it would stay beside the result."""


def give_back_freed_memory() -> None:
    """Give back what is free between allocations. glibc keeps it, in pieces that the next tensors
    often do not fit."""
    if _TRIM is not None:
        _TRIM(0)
