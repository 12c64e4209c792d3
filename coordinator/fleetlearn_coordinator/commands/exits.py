"""The exit statuses of fleetlearn-coordinator, and what leads to each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.typer_app import complain_of


class ExitStatus(IntEnum):
    """How a command ended."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    NOT_RUNNING = 3
    UNREACHABLE = 4
    NOT_ALLOWED = 5
    UNSOUND = 6


MEANINGS: dict[ExitStatus, str] = {
    ExitStatus.DONE: "done; `serve`: also where a signal ended it",
    ExitStatus.ERROR: "an error that one line names; `audit`, `verify`: a row was changed",
    ExitStatus.USAGE: "wrong usage: a word or an option that the command does not take",
    ExitStatus.NOT_RUNNING: "`status`: no coordinator runs, and the training is not finished",
    ExitStatus.UNREACHABLE: "no coordinator answers at the administrators' port",
    ExitStatus.NOT_ALLOWED: "the token is not known there, has expired, or its role is not enough",
    ExitStatus.UNSOUND: "`doctor`: something has to be mended",
}
"""The table of docs/operate/command-line.md."""


class NoAnswerError(FleetError):
    """No coordinator answers at the address of its administrators' port."""


class NotAllowedError(FleetError):
    """The administrator may not do that."""


@contextmanager
def expected_errors() -> Iterator[None]:
    """Tell the errors that a person can correct (FleetError, OSError) as one line, and end with the
    status that says which kind."""
    try:
        yield
    except (FleetError, OSError) as error:
        complain_of("error", error)
        match error:
            case NoAnswerError():
                sys.exit(ExitStatus.UNREACHABLE)
            case NotAllowedError():
                sys.exit(ExitStatus.NOT_ALLOWED)
        sys.exit(ExitStatus.ERROR)
