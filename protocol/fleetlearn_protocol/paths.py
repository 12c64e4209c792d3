"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def in_home(path: str | os.PathLike[str]) -> Path:
    """Return the path, where ``~`` or ``~NAME`` at its beginning is replaced by that home folder.

    Raises ValueError where the home folder is not known: the variable HOME is not set, and the
    system has no entry for the user, as in some containers and services.
    """
    path = Path(path)
    try:
        return path.expanduser()
    except RuntimeError:
        name = path.parts[0]
        hint = (
            "set the variable HOME, or write the whole path"
            if name == "~"
            else "write the whole path"
        )
        raise ValueError(
            f"the path {path} begins with {name}, and no home folder is known for it; {hint}, such "
            "as /var/lib/fleetlearn"
        ) from None
