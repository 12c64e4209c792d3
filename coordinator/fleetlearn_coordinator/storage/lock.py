"""The lock of a data directory: one coordinator at a time.

This is not the `filelock` library, which knows exclusive locks only, and needs to write the file. ``is_locked`` is for
people who look at a run and may have the right to read alone. Two who look at the same moment must not take each other
for a coordinator, and a start tells them from a coordinator by the kind of their lock: it waits for the one and is
refused by the other at once.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError

LOCK = "lock"
LOCK_TIMEOUT = 10.0
"""Seconds that a start waits for those who only look whether a coordinator runs."""


def lock(path: Path) -> int:
    """Hold ``path`` as long as the returned descriptor is open. Raises StoreError where another coordinator does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    until = time.monotonic() + LOCK_TIMEOUT
    while not _flock(descriptor, fcntl.LOCK_EX):
        # A coordinator's lock is exclusive. ``is_locked`` takes a shared one, and gives it back in a moment.
        if not _flock(descriptor, fcntl.LOCK_SH) or time.monotonic() > until:
            os.close(descriptor)
            raise StoreError(Code.BUSY, f"{path.parent} is in use by another coordinator; stop that one first")
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(random.uniform(0.0, 0.002))
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether a coordinator holds ``path``: in whatever container or process namespace it runs."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
