"""What the simulated devices keep from one task to the next.

As on a real device, the kept state is the device's as soon as its training is finished, whether or not the report of it
arrives. A task that ends before leaves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from fleetlearn_simulator.fleet.device_rows import DeviceRows
from fleetlearn_simulator.training.kept_rows import RowFile
from fleetlearn_simulator.training.trained_devices import KEPT_STATE, TrainedDevices


class KeptStates:
    """The kept states of a population, and when the tasks that run will have made new ones."""

    def __init__(self, file: RowFile, population: int) -> None:
        self.rows = DeviceRows(file, population)
        self.row_bytes = 4 * file.size
        self.finished_at: dict[str, float] = {}
        """Task that a device has -> when its training is finished; infinite: never."""
        self._owed: set[int] = set()
        """Devices whose training was finished, and is not read yet, although they have lost the task."""

    def expect(self, tasks: Sequence[str], times: Sequence[float]) -> None:
        """Devices were given these tasks, and will have finished their training at these times."""
        self.finished_at.update(zip(tasks, times, strict=True))

    def lost(self, device: int, task: str, now: float) -> bool:
        """A device has no task any more. Returns whether it has finished its training, and what that left is to be
        kept."""
        owes = self.finished_at.pop(task, inf) <= now
        if owes:
            self._owed.add(device)
        return owes

    def is_owed(self, devices: Collection[int]) -> bool:
        """Return whether one of these devices is to keep something that is not read yet."""
        return not self._owed.isdisjoint(devices)

    def keep(self, devices: Sequence[int], tasks: Sequence[str], found: TrainedDevices) -> None:
        """These devices have finished these tasks. Where training diverged, they keep what they had."""
        for row, (device, task) in enumerate(zip(devices, tasks, strict=True)):
            self.finished_at.pop(task, None)
            self._owed.discard(device)
            if not found.diverged[row]:
                self.rows.put(device, found.vectors[KEPT_STATE][row])
