"""For tests: processes whose calls on files fail, and whose clocks jump (faults.c, compiled by the
system's compiler).

A process that is started with ``Fault.env`` counts its calls on files below a folder, and the N-th
of them fails.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).with_name("faults.c")
KINDS = {
    "full": (
        "a write is cut short, and from then on nothing is written or made: No space left on device"
    ),
    "read-only": "from then on nothing can be changed: Read-only file system",
    "error": "one call fails, of reading, writing, opening, renaming, syncing: Input/output error",
}


def compile_shim(folder: Path) -> Path:
    """Return the compiled faults.c. Skips the test where there is no Linux or no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path("/proc/self/fd").is_dir():
        pytest.skip(
            "faults are put under files by a library that needs Linux and a C compiler (cc)"
        )
    shim = folder / "faults.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", shim, SOURCE, "-ldl"],
        check=True,
    )
    return shim


class Fault(NamedTuple):
    """What happens to a process's calls on the files below a folder."""

    below: Path
    kind: str = "error"
    """One of KINDS."""
    nth: int = 0
    """Which of the calls that it can happen to. 0: nothing happens, they are only counted."""
    log: Path | None = None
    """Gets a line for each counted call: its number, the function, the path."""
    clocks: Path | None = None
    """As ``Clocks`` writes it."""
    watched: Path | None = None
    """A file system, whose files' synced state is kept in ``kept``."""
    kept: Path | None = None
    """As ``Power`` reads it."""

    def env(self) -> dict[str, str]:
        """Return the environment of a process to which it happens. The shim is in LD_PRELOAD of
        warm processes."""
        values = {
            "BELOW": self.below,
            "KIND": self.kind,
            "NTH": self.nth,
            "LOG": self.log,
            "CLOCKS": self.clocks,
            "WATCHED": self.watched,
            "KEPT": self.kept,
        }
        return {f"FAULTS_{name}": str(value) for name, value in values.items() if value is not None}


def counted(log: Path) -> list[tuple[str, Path]]:
    """Return the function and the path of each counted call, in order."""
    rows = [line.split(" ", 2) for line in log.read_text().splitlines()]
    return [(function, Path(path)) for _, function, path in rows]


class Clocks:
    """The clocks of the processes that are started with this file: how many seconds they are
    ahead."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set()

    def set(self, wall: float = 0.0, monotonic: float = 0.0) -> None:
        """``monotonic``: never back."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT)
        os.pwrite(descriptor, struct.pack("dd", wall, monotonic), 0)
        os.close(descriptor)


class Power:
    """What a loss of power leaves of a file system: of each file and folder what it was when a
    process last synced it, and nothing of those that no synced folder names.

    A file that was never synced is empty then. So it is the worst that a disk may do, except that
    writes are never torn. ``disk``: an empty file system that gives each file an inode number of
    its own, as tmpfs does. ``kept``: a folder.
    """

    def __init__(self, disk: Path, kept: Path) -> None:
        self.disk, self.kept = disk, kept
        kept.mkdir()
        self.keep_all()

    def lose(self) -> None:
        """Lose what was not synced. No process may have a file open there."""
        found = self.kept.with_name(f"{self.kept.name}.found")
        found.mkdir()
        self._restore(self.disk.stat().st_ino, found)
        for path in (*self.disk.iterdir(), *self.kept.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(found, self.disk, dirs_exist_ok=True)
        shutil.rmtree(found)
        self.keep_all()

    def _restore(self, inode: int, target: Path) -> None:
        """Write what was kept of a folder into another one."""
        for kind, number, name in self._names(inode):
            if kind == "d":
                (target / name).mkdir(mode=0o700)
                self._restore(number, target / name)
            elif kind == "f":
                source = self.kept / str(number)
                (target / name).touch(mode=0o600)
                (target / name).write_bytes(source.read_bytes() if source.exists() else b"")

    def _names(self, inode: int) -> list[tuple[str, int, str]]:
        file, rows = self.kept / str(inode), []
        for line in file.read_text().splitlines() if file.exists() else ():
            kind, number, name = line.split(" ", 2)
            if name not in (".", ".."):
                rows.append((kind, int(number), name))
        return rows

    def keep_all(self) -> None:
        """All that is on the disk now is synced."""
        for path in (self.disk, *self.disk.rglob("*")):
            copy = self.kept / str(path.stat().st_ino)
            if path.is_dir():
                rows = [
                    f"{'d' if p.is_dir() else 'f'} {p.stat().st_ino} {p.name}"
                    for p in path.iterdir()
                ]
                copy.write_text("".join(row + "\n" for row in rows))
            else:
                shutil.copy(path, copy)


DAMAGES: dict[str, float | tuple[float, int]] = {
    "empty": 0.0,
    "first half": 0.5,
    "first 90 %": 0.9,
    "a byte near its begin": (0.0, 20),
    "a byte in its first quarter": (0.25, 0),
    "a byte in its middle": (0.5, 1),
    "a byte in its last quarter": (0.75, 2),
    "a byte near its end": (0.999, 0),
}
"""How much is left of the file, or which byte is changed: a share of the file, and bytes after
that."""


def damage(path: Path, how: float | tuple[float, int]) -> None:
    content = bytearray(path.read_bytes())
    if isinstance(how, float):
        content = content[: int(len(content) * how)]
    elif content:
        content[min(len(content) - 1, int(len(content) * how[0]) + how[1])] ^= 0x10
    path.write_bytes(content)
