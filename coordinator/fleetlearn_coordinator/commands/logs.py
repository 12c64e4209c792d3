"""The log of commands that have one."""

from __future__ import annotations

import logging

import typer
from fleetlearn_protocol.command_line import log_on_stderr


def log_at(level: str) -> None:
    """Write the log on standard error, from this level on. Ends with a usage error where there is
    no such level."""
    known = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level.upper() not in known:
        raise typer.BadParameter(
            f"{level!r} was given; one of {', '.join(known)} is expected", param_hint="--log-level"
        )
    logger = logging.getLogger("fleetlearn")
    logger.addHandler(log_on_stderr())
    logger.setLevel(level.upper())
