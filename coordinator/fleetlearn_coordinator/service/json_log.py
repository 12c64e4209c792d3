"""The log as JSON, a line for each record, for programs that collect logs. Names of events are
stable: docs/operate/monitoring.md has them in a table, which a test holds to the code."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

NOTE, PEER = "note", "peer"
"""The events of records without a name: any, and those about a connection."""
PEERS = "fleetlearn.coordinator.peers"


def said(event: str, **fields: Any) -> dict[str, Any]:
    """Return what a call of a logger is given as ``extra``. ``event``: its stable name.
    ``fields``: its numbers and names, of types that JSON has."""
    return {"event": event, "fields": fields}


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON: time (UTC, RFC 3339), level, event, run where it is
    about one of several, the event's fields, and the text that people read."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", PEER if record.name.startswith(PEERS) else NOTE),
        }
        if run := getattr(record, "run", ""):
            line["run"] = run
        line |= getattr(record, "fields", {})
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()
