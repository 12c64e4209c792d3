"""Keeps status.json up to date: what a device's owner wants to know while the device runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import (
    AnswerReady,
    Holding,
    Idle,
    Locating,
    Masking,
    Online,
    Saving,
    Sent,
    Training,
    Unmasked,
    Uploading,
)
from fleetlearn_device.storage.files import WRITTEN
from fleetlearn_device.storage.status import DeviceStatus, read_status, write_status

log = logging.getLogger("fleetlearn.device")

_DOES: dict[type, str] = {
    Training: "is in training",
    AnswerReady: "is answered, and the reply is being sent",
    Saving: "is trained, and its update is being saved",
    Unmasked: "is trained, and the coordinator has not said yet what its update counts",
    Masking: "is trained, and its update is being masked",
    Holding: "is trained, and its update waits to be sent",
    Uploading: "is trained, and its update is being sent",
    Sent: "is trained, and its update was sent",
}
"""What the device does with its task in each state of the session's work; in the others it fetches
what it needs."""


@dataclass
class Traffic:
    """Bytes of messages and chunks, without what TLS and the frames add."""

    sent: int = 0
    received: int = 0


def _does(session: Session) -> str:
    if session.stopping and isinstance(session.work, Locating):
        return "is kept: the next start goes on with its training"
    return _DOES.get(type(session.work), "is being fetched")


class StatusFile:
    """The status of the device that this process is. The history goes on from the file, if there is
    one.

    ``coordinator``: its address. ``on_change``: called with each status that is written. ``clock``:
    seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        session: Session,
        clock: Callable[[], float] = time.time,
        *,
        coordinator: str = "",
        on_change: Callable[[DeviceStatus], None] | None = None,
    ) -> None:
        self._folder, self._session, self._clock = folder, session, clock
        self._on_change = on_change
        self.traffic = Traffic()
        """What this process sent and received."""
        now, earlier = clock(), read_status(folder)
        if earlier is None:
            earlier = DeviceStatus(now, "", now, None, False, "", now, session.history, now)
        else:
            session.history = earlier.history
        self._before = Traffic(earlier.bytes_sent, earlier.bytes_received)
        self._written_before = earlier.bytes_written - WRITTEN.count
        self._status = msgspec.structs.replace(
            earlier,
            started=now,
            connection="",
            connection_since=now,
            again_at=None,
            ready=False,
            task="",
            task_since=now,
            end="",
            coordinator=coordinator,
            ineligible="",
            waits="",
            paused_by="",
            paused="",
        )
        self._warned = False

    def fail(self, error: str) -> None:
        """Keep the last error. It is written with the next update."""
        self._status = msgspec.structs.replace(
            self._status, error=error, error_at=self._clock(), written=0.0
        )

    def update(
        self, connection: str | None = None, again_at: float | None = None, end: str = ""
    ) -> None:
        """Write the file if something changed.

        ``connection``: whether there is a connection; None: as before. ``again_at``: when the
        device is to connect again, with a ``connection`` that is not there. ``end``: why the
        process ends.
        """
        session, before = self._session, self._status
        idle, history = isinstance(session.work, Idle), session.history
        status = msgspec.structs.replace(
            before,
            ready=idle and isinstance(session.link, Online),
            task=history.end if idle else _does(session),
            history=history,
            ineligible=session.ineligible,
            waits=session.waits,
            took_part=session.took_part(history.task),
            may_take_part=session.demands.participations,
            paused_by="" if session.pause is None else session.pause.names[0],
            paused="" if session.pause is None else session.pause.text,
            end=end,
        )
        if connection is not None:
            status = msgspec.structs.replace(status, connection=connection, again_at=again_at)
        if status == before and before.written:
            return
        now = self._clock()
        changes: dict[str, Any] = {}
        if status.connection != before.connection:
            changes["connection_since"] = now
        if (status.task, history.task) != (before.task, before.history.task):
            changes["task_since"] = now
        if bool(status.paused) != bool(before.paused):
            changes["paused_since"] = now
        if history.reason != before.history.reason:
            changes["reason_since"] = now
            if history.failed > before.history.failed:
                changes |= {"error": history.reason, "error_at": now}
        self._write(msgspec.structs.replace(status, **changes), now)

    def _write(self, status: DeviceStatus, now: float | None = None) -> None:
        self._status = msgspec.structs.replace(
            status,
            written=self._clock() if now is None else now,
            bytes_sent=self._before.sent + self.traffic.sent,
            bytes_received=self._before.received + self.traffic.received,
            bytes_written=self._written_before + WRITTEN.count,
        )
        try:
            write_status(self._folder, self._status)
        except OSError as error:  # what needs the directory more says so itself
            if not self._warned:
                text = "the status for `fleetlearn-device status` cannot be written: %s"
                log.warning(text, error)
            self._warned = True
        if self._on_change is not None:
            self._on_change(self._status)
