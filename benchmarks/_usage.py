"""What processes have used, from /proc. The standard library alone: other frameworks' environments run it as well."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """What a process has used since its start."""

    cpu: float
    """Seconds, user and system."""
    peak_rss: float
    """MiB."""


def usage(pid: int) -> Usage:
    """Of a running process, from /proc."""
    # schedstat counts nanoseconds, stat only hundredths of a second; a server's threads live as long as it does.
    spent = sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    status = Path(f"/proc/{pid}/status").read_text()
    # VmHWM, since ru_maxrss begins with the size of the process that forked this one.
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return Usage(spent / 1e9, int(peak.split()[1]) / 1024)


def family(pid: int) -> list[int]:
    """The process, those that it started, those that they started, and so on."""
    found = [pid]
    for parent in found:
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found


def usage_of_all(pid: int) -> dict[int, Usage]:
    """Of each of the process's ``family``, but for those that end at this moment."""
    found = {}
    for member in family(pid):
        with suppress(OSError, StopIteration):
            found[member] = usage(member)
    return found


def cpu_between(begin: dict[int, Usage], end: dict[int, Usage]) -> float:
    """Seconds of CPU that the processes of ``end`` used since ``begin``."""
    return sum(used.cpu - (begin[pid].cpu if pid in begin else 0.0) for pid, used in end.items())
