"""What the rooms' commands have in common."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
"""What ends a process that runs for long. SIGHUP: its terminal was closed."""


def installed_version() -> str:
    """Return the version of the package, such as ``0.1.0``: of all rooms, or of the device
    alone."""
    # late: it takes longer than most commands
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fleetlearn")
    except PackageNotFoundError:
        return version("fleetlearn-device")


def version_of(command: str) -> str:
    """Return what ``--version`` prints, such as ``fleetlearn-device 0.1.0``."""
    return f"{command} {installed_version()}"


class LogLine(logging.Formatter):
    """A line of a command's log: the time with its zone, since logs of machines in different zones
    are read side by side, the level, and the text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")


class JournalLine(logging.Formatter):
    """A line for the journal, which has the time itself: the level as sd-daemon(3) writes it, and
    the text."""

    PRIORITY = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7))

    def format(self, record: logging.LogRecord) -> str:
        """Return the record; each of its lines has the level."""
        number = next((each for level, each in self.PRIORITY if record.levelno >= level), 7)
        return "\n".join(f"<{number}>{line}" for line in super().format(record).splitlines())


def is_journal() -> bool:
    """Return whether standard error is the journal: systemd names its stream in JOURNAL_STREAM
    (systemd.exec(5)), and children that send their errors elsewhere inherit the variable."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def log_on_stderr() -> logging.Handler:
    """Return what writes a command's log on standard error, for people or for the journal."""
    handler = logging.StreamHandler()
    handler.setFormatter(JournalLine() if is_journal() else LogLine())
    return handler


@contextmanager
def needs(command: str, extra: str) -> Iterator[None]:
    """A context to import what an extra installs. If something is missing, print one line that
    names the extra, and end the program with status 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fleetlearn_"):
            raise  # a part of the package itself: no extra brings it
        sys.exit(f'{command} needs: pip install "fleetlearn[{extra}]" ({error})')


@contextmanager
def stop_signals(
    loop: asyncio.AbstractEventLoop, caught: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """A context in which the loop calls ``caught`` for each of STOP_SIGNALS. Afterwards each has
    its earlier handler.

    SIGHUP stays ignored where it is: that is what ``nohup`` asks for. Outside of the main thread,
    where Python takes no signals, nothing is done."""
    before: dict[signal.Signals, Any] = {}
    for name in STOP_SIGNALS:
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is None or (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):
            continue
        handler = signal.getsignal(number)
        # not in the main thread, or on Windows
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, caught, number)
            before[number] = handler
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: it was not set by Python, which cannot set it again
                signal.signal(number, handler)


def refuse_in_loop(blocking: str, coroutine: str) -> None:
    """Raise RuntimeError, which says what to write, if an event loop runs in this thread: that of a
    notebook, for example. ``blocking``: the function that was called; ``coroutine``: the call to
    await instead."""
    import asyncio  # late: commands that run no loop start faster without it

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"{blocking}() was called where an event loop runs already, as in a notebook or in async "
        f"code. Write `await {coroutine}` there"
    )
