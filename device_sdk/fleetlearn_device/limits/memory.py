"""A ceiling for the process's memory: a task that would break it is given back by name, before the
kernel kills the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MEBIBYTE = 2**20
COPIES = 4
"""Vectors of the model's size that a training holds at least: the parameters, the model it began
with, the step's new parameters, and the update."""


def resident_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return the bytes of memory that this process has. None: the system does not say."""
    try:
        pages = int((proc / "self/statm").read_text("ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


class MemoryCeiling:
    """The most memory that the process may use, and which tasks needed more."""

    def __init__(
        self, mebibytes: float, resident: Callable[[], int | None] = resident_bytes
    ) -> None:
        """Raises ValueError where the system does not say what a process uses."""
        if resident() is None:
            raise ValueError(
                "the limit memory needs to know what the process uses, and this system does not "
                "say (/proc/self/statm); leave it out"
            )
        self._most, self._resident = round(mebibytes * MEBIBYTE), resident
        self._broken: dict[tuple[str, int], int] = {}
        """(bundle, examples in a batch) -> bytes that the process had with such a step."""

    def check_task(self, bundle: str, batch_size: int, elements: int, beside: int) -> None:
        """Raise MemoryError where a task cannot keep below the ceiling.

        ``elements``: of the model's vector. ``beside``: bytes of the bundle's graphs and constants,
        which are held at least once, and of the masked update, if the task has one. What the steps
        hold beside that is known once one was done:
        the same task is then refused before it begins.
        """
        needed = self._broken.get((bundle, batch_size))
        if needed is not None:
            raise MemoryError(self._said(needed, batch_size, "used"))
        least = (self._resident() or 0) + 4 * COPIES * elements + beside
        if least > self._most:
            raise MemoryError(
                f"the process and the task's model need at least {least / MEBIBYTE:.0f} MiB before "
                f"the first step, and this device allows {self._most / MEBIBYTE:.0f} MiB "
                "(limits.memory); allow more, or use a smaller model"
            )

    def check_step(self, bundle: str, batch_size: int) -> None:
        """Raise MemoryError where the process has more than its ceiling now, after a batch."""
        now = self._resident() or 0
        if now > self._most:
            self._broken[bundle, batch_size] = now
            raise MemoryError(self._said(now, batch_size, "uses"))

    def _said(self, needed: int, batch_size: int, verb: str) -> str:
        step = f"{batch_size} examples a step" if batch_size else "all examples in one step"
        return (
            f"with {step} the process {verb} {needed / MEBIBYTE:.0f} MiB, and this device allows "
            f"{self._most / MEBIBYTE:.0f} MiB (limits.memory); a smaller local.batch_size needs "
            "less, as does a bundle that is exported with a memory budget (export.md, Memory)"
        )
