"""A limit of bytes a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BURST = 0.25
"""Seconds of the rate that may pass at once."""


class ByteRate:
    """A token bucket: what passes is paid for by waiting."""

    def __init__(
        self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock, self._free_from = clock, clock()

    def delay(self, size: int) -> float:
        """Note that ``size`` bytes pass now, and return the seconds to wait after them."""
        now = self._clock()
        begin = max(self._free_from, now - BURST)
        self._free_from = begin + size / self.bytes_per_second
        return max(self._free_from - now, 0.0)

    async def passed(self, size: int) -> None:
        """Wait until more may pass, after ``size`` bytes have."""
        seconds = self.delay(size)
        if seconds > 0:
            await asyncio.sleep(seconds)

    def chunk_bytes(self, most: int) -> int:
        """Return how large a chunk may be, so that some passes each second: a multiple of 4."""
        return max(4, min(most, int(self.bytes_per_second)) // 4 * 4)
