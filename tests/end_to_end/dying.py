"""A process that sends itself a signal at a function of its own, the N-th time that it comes by."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

from fleetlearn_coordinator.storage.postgres_ledger import PostgresLedger
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger

DATABASE = "FLEETLEARN_TESTS_DATABASE"
"""As in processes.py."""


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
    that counts. A point of SQLite's ledger is one of PostgreSQL's where the tests' runs are
    there."""
    if point.owner is SqliteLedger and DATABASE in os.environ:
        point = point._replace(owner=PostgresLedger)
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
