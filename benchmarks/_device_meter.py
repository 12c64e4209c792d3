"""What a device's processes use over time, from /proc, and the bytes that they send and receive.

Of a process that has ended, the figures of the last look count.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from _process_usage import family

EVERY = 0.02
"""Seconds between two looks."""
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Used(NamedTuple):
    """What processes have used since their start."""

    cpu: float
    """Seconds, user and system."""
    wakeups: int
    """How often a thread was put on a core: context switches, voluntary or not."""
    written: int
    """Bytes handed to storage: pages that were made dirty."""


def used(pid: int) -> Used:
    """Return what a running process has used. Raises OSError where it has ended."""
    process = Path(f"/proc/{pid}")
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    switches = 0
    for status in (process / "task").glob("*/status"):
        lines = status.read_text().splitlines()
        switches += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    io = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
    return Used((int(fields[11]) + int(fields[12])) / _TICKS, switches, int(io["write_bytes"]))


class Meter:
    """Looks at a process and its children, and theirs, until it is closed."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ended = pid, threading.Event()
        self._found: dict[int, Used] = {}
        self.rss: list[float] = []
        """MiB of all processes together, at each look."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(EVERY):
            self.look()

    def look(self) -> None:
        pages = 0
        with suppress(OSError):
            for pid in family(self._pid):
                with suppress(OSError, IndexError):
                    self._found[pid] = used(pid)
                    pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        if pages:
            self.rss.append(pages * _PAGE / 2**20)

    def total(self) -> Used:
        """Return what all processes seen have used so far."""
        rows = list(self._found.values())
        return Used(
            sum(row.cpu for row in rows),
            sum(row.wakeups for row in rows),
            sum(row.written for row in rows),
        )

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


class Relay:
    """Passes bytes on between one device and its server, and counts them."""

    def __init__(self) -> None:
        self.up = self.down = self.port = 0

    @asynccontextmanager
    async def open(self, port: int) -> AsyncIterator[Relay]:
        """Listen on ``self.port`` of 127.0.0.1, and connect to ``port``."""

        async def serve(near: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far, far_writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(asyncio.CancelledError):  # the relay is closed with its last connections
                await asyncio.gather(
                    self._copy(near, far_writer, "up"), self._copy(far, writer, "down")
                )

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: str
    ) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                setattr(self, way, getattr(self, way) + len(data))
                target.write(data)
                await target.drain()
        target.close()
