"""The demo's child processes: started in its shadow, read through their logs, and none of them left
behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ENDING = (signal.SIGTERM, signal.SIGHUP)


class DemoError(Exception):
    """The demo cannot go on; the text says why and what to do."""


Command = Sequence[object]
"""A program and its arguments, as strings or paths."""


class Child:
    """A process with a log file. Its output is appended, so a process started again goes on in the
    same file."""

    def __init__(self, name: str, command: Command, log: Path) -> None:
        self.name, self.command, self.log = name, [str(part) for part in command], log
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._read = 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal. None: it runs, or was never started."""
        return None if self.process is None else self.process.poll()

    def start(self) -> None:
        """Raises DemoError where the command cannot be run."""
        with self.log.open("ab") as log:
            try:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C reaches the demo alone, which then ends its children in order
                    start_new_session=True,
                    preexec_fn=_die_with_parent(os.getpid()),  # safe: the demo has one thread
                )
            except OSError as error:
                raise DemoError(
                    f"{self.name} cannot be started: {self.command[0]}: {error.strerror}"
                ) from None
        self.starts += 1

    def kill(self) -> None:
        """SIGKILL, and wait for its death."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def new_lines(self) -> list[str]:
        """The complete lines that were added to the log since the last call."""
        try:
            with self.log.open("rb") as log:
                log.seek(self._read)
                text = log.read()
        except FileNotFoundError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        return text.decode("utf-8", "replace").splitlines()

    def last_words(self, lines: int = 8) -> str:
        """How it ended, with the end of its log."""
        status = self.status
        how = "is running" if status is None else _describe(status)
        tail = (
            self.log.read_text("utf-8", "replace").splitlines()[-lines:]
            if self.log.exists()
            else []
        )
        return "\n".join(
            [f"{self.name} {how}; its log {self.log} ends:", *(f"    {line}" for line in tail)]
        )


def end_all(children: Sequence[Child], patience: float = 5.0) -> None:
    """SIGTERM to those that run, SIGKILL to those that do not listen, and wait until every one is
    gone.

    A signal to the demo, such as an impatient second Ctrl-C, waits until then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *ENDING))
    try:
        started = [child.process for child in children if child.process is not None]
        for process in started:
            process.terminate()
        deadline = time.monotonic() + patience
        for process in started:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_command(name: str, command: Command, log: Path, timeout: float) -> None:
    """Run one command to its end. Raises DemoError where it fails, or takes longer than ``timeout``
    seconds."""
    child = Child(name, command, log)
    child.start()
    assert child.process is not None
    try:
        status = child.process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise DemoError(f"{name} took longer than {timeout:g} s; its log: {log}") from None
    finally:
        end_all([child])
    if status != 0:
        raise DemoError(child.last_words())


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: through its ``finally`` clauses."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in ENDING:
        signal.signal(number, leave)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What a new child does first, so that not even SIGKILL of the demo leaves it behind (Linux:
    prctl(2))."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    pr_set_pdeathsig = 1

    def prepare() -> None:
        prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


def _describe(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
