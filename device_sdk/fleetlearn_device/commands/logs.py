"""Where the log of ``run`` goes: standard error or the journal, and a file; as text or as JSON."""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler

from fleetlearn_protocol.command_line import JournalLine, LogLine, is_journal
from fleetlearn_protocol.paths import in_home

from fleetlearn_device.settings.sources import SettingError, Values


class _LogFile(RotatingFileHandler):
    """A log file; what cannot be written is said once, on standard error."""

    _warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not self._warned:
            error = sys.exc_info()[1]
            print(f"fleetlearn-device: the log file cannot be written: {error}", file=sys.stderr)
        self._warned = True


def begin_log(values: Values) -> None:
    """Write the log as the settings say. Raises SettingError where the file cannot be opened."""
    logger = logging.getLogger("fleetlearn")
    logger.setLevel(values["log.level"].value.upper())
    form, file = values["log.format"].value, values["log.file"]
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file.value is not None:
        try:
            handlers.append(
                _LogFile(
                    in_home(file.value),
                    maxBytes=values["log.size"].value * 2**20,
                    backupCount=values["log.files"].value - 1,
                    encoding="utf-8",
                )
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise SettingError(
                f"{file.source}: the log file {file.value} cannot be opened: {why}"
            ) from None
    for number, handler in enumerate(handlers):
        handler.setFormatter(_formatter(form, to_journal=number == 0 and is_journal()))
        logger.addHandler(handler)


def _formatter(form: str, *, to_journal: bool) -> logging.Formatter:
    if form == "json":
        from fleetlearn_protocol.json_log import JsonLines

        return JsonLines()
    return JournalLine() if to_journal else LogLine()
