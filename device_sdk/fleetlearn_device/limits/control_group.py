"""The processor limit of a control group (cgroup v2), where the process may set its own."""

from __future__ import annotations

import os
from pathlib import Path

PERIOD = 100_000
"""Microseconds in which a group may use its quota: the kernel's default."""


class CpuQuota:
    """A limit that was set; ``undo`` sets the earlier one."""

    def __init__(self, file: Path, quota: str) -> None:
        self._file, self._before = file, file.read_text("ascii").strip()
        file.write_text(quota, "ascii")

    def undo(self) -> None:
        """Set what was there before. Raises OSError."""
        self._file.write_text(self._before, "ascii")


def set_cpu_quota(group: Path | None, percent: float) -> CpuQuota | None:
    """Limit the control group ``group`` to ``percent`` of one processor. None: it is not this
    process's alone, or may not be written; nothing was changed."""
    if group is None:
        return None
    try:
        # In a group with others, such as a login's, the limit would be theirs too.
        if {*(group / "cgroup.procs").read_text("ascii").split()} != {str(os.getpid())}:
            return None
        return CpuQuota(group / "cpu.max", f"{round(percent / 100 * PERIOD)} {PERIOD}")
    except OSError:
        return None
