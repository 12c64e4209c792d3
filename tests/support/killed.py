"""For tests: a process that dies at any change of its directory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch


class Killed(BaseException):
    """The process is gone: no handler of the code takes this for an error."""


@contextmanager
def killed_after(changes: int) -> Iterator[None]:
    """Let the process die at the change of the directory after so many."""
    left = itertools.count(changes, -1)

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if next(left) <= 0:
                raise Killed
            return function(*arguments, **named)

        return call

    with (
        patch.object(Path, "open", dying(Path.open)),
        patch.object(Path, "replace", dying(Path.replace)),
        patch.object(Path, "unlink", dying(Path.unlink)),
        patch.object(os, "fsync", dying(os.fsync)),
        suppress(Killed),
    ):
        yield
