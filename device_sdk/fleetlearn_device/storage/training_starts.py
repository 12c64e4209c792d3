"""training.json: which task is being trained, and how often its training was started.

The file is there while a training runs. A process that finds it knows that the process before died
during a training.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from fleetlearn_protocol.messages import Identifier

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably


class Starts(msgspec.Struct, frozen=True):
    """The contents of training.json."""

    task: Identifier
    starts: int


class TrainingStarts:
    """Counts how often processes died during the training of one task. Each method raises
    StateError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self, task_id: str) -> int:
        """Return how often the training of this task was started by processes that died during
        it."""
        with os_errors_as_state_errors(self._path):
            try:
                started = read_checked_json(self._path.read_bytes(), Starts)
            except (FileNotFoundError, msgspec.DecodeError):
                return 0
            return started.starts if started.task == task_id else 0

    def add(self, task_id: str) -> None:
        """Count a start of this task's training durably, before it begins."""
        with os_errors_as_state_errors(self._path):
            started = Starts(task_id, self.count(task_id) + 1)
            write_durably(self._path, checked_json(started))

    def clear(self) -> None:
        """Forget the starts: the training ended, well or not, and the process lives."""
        with os_errors_as_state_errors(self._path):
            self._path.unlink(missing_ok=True)
