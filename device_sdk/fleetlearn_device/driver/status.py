"""Keeps status.json up to date: what a device's owner wants to know while the device runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import (
    AnswerReady,
    Holding,
    Idle,
    Online,
    Saving,
    Sent,
    Training,
    Uploading,
)
from fleetlearn_device.storage.status import DeviceStatus, read_status, write_status

log = logging.getLogger("fleetlearn.device")

_DOES: dict[type, str] = {
    Training: "is in training",
    AnswerReady: "is answered, and the reply is being sent",
    Saving: "is trained, and its update is being saved",
    Holding: "is trained, and its update waits to be sent",
    Uploading: "is trained, and its update is being sent",
    Sent: "is trained, and its update was sent",
}
"""What the device does with its task in each state of the session's work; in the others it fetches
what it needs."""


class StatusFile:
    """The status of the device that this process is. The history goes on from the file, if there is
    one.

    ``clock``: seconds since 1970.
    """

    def __init__(
        self, folder: Path, session: Session, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._session, self._clock = folder, session, clock
        now, earlier = clock(), read_status(folder)
        if earlier is not None:
            session.history = earlier.history
        reason = now if earlier is None else earlier.reason_since
        self._status = DeviceStatus(now, "", now, None, False, "", now, session.history, reason)
        self._warned = False

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
            task=history.end if idle else _DOES.get(type(session.work), "is being fetched"),
            history=history,
            end=end,
        )
        if connection is not None:
            status = msgspec.structs.replace(status, connection=connection, again_at=again_at)
        if status == before:
            return
        now = self._clock()
        changes = {"written": now}
        if status.connection != before.connection:
            changes["connection_since"] = now
        if (status.task, history.task) != (before.task, before.history.task):
            changes["task_since"] = now
        if history.reason != before.history.reason:
            changes["reason_since"] = now
        self._status = msgspec.structs.replace(status, **changes)
        try:
            write_status(self._folder, self._status)
        except OSError as error:  # what needs the directory more says so itself
            if not self._warned:
                log.warning("the status for `fleetlearn-device info` cannot be written: %s", error)
            self._warned = True
