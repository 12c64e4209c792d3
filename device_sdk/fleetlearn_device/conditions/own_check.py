"""A check of the owner's own: a command by its exit status, or a Python function."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fleetlearn_protocol.user_errors import ANY_FAILURE, failure

from fleetlearn_device.conditions.condition import UnreadableError

MOST_TEXT = 200
"""Characters that are kept of what a command prints."""
OwnCheck: TypeAlias = str | Sequence[str] | Callable[[], "bool | str | None"]
"""A command, or a function that returns True where the condition holds, and else False or why
not."""


def needs_check(check: OwnCheck, timeout: float) -> Callable[[bool], str | None]:
    """Return the condition that the owner's check says so. A command has ``timeout`` seconds.

    Raises ValueError on a command that cannot be one, or whose program is not there.
    """
    if callable(check):
        return _of_function(check)
    words = _words(check)
    if shutil.which(words[0]) is None:
        raise ValueError(
            f"the check {words[0]!r} cannot be run: there is no such program, or it is not "
            "executable; expected a command, such as /usr/local/bin/may-train"
        )
    return _of_command(words, timeout)


def _of_function(function: Callable[[], bool | str | None]) -> Callable[[bool], str | None]:
    name = getattr(function, "__name__", "the check")

    def why_not(held: bool) -> str | None:
        try:
            said = function()
        except ANY_FAILURE as error:  # the owner's code may raise anything
            raise UnreadableError(failure(name, error)) from None
        if said is True:
            return None
        return said if isinstance(said, str) and said else f"{name} says {said}"

    return why_not


def _of_command(words: list[str], timeout: float) -> Callable[[bool], str | None]:
    def why_not(held: bool) -> str | None:
        try:
            # In a group of its own, so that what it started ends with it.
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UnreadableError(f"{words[0]} cannot be run ({error.strerror})") from None
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            raise UnreadableError(f"{words[0]} did not end in {timeout:g} s") from None
        if process.returncode == 0:
            return None
        lines = said.decode("utf-8", "replace").strip().splitlines()
        why = f": {lines[0][:MOST_TEXT]}" if lines else ""
        return f"{words[0]} says no (exit status {process.returncode}){why}"

    return why_not


def _words(command: str | Sequence[str]) -> list[str]:
    try:
        words = shlex.split(command) if isinstance(command, str) else [*command]
    except ValueError as error:
        raise ValueError(f"the check is {command!r}: {error}; expected a command") from None
    if not words:
        raise ValueError("the check is empty; expected a command, such as /usr/local/bin/may-train")
    return words


def _end(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:  # pragma: no cover (Windows)
        process.kill()
    # Not communicate: what left the group may hold the pipe open.
    assert process.stdout is not None
    process.stdout.close()
    process.wait()
