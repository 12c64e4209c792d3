"""The lock of a data directory: one coordinator at a time.

A coordinator holds an exclusive lock. ``is_locked`` asks for a shared one and gives it back at
once, so two processes that only look do not take each other for a coordinator. A coordinator that
starts waits for shared locks, and is refused at once by an exclusive one. The `filelock` library
has exclusive locks only, and must be able to write the file; people who look at a run may only have
the right to read it.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError

LOCK = "lock"
LOCK_TIMEOUT = 10.0
"""Seconds that a coordinator waits at its start for processes that call ``is_locked``."""


def lock(path: Path) -> int:
    """Lock ``path`` for as long as the returned descriptor is open. Raises StoreError if another
    coordinator holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    until = time.monotonic() + LOCK_TIMEOUT
    while not _flock(descriptor, fcntl.LOCK_EX):
        # A coordinator's lock is exclusive. ``is_locked`` takes a shared one, and gives it back in
        # a moment.
        if not _flock(descriptor, fcntl.LOCK_SH) or time.monotonic() > until:
            os.close(descriptor)
            raise StoreError(
                Code.BUSY, f"{path.parent} is in use by another coordinator; stop that one first"
            )
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(random.uniform(0.0, 0.002))
    return descriptor


@contextmanager
def locked_folder(folder: Path, user: str) -> Iterator[None]:
    """Within the block, use a folder that one process uses at a time. ``user``: what may use it, in
    words. Raises StoreError (busy)."""
    try:
        descriptor = lock(folder / LOCK)
    except StoreError:
        text = f"{folder} is in use by another {user}; stop that one, or name another folder"
        raise StoreError(Code.BUSY, text) from None
    try:
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a coordinator holds ``path``, also one in another container or process
    namespace."""
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
