"""One condition, and where the system's files are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class UnreadableError(Exception):
    """A condition cannot be read here. The text says what was looked for."""


class SystemFiles(NamedTuple):
    """Where Linux tells of the machine. Tests give folders of their own."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")


class Condition(NamedTuple):
    """Something that must hold while the device serves."""

    name: str
    """As its setting is called: ``battery``."""
    why_not: Callable[[bool], str | None]
    """Return why the condition does not hold now, for people; None where it holds. The argument
    says whether it held at the last look: if it did not, a margin more is asked, so that a value at
    the bound does not pause and resume the device again and again. Raises UnreadableError."""
    every: float = 1.0
    """Seconds between two looks while the device works."""
    sends: bool = True
    """A finished update may be sent while the condition does not hold."""
    opens_in: Callable[[], float] | None = None
    """Return the seconds until the condition holds again, where a clock says so."""


def read_text(file: Path) -> str:
    """Return a file's text without white space around it; empty where it cannot be read."""
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def read_number(file: Path) -> int | None:
    """Return the number in a file; None where there is none."""
    try:
        return int(read_text(file))
    except ValueError:
        return None
