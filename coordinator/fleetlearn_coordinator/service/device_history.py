"""What a run has seen of its devices, for its ledger: an observer (observers.py).

Nothing is written for a heartbeat or a step. Once a second, with what ``status`` shows, a row is
written for each device that connected, left or ended a task since the last time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fleetlearn_protocol.messages import CheckIn

from fleetlearn_coordinator.rounds.commands import (
    FAILED,
    GIVEN_BACK,
    LATE,
    LOST,
    REJECTED,
    STALLED,
    STOPPED,
    Ended,
    Revived,
)
from fleetlearn_coordinator.service.observers import (
    AnswerSaved,
    DeviceJoined,
    DeviceLeft,
    MessageRefused,
    RunEvent,
    TaskFailed,
    UpdateSaved,
)
from fleetlearn_coordinator.storage.ledger import DeviceActivity

CANNOT_WORK = "cannot-work"
"""The cause of an error that a device says of itself when it checks in."""
MOST_ERROR = 500
"""Characters that are kept of what a device said."""


class DeviceHistory:
    """An observer that counts what each device did since ``take_rows`` was last called."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """``now``: returns the Unix time."""
        self._now = now
        self._connected: dict[str, float] = {}
        """Device -> since when it has been connected, in Unix time."""
        self._new: dict[str, DeviceActivity] = {}
        self._refused: dict[str, str] = {}
        """Device -> what it was told of a message that was refused a moment ago."""

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Count what happened."""
        for event in events:
            match event:
                case UpdateSaved(device):
                    self._change(device, seen=self._now(), done=1)
                case Ended(device, _, _, cause):
                    self._end(device, cause)
                case AnswerSaved(device):
                    self._change(device, seen=self._now())
                case Revived(device):
                    self._change(device, lost=-1)
                case DeviceJoined(check_in):
                    self._join(check_in)
                case DeviceLeft(device):
                    if self._connected.pop(device, None) is not None:
                        self._change(device, seen=self._now())
                case TaskFailed(device, _, cause, text):
                    if cause != STOPPED:
                        self._say(device, cause.removeprefix(FAILED), text)
                case MessageRefused(device, _, text):
                    self._refused[device] = text

    def take_rows(self) -> list[DeviceActivity]:
        """Return what is new since the last call. The caller writes it."""
        rows = [
            row._replace(connected=self._connected.get(device)) for device, row in self._new.items()
        ]
        self._new, self._refused = {}, {}
        return rows

    def _join(self, check_in: CheckIn) -> None:
        now = self._now()
        self._connected[check_in.device] = now
        self._change(
            check_in.device,
            seen=now,
            runtime=check_in.runtime,
            software=check_in.software,
            tier=check_in.tier,
            tags=check_in.tags,
        )
        if check_in.error:
            self._say(check_in.device, CANNOT_WORK, check_in.error)

    def _end(self, device: str, cause: str) -> None:
        if cause in (LOST, LATE):
            self._change(device, lost=1)
        elif cause == STALLED:
            self._change(device, failed=1)
            self._say(device, cause, "no step and no byte for too long")
        elif cause.startswith(REJECTED):
            self._change(device, seen=self._now(), failed=1)
            self._say(device, cause, self._refused.get(device, ""))
        elif cause.startswith(FAILED) and cause not in GIVEN_BACK:
            self._change(device, seen=self._now(), failed=1)

    def _say(self, device: str, cause: str, text: str) -> None:
        error = f"{cause}: {text}" if text else cause
        self._change(device, error=error[:MOST_ERROR], error_at=self._now())

    def _change(
        self, device: str, *, done: int = 0, failed: int = 0, lost: int = 0, **known: object
    ) -> None:
        row = self._new.get(device) or DeviceActivity(device)
        counts = {"done": row.done + done, "failed": row.failed + failed, "lost": row.lost + lost}
        self._new[device] = row._replace(**known, **counts)  # type: ignore[arg-type]
