"""Names of files and folders that survive a loss of power: a name is in its folder, which has to be
synced for it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sync_names(folder: Path) -> None:
    """fsync a folder and those above it on its file system, so that the names of what was just made
    there, and the folder's own, survive a loss of power. Those that this process may not read were
    not made by it, and are left out. Raises OSError."""
    folder = folder.absolute()
    device = folder.stat().st_dev
    for each in (folder, *folder.parents):
        if each.stat().st_dev != device:
            break
        with suppress(PermissionError):
            _sync(each)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(folder)
        raise
    finally:
        os.close(descriptor)
