"""updates.json: how many updates the device made in each run.

An update counts before anybody is told of it, whether or not it is accepted later. A process that
dies in between has counted one too many: never one too few.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably

log = logging.getLogger("fleetlearn.device")


class CountsFile(msgspec.Struct, frozen=True):
    """The contents of updates.json."""

    updates: dict[str, int]
    """Run -> updates."""
    last: str = ""
    """The task of the last update."""


class UpdateCounts:
    """The file ``path``. Each method, and opening it, raises StateError where it cannot be read or
    written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damage = ""
        self._counted = CountsFile({})
        with os_errors_as_state_errors(path):
            try:
                self._counted = read_checked_json(path.read_bytes(), CountsFile)
            except FileNotFoundError:
                pass
            except msgspec.DecodeError as error:
                self._damage = (
                    f"{path} is damaged ({error}): how often the device took part in each run is "
                    "not known any more"
                )
                log.warning("%s; it counts from 0", self._damage)

    def check(self) -> None:
        """Raise StateError where counts were lost: for a device whose owner limits them."""
        if self._damage:
            raise StateError(
                f"{self._damage}, and its owner limits that (privacy.participations). Delete the "
                "file to let the device take part as often again"
            )

    def of(self, run: str) -> int:
        """Return how many updates the device made in a run."""
        return self._counted.updates.get(run, 0)

    def is_last(self, task_id: str) -> bool:
        """Return whether the last update was of this task."""
        return self._counted.last == task_id

    def add(self, run: str, task_id: str) -> None:
        """Count a task's update durably."""
        counted = CountsFile({**self._counted.updates, run: self.of(run) + 1}, task_id)
        with os_errors_as_state_errors(self._path):
            write_durably(self._path, checked_json(counted))
        self._counted = counted
