"""The tie of a process to the supervisor that started it: its standard input, which the supervisor
keeps open, and which ends with the supervisor, however that ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def parent_ended(stop: Callable[[str], None]) -> Iterator[None]:
    """Within the block, have ``stop`` called, with the reason, once standard input ends."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def look() -> None:
        if not os.read(descriptor, 1024):
            loop.remove_reader(descriptor)
            stop("the process that started this one has ended")

    loop.add_reader(descriptor, look)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
