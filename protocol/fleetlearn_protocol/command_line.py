"""What the rooms' commands have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version


def version_of(command: str) -> str:
    """Return what ``--version`` prints, such as ``fleetlearn-device 0.1.0``."""
    return f"{command} {version('fleetlearn')}"


@contextmanager
def needs(command: str, extra: str) -> Iterator[None]:
    """A context to import what an extra installs. If something is missing, print one line that names the extra, and end
    the program with status 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fleetlearn_"):
            raise  # a part of the package itself: no extra brings it
        sys.exit(f'{command} needs: pip install "fleetlearn[{extra}]" ({error})')
