"""A process that kills itself with SIGKILL at a function of its own, the N-th time that it comes by."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple


class Point(NamedTuple):
    owner: Any
    function: str
    after: bool
    """Whether to die after the call, else before it."""


def die_at(point: Point, turn: int) -> None:
    """Replace the point's function by one that kills the process in its ``turn``-th call."""
    original: Callable[..., Any] = getattr(point.owner, point.function)
    calls = 0

    def replacement(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == turn and not point.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        if calls == turn and point.after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(point.owner, point.function, replacement)
