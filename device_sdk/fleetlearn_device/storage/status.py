"""status.json: how the device is, for ``fleetlearn-device info``. Written by the running device
whenever that changes.

It is not synced: after a power cut it may be old, or gone. Nothing but people reads it, and the
counts go on from it.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import msgspec
from fleetlearn_protocol.stored_report import read_json

from fleetlearn_device.session.history import History

FILE = "status.json"


class DeviceStatus(msgspec.Struct, frozen=True):
    """The contents of status.json. Times are seconds since 1970."""

    started: float
    """When the process began."""
    connection: str
    """Whether there is a connection, and why not: a sentence without its subject."""
    connection_since: float
    again_at: float | None
    """When the device is to connect again. None: it is connected, or about to."""
    ready: bool
    """The coordinator has welcomed the device, and the device has no task."""
    task: str
    """What the device does with the last task, or how that task ended: a sentence without its
    subject."""
    task_since: float
    history: History
    reason_since: float
    """When the last task failed or did not count."""
    end: str = ""
    """Why the process ended. Empty: it runs, or was killed."""
    written: float = 0.0
    """When the file was written."""


def read_status(folder: Path) -> DeviceStatus | None:
    """Return the status in a state directory; None where there is none, or it is damaged."""
    try:
        return read_json((folder / FILE).read_bytes(), DeviceStatus)
    except (OSError, msgspec.DecodeError):
        return None


def write_status(folder: Path, status: DeviceStatus) -> None:
    """Write the file beside its place and rename it. Raises OSError."""
    draft = folder / f"{FILE}.tmp"
    draft.write_bytes(msgspec.json.encode(status))
    draft.replace(folder / FILE)


def in_lines(status: DeviceStatus, running: bool) -> list[tuple[str, str]]:
    """Return the status for people: a word for what each line is about, and the line. ``running``:
    a process holds the state directory."""
    history, lines = status.history, []
    if running:
        lines.append(("process", f"runs since {_at(status.started)}"))
        again = "" if status.again_at is None else f"; it connects again at {_at(status.again_at)}"
        waits = ", waiting for a task" if status.ready else ""
        lines.append(
            ("link", f"{status.connection}, since {_at(status.connection_since)}{waits}{again}")
        )
    elif status.end:
        lines.append(("process", f"ended at {_at(status.written)}: {status.end}"))
    else:
        text = "does not run, and did not end in order: it was killed, or the power failed, after"
        lines.append(("process", f"{text} {_at(status.written)}"))
    if history.task:
        was = "" if running or history.end else "when the process ended: "
        what = f"{history.task} ({history.what})" if history.what else history.task
        lines.append(("task", f"{what} {was}{status.task}, since {_at(status.task_since)}"))
    else:
        lines.append(("task", "none was given to this device yet"))
    counts = [(history.accepted, "accepted"), (history.answered, "questions answered")]
    counts += [(history.uncounted, "not counted"), (history.failed, "failed")]
    lines.append(("tasks", ", ".join(f"{number} {what}" for number, what in counts)))
    if history.reason:
        lines.append(("reason", f"{history.reason} ({_at(status.reason_since)})"))
    return lines


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).astimezone().isoformat(" ", "seconds")
