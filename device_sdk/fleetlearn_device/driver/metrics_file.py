"""The device's numbers as a file for Prometheus: the node exporter's textfile collector, or any
program that reads the text format, takes them from there. No port is opened."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fleetlearn_device.storage.status import PAUSES, DeviceStatus

log = logging.getLogger("fleetlearn.device")

LEAST = 60.0
"""Seconds between two writings: Prometheus reads about that often, and flash wears out."""


class MetricsFile:
    """Writes the file when the status changes, at most once in ``LEAST`` seconds; what changed in
    between is written when they are over. The end of the process is written at once.

    ``clock``: seconds that never go back.
    """

    def __init__(
        self, path: Path, device: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._device, self._clock = path, device, clock
        self._written: float | None = None
        self._waiting: asyncio.TimerHandle | None = None
        self._status: DeviceStatus | None = None
        self._warned = False

    def update(self, status: DeviceStatus) -> None:
        """Take a new status; call in the event loop's thread."""
        self._status = status
        wait = 0.0 if self._written is None else self._written + LEAST - self._clock()
        if status.end or wait <= 0:
            self._write()
        elif self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(wait, self._write)

    def _write(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        assert self._status is not None
        self._written = self._clock()
        draft = self._path.with_name(f".{self._path.name}.tmp")
        try:
            draft.write_text(as_text(self._status, self._device), "utf-8")
            draft.replace(self._path)
        except OSError as error:
            if not self._warned:
                log.warning("the metrics cannot be written: %s", error)
            self._warned = True


def as_text(status: DeviceStatus, device: str) -> str:
    """Return the status in Prometheus' text format."""
    history, up = status.history, not status.end
    paused = [(f',reason="{word}"', word == status.paused_by) for word in PAUSES]
    rows: list[tuple[str, str, str, Iterable[tuple[str, float]]]] = [
        ("up", "gauge", "The process runs.", [("", up)]),
        (
            "written_timestamp_seconds",
            "gauge",
            "When this file was written: up stays 1 in the file of a process that was killed.",
            [("", status.written)],
        ),
        (
            "connected",
            "gauge",
            "There is a connection to the coordinator.",
            [("", up and status.is_connected)],
        ),
        (
            "last_task_timestamp_seconds",
            "gauge",
            "When the last task was given or ended; 0: there was none.",
            [("", status.task_since if history.task else 0)],
        ),
        (
            "updates_accepted_total",
            "counter",
            "Updates that the coordinator accepted.",
            [("", history.accepted)],
        ),
        (
            "tasks_uncounted_total",
            "counter",
            "Tasks whose work does not count: refused, or the round was over.",
            [("", history.uncounted)],
        ),
        ("tasks_failed_total", "counter", "Tasks given back.", [("", history.failed)]),
        ("sent_bytes_total", "counter", "Bytes sent.", [("", status.bytes_sent)]),
        ("received_bytes_total", "counter", "Bytes received.", [("", status.bytes_received)]),
        (
            "written_bytes_total",
            "counter",
            "Bytes written to the state directory.",
            [("", status.bytes_written)],
        ),
        ("paused", "gauge", "1 where this keeps the device from training.", paused),
    ]
    lines = []
    for name, kind, about, samples in rows:
        lines += [
            f"# HELP fleetlearn_device_{name} {about}",
            f"# TYPE fleetlearn_device_{name} {kind}",
        ]
        lines += [
            f'fleetlearn_device_{name}{{device="{device}"{label}}} {float(value):.15g}'
            for label, value in samples
        ]
    return "\n".join(lines) + "\n"
