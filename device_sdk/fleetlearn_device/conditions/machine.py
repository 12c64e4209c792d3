"""What other programs leave of the machine: processors, memory and disk.

The device's own use does not count against it: its training must not pause itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from math import exp
from pathlib import Path

from fleetlearn_device.conditions.condition import SystemFiles, UnreadableError, read_text

MEBIBYTE = 2**20
LOAD_SECONDS = 15.0
"""Seconds over which the load is averaged, so that a burst of a second pauses nothing."""
FIRST_LOOK = 0.3
"""Seconds of the first measurement of the load."""
MARGIN = 0.1
"""Part of the bound by which more is asked of a device that was paused."""


class LoadMeter:
    """The part of all processors' time that other processes use. Looks may come from several
    threads."""

    def __init__(
        self,
        files: SystemFiles,
        clock: Callable[[], float] = time.monotonic,
        own_seconds: Callable[[], float] = time.process_time,
        sleep: Callable[[float], object] = time.sleep,
        ticks: int | None = None,
    ) -> None:
        """``own_seconds``: returns the processor time that this process has used. ``ticks``: in a
        second of /proc/stat."""
        self._file, self._clock, self._own_seconds = files.proc / "stat", clock, own_seconds
        self._sleep = sleep
        if ticks is None:  # Windows has no sysconf, and no /proc/stat to count in
            ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 1
        self._ticks = ticks
        self._lock = threading.Lock()
        self._last: tuple[float, int, int, float] | None = None
        self._load: float | None = None

    def load(self) -> float:
        """Return the load, 0 to 1, averaged over about LOAD_SECONDS. Raises UnreadableError."""
        with self._lock:
            if self._last is None:
                self._last = self._sample()
                self._sleep(FIRST_LOOK)
            before, now = self._last, self._sample()
            total, seconds = now[2] - before[2], now[0] - before[0]
            if total > 0:
                own = (now[3] - before[3]) * self._ticks
                part = min(max((now[1] - before[1] - own) / total, 0.0), 1.0)
                weight = 1.0 if self._load is None else 1.0 - exp(-seconds / LOAD_SECONDS)
                self._load = weight * part + (1.0 - weight) * (self._load or 0.0)
                self._last = now
            return self._load or 0.0

    def _sample(self) -> tuple[float, int, int, float]:
        """Return the time, the busy and all ticks of all processors, and the own seconds."""
        words = read_text(self._file).split("\n")[0].split()
        if len(words) < 9 or words[0] != "cpu":
            raise UnreadableError(f"{self._file} does not say what the processors do")
        user, nice, system, idle, io_wait, *rest = map(int, words[1:9])
        busy = user + nice + system + sum(rest)
        return self._clock(), busy, busy + idle + io_wait, self._own_seconds()


def needs_low_load(meter: LoadMeter, most: float) -> Callable[[bool], str | None]:
    """Return the condition that other processes use at most ``most`` percent of all processors."""

    def why_not(held: bool) -> str | None:
        percent = 100 * meter.load()
        allowed = most if held else most * (1 - MARGIN)
        if percent <= allowed:
            return None
        return (
            f"other programs keep the machine busy ({percent:.0f} % of its processors, needs at "
            f"most {allowed:g} %)"
        )

    return why_not


def read_free_memory(files: SystemFiles) -> int:
    """Return the bytes that other processes leave: what is available, and what this process has.
    Within a control group with a limit, of that limit. Raises UnreadableError."""
    rows = dict(line.partition(":")[::2] for line in read_text(files.proc / "meminfo").splitlines())
    try:
        available = 1024 * int(rows["MemAvailable"].split()[0])
        resident = int(read_text(files.proc / "self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (KeyError, IndexError, ValueError):
        raise UnreadableError(f"{files.proc / 'meminfo'} does not say what is available") from None
    group = own_control_group(files)
    limit = "" if group is None else read_text(group / "memory.max")
    if group is not None and limit.isdecimal():
        used = int(read_text(group / "memory.current") or 0)
        available = min(available, max(int(limit) - used, 0))
    return available + resident


def own_control_group(files: SystemFiles) -> Path | None:
    """Return the folder of this process's control group of version 2; None where it has none but
    the root."""
    for line in read_text(files.proc / "self/cgroup").splitlines():
        if line.startswith("0::/") and line != "0::/":
            return files.sys / "fs/cgroup" / line[len("0::/") :]
    return None


def needs_free_memory(files: SystemFiles, least: float) -> Callable[[bool], str | None]:
    """Return the condition that other processes leave at least ``least`` MiB of memory."""
    return _needs_free("memory", lambda: read_free_memory(files), least)


def needs_free_disk(folder: Path, least: float) -> Callable[[bool], str | None]:
    """Return the condition that the disk of this folder, or of the nearest that exists above, has
    at least ``least`` MiB free."""

    def free() -> int:
        place = folder
        try:
            # Path.exists raises where a folder on the way may not be entered.
            while not place.exists() and place != place.parent:
                place = place.parent
            found = os.statvfs(place)
        except (AttributeError, OSError) as error:  # Windows has no statvfs
            raise UnreadableError(f"the disk of {place} says nothing ({error})") from None
        return found.f_bavail * found.f_frsize

    return _needs_free("disk", free, least)


def _needs_free(what: str, free: Callable[[], int], least: float) -> Callable[[bool], str | None]:
    def why_not(held: bool) -> str | None:
        there = free() / MEBIBYTE
        needed = least if held else least * (1 + MARGIN)
        if there >= needed:
            return None
        return f"too little free {what} ({there:.0f} MiB, needs {needed:g} MiB)"

    return why_not
