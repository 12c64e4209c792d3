"""status.json: how the device is, for ``fleetlearn-device status``. Written by the running device
whenever that changes.

It is not synced: after a power cut it may be old, or gone. Nothing but people reads it, and the
counts go on from it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetlearn_device.session.history import History
from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.files import WRITTEN

FILE = "status.json"
PAUSES = (
    "mains",
    "battery",
    "unmetered",
    "load",
    "temperature",
    "full_speed",
    "hours",
    "free_memory",
    "free_disk",
    "check",
    "pause",
)
"""What can keep a device from training, for programs: the names of its conditions
(``conditions.Conditions``), and its owner's own pause."""


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
    coordinator: str = ""
    """Its address, as the device was given it."""
    ineligible: str = ""
    """Why the coordinator gives this device no task, as it said at the last check-in."""
    waits: str = ""
    """Why there was no task for anybody then. Empty: one may come, or came since."""
    paused_by: str = ""
    """What keeps the device from training, one of ``PAUSES``. Empty: nothing does."""
    paused: str = ""
    """The same for people: what is so, and what is needed, such as ``on battery (12 %, needs
    30 %)``."""
    paused_since: float = 0.0
    """When the device paused, or went on."""
    error: str = ""
    """The last error: of a task, of the connection, or that ended a process."""
    error_at: float = 0.0
    took_part: int = 0
    """How many updates the device made in the last task's run; counted in private runs, and where
    its owner limits them."""
    may_take_part: int | None = None
    """How many its owner allows in one run. None: any number."""
    bytes_sent: int = 0
    """By all processes that used the state directory, as of when the file was written; messages
    and chunks, without what TLS and the frames add."""
    bytes_received: int = 0
    bytes_written: int = 0
    """To files of the state directory, by all processes: what wears a memory card out."""

    @property
    def is_connected(self) -> bool:
        """There was a connection when the file was written."""
        return self.connection.startswith("connected")


def read_status(folder: Path) -> DeviceStatus | None:
    """Return the status in a state directory; None where there is none, or it is damaged."""
    try:
        return read_checked_json((folder / FILE).read_bytes(), DeviceStatus)
    except (OSError, msgspec.DecodeError):
        return None


def write_status(folder: Path, status: DeviceStatus) -> None:
    """Write the file beside its place and rename it. Raises OSError."""
    draft = folder / f"{FILE}.tmp"
    WRITTEN.count += draft.write_bytes(checked_json(status))
    draft.replace(folder / FILE)
