"""Errors of the state directory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetlearn_protocol.errors import BundleError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: (
        "a file may not be as large as that: raise the limit (ulimit -f), or choose another disk"
    ),
    errno.EACCES: (
        "this user may not use it: be its owner (sudo -u), change its permissions or choose "
        "another state directory"
    ),
    errno.EPERM: (
        "this user may not use it: be its owner (sudo -u), change its permissions or choose "
        "another state directory"
    ),
    errno.EROFS: "its file system is read-only: choose another state directory",
    errno.ENOTDIR: "a part of the path is a file: choose another state directory",
    errno.EEXIST: "a file is in the way: choose another state directory",
}


class StateError(Exception):
    """The state directory cannot be used. The text says why, and what to do."""


class DiskFullError(StateError):
    """There is no room in the state directory."""


class CacheFullError(BundleError):
    """A task's bundle is larger than the device's owner allows."""


@contextmanager
def os_errors_as_state_errors(path: Path) -> Iterator[None]:
    """Raise each OSError of the block as a StateError that says what to do. ``path`` stands in for
    an unnamed file."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the disk and the path")
        text = (
            f"cannot use the state directory: {error.filename or path}: {error.strerror or error}; "
            f"{advice}"
        )
        raise (DiskFullError if error.errno in _FULL else StateError)(text) from error
