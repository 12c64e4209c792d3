"""For tests: what a live process has in its memory, and what files have in them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (r\S+) \S+ \S+ (\d+)\s*(.*)")
PART = 2**24
"""Bytes that are read at a time."""
OVERLAP = 256
"""Bytes that are read again, so that nothing is cut in two: no longer thing is looked for."""


def memory_of(pid: int) -> Iterator[bytes]:
    """Yield the memory of a child process in parts, while SIGSTOP holds the process: its heap, its
    stacks and whatever it has mapped, as a core dump has them. Parts overlap."""
    os.kill(pid, signal.SIGSTOP)
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            for line in lines:
                found = _REGION.match(line)
                # files that are mapped and cannot be written have what their files have
                if found is None or ("w" not in found[3] and found[4] != "0"):
                    continue
                yield from _region(memory.fileno(), int(found[1], 16), int(found[2], 16))
    finally:
        os.kill(pid, signal.SIGCONT)


def _region(descriptor: int, begin: int, end: int) -> Iterator[bytes]:
    for place in range(begin, end, PART):
        try:
            yield os.pread(descriptor, min(PART + OVERLAP, end - place), place)
        except OSError:  # such as [vvar], which nobody may read
            return


def files_below(folder: Path) -> Iterator[bytes]:
    """Yield the content of every file, whatever its name."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.read_bytes()


def found_in(parts: Iterable[bytes], wanted: Mapping[str, bytes]) -> set[str]:
    """Return the names of those byte strings that are there, each at most OVERLAP bytes long."""
    left, found = dict(wanted), set()
    for part in parts:
        here = {name for name, content in left.items() if content in part}
        found |= here
        for name in here:
            del left[name]
    return found
