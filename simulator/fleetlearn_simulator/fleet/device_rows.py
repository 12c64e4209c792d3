"""Which row of a file is which device's. A device has a row from the first task on that leaves it
something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator.training.kept_rows import NO_ROW, RowFile


class DeviceRows:
    """The rows of a population's devices.

    A row that was written in the open round, and the row that it replaced, both stay as they are
    until the round ends. A row that a checkpoint names stays as it is until the next checkpoint: a
    run that was stopped goes on from it.
    """

    def __init__(self, file: RowFile, population: int) -> None:
        self.file = file
        self.used = 0
        """Rows that the file has, or had."""
        self._rows = np.zeros(population, np.int32)
        """Each device's row plus 1; 0: none. What nobody writes takes no memory."""
        self._replaced: list[tuple[int, int]] = []
        """Devices that have another row since the open round began, and the rows that they had
        before."""
        self._free: list[int] = []
        self._free_later: list[int] = []
        """Rows that nobody needs, except for the last checkpoint."""
        self._saved: NDArray[np.int64] = np.zeros(0, np.int64)
        """The rows that the last checkpoint names, in order."""

    def of(self, devices: Sequence[int]) -> list[int]:
        """Return each device's row; NO_ROW: it has none."""
        rows: list[int] = (self._rows[devices] - 1).tolist()
        return rows

    def put(self, device: int, values: Vector) -> None:
        """Write a device's new row. Raises SimulatorError: the disk is full."""
        if self._free:
            row = self._free.pop()
        else:
            row, self.used = self.used, self.used + 1
        self.file.write(row, values)
        self._replaced.append((device, int(self._rows[device]) - 1))
        self._rows[device] = row + 1

    def end_round(self, keep: bool = True) -> None:
        """The open round is over. With ``keep`` devices have the rows that were written in it, else
        those before it. A device that had two new rows has none then: for the second one it has
        deleted what it had before the first."""
        replaced, self._replaced = self._replaced, []
        if not keep:
            times = Counter(device for device, _ in replaced)
            given_up = list(zip(times, self.of([*times]), strict=True))
            for device, before in replaced:
                if times[device] == 1:
                    self._rows[device] = before + 1
                else:
                    given_up.append((device, before))
                    self._rows[device] = 0
            replaced = given_up
        for _, row in replaced:
            if row == NO_ROW:
                continue
            place = int(np.searchsorted(self._saved, row))
            saved = place < len(self._saved) and self._saved[place] == row
            (self._free_later if saved else self._free).append(row)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return devices and their rows, for a checkpoint that is now written."""
        devices = np.flatnonzero(self._rows)
        rows = self._rows[devices].astype(np.int64) - 1
        self._free += self._free_later
        self._free_later, self._saved = [], np.sort(rows)
        return {"devices": devices, "rows": rows}

    def restore(self, tensors: dict[str, NDArray[Any]]) -> None:
        """Bring a new object into this state. The file may have more rows, which a process wrote
        after the checkpoint."""
        self._rows[tensors["devices"]] = tensors["rows"] + 1
        self._saved = np.sort(tensors["rows"])
        self.used = max(self.file.count(), 1 + int(self._saved.max(initial=NO_ROW)))
        self._free = np.setdiff1d(np.arange(self.used), self._saved).tolist()
