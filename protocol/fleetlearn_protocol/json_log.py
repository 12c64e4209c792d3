"""A log as JSON, a line for each record, for programs that collect logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

NOTE = "note"
"""The event of records without a name."""


def said(event: str, **fields: Any) -> dict[str, Any]:
    """Return what a call of a logger is given as ``extra``. ``event``: its stable name.
    ``fields``: its numbers and names, of types that JSON has."""
    return {"event": event, "fields": fields}


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON: time (UTC, RFC 3339), level, event, run where it is
    about one of several, the event's fields, and the text that people read.

    ``unnamed``: beginning of a logger's name -> the event of its records that have none.
    """

    def __init__(self, unnamed: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._unnamed = dict(unnamed or {})

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "") or self._event_of(record.name),
        }
        if run := getattr(record, "run", ""):
            line["run"] = run
        line |= getattr(record, "fields", {})
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()

    def _event_of(self, logger: str) -> str:
        for begin, event in self._unnamed.items():
            if logger.startswith(begin):
                return event
        return NOTE
