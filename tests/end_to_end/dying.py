"""A process that sends itself a signal at a function of its own, the N-th time that it comes by."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple


def always(*arguments: Any) -> bool:
    return True


class Point(NamedTuple):
    owner: Any
    function: str
    after: bool
    """Whether to die after the call, else before it."""
    counts: Callable[..., bool] = always
    """Whether a call with these arguments counts."""


def signal_at(point: Point, turn: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Replace the point's function by one that sends the process a signal in its ``turn``-th call
    that counts."""
    original: Callable[..., Any] = getattr(point.owner, point.function)
    calls = 0

    def replacement(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        counts = point.counts(*arguments)
        calls += counts
        if counts and calls == turn and not point.after:
            os.kill(os.getpid(), number)
        result = original(*arguments, **named)
        if counts and calls == turn and point.after:
            os.kill(os.getpid(), number)
        return result

    setattr(point.owner, point.function, replacement)
