"""What the simulated devices keep from one task to the next.

As on a real device, the kept state is the device's as soon as its training is finished, whether or
not the report of it arrives; a task that ends before leaves nothing. The tied vectors are those of
the last task whose report counted: they agree with what the coordinator has. So are the residuals,
what top-k left out of the updates that counted: a tied vector on a real device, and here apart from
the algorithm's, since it is made where the update is encoded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from fleetlearn_protocol.encodings import RESIDUAL

from fleetlearn_simulator.fleet.device_rows import DeviceRows
from fleetlearn_simulator.training.kept_rows import NO_ROW, KeptRows, RowFile
from fleetlearn_simulator.training.trained_devices import KEPT_STATE, TIED, TrainedDevices


class KeptByDevices:
    """What a population keeps, and when the tasks that run will have left something."""

    def __init__(
        self, files: KeptRows[RowFile], population: int, residuals: RowFile | None = None
    ) -> None:
        """``files``, ``residuals``: at least one of the three."""
        self.states, self.tied, self.residuals = (
            None if file is None else DeviceRows(file, population) for file in (*files, residuals)
        )
        self.row_bytes = sum(4 * file.size for file in (*files, residuals) if file is not None)
        """Bytes of what a task leaves."""
        self.finished_at: dict[str, float] = {}
        """Task that a device has -> when its training is finished; infinite: never."""
        self._owed: set[int] = set()
        """Devices whose training was finished, and is not read yet, although they have lost the
        task."""

    def expect(self, tasks: Sequence[str], times: Sequence[float]) -> None:
        """Devices were given these tasks, and will have finished their training at these times."""
        if self.states is not None:
            self.finished_at.update(zip(tasks, times, strict=True))

    def lost(self, device: int, task: str, now: float) -> bool:
        """A device has no task any more. Returns whether it has finished its training, and what
        that left is to be kept."""
        owes = self.finished_at.pop(task, inf) <= now
        if owes:
            self._owed.add(device)
        return owes

    def is_owed(self, devices: Collection[int]) -> bool:
        """Return whether one of these devices is to keep something that is not read yet."""
        return not self._owed.isdisjoint(devices)

    def finished(self, devices: Sequence[int], tasks: Sequence[str], found: TrainedDevices) -> None:
        """These devices have finished these tasks. Where training diverged, they keep what they
        had."""
        for row, (device, task) in enumerate(zip(devices, tasks, strict=True)):
            self.finished_at.pop(task, None)
            self._owed.discard(device)
            left = found.vectors.get(KEPT_STATE)  # of a family's bundles some leave nothing
            if self.states is not None and left is not None and not found.diverged[row]:
                self.states.put(device, left[row])

    def accepted(self, devices: Sequence[int], found: TrainedDevices) -> None:
        """The reports of these devices count for the open round."""
        if self.tied is not None:
            for device, vectors in zip(devices, found.vectors[TIED], strict=True):
                self.tied.put(device, vectors)
        if self.residuals is not None:
            for device, residual in zip(devices, found.vectors[RESIDUAL], strict=True):
                self.residuals.put(device, residual)

    def end_round(self, committed: bool) -> None:
        """The open round is over."""
        if self.states is not None:
            self.states.end_round()
        if self.tied is not None:
            self.tied.end_round(keep=committed)
        if self.residuals is not None:
            self.residuals.end_round(keep=committed)


def rows_of(rows: DeviceRows | None, devices: Sequence[int]) -> list[int]:
    """Return each device's row; NO_ROW: it has none."""
    return [NO_ROW] * len(devices) if rows is None else rows.of(devices)
