"""updates.json: how many updates the device made in each run, and of which tasks the last ones.

An update counts before anybody is told of it, whether or not it is accepted later. A process that
dies in between has counted one too many: never one too few.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from fleetlearn_device.storage.checked_json import checked_json, read_checked_json
from fleetlearn_device.storage.errors import StateError, os_errors_as_state_errors
from fleetlearn_device.storage.files import write_durably

REMEMBERED = 1000
"""Tasks whose updates the device remembers to have made: 20 kB."""

log = logging.getLogger("fleetlearn.device")


class CountsFile(msgspec.Struct, frozen=True):
    """The contents of updates.json."""

    updates: dict[str, int]
    """Run -> updates."""
    last: str = ""
    """The task of the last update."""
    made: tuple[str, ...] = ()
    """Names of the tasks of the last updates, as ``_name`` makes them; the newest is last."""


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

    def made(self, task_id: str) -> bool:
        """Return whether the device made an update of this task: one of the last ``REMEMBERED``."""
        return self._counted.last == task_id or _name(task_id) in self._counted.made

    def add(self, run: str, task_id: str) -> None:
        """Count a task's update durably."""
        updates = {**self._counted.updates, run: self.of(run) + 1}
        made = (*self._counted.made, _name(task_id))[-REMEMBERED:]
        counted = CountsFile(updates, task_id, made)
        with os_errors_as_state_errors(self._path):
            write_durably(self._path, checked_json(counted))
        self._counted = counted


def _name(task_id: str) -> str:
    """Return a hash of a task's name, 16 characters: the name may be four times as long."""
    return hashlib.sha256(task_id.encode()).hexdigest()[:16]
