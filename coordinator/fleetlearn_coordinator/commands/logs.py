"""The log of commands that have one."""

from __future__ import annotations

import logging
from typing import get_args

import typer
from fleetlearn_protocol.command_line import log_on_stderr

from fleetlearn_coordinator.plan.service_settings import LogFormat
from fleetlearn_coordinator.service.json_log import json_lines


def log_at(level: str, form: str = "text") -> None:
    """Write the log on standard error, from this level on. ``form``: ``text``, or ``json`` for a
    line of JSON for each record. Ends with a usage error where there is no such level or form."""
    known = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level.upper() not in known:
        raise typer.BadParameter(
            f"{level!r} was given; one of {', '.join(known)} is expected", param_hint="--log-level"
        )
    if form not in get_args(LogFormat):
        raise typer.BadParameter(
            f"{form!r} was given; one of {', '.join(get_args(LogFormat))} is expected",
            param_hint="--log-format",
        )
    logger = logging.getLogger("fleetlearn")
    handler = log_on_stderr()
    if form == "json":
        handler.setFormatter(json_lines())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
