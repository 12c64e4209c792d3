"""How much CPU and memory processes have used, from /proc.

It imports the standard library alone, because it also runs in the environments of other frameworks.
"""

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
    """Return what a running process has used since its start."""
    # schedstat counts nanoseconds, stat only hundredths of a second; a server's threads live as
    # long as it does.
    spent = sum(
        int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )
    status = Path(f"/proc/{pid}/status").read_text()
    # VmHWM, since ru_maxrss begins with the size of the process that forked this one.
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return Usage(spent / 1e9, int(peak.split()[1]) / 1024)


def family(pid: int) -> list[int]:
    """Return the process, its children, their children, and so on."""
    found = [pid]
    for parent in found:
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found


def usage_of_all(pid: int) -> dict[int, Usage]:
    """Return what each process of the ``family`` has used. A process that ends at this moment is
    left out."""
    found = {}
    for member in family(pid):
        with suppress(OSError, StopIteration):
            found[member] = usage(member)
    return found


def cpu_between(begin: dict[int, Usage], end: dict[int, Usage]) -> float:
    """Return the seconds of CPU that the processes of ``end`` used since ``begin``."""
    return sum(used.cpu - (begin[pid].cpu if pid in begin else 0.0) for pid, used in end.items())
