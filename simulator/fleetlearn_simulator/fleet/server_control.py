"""SCAFFOLD's server control variate: what devices fetch beside the model, and the sum of what they report of it."""

from __future__ import annotations

import numpy as np
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.round_sums import next_control
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import CONTROL
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator.training.trained_devices import TrainedDevices


class ServerControl:
    """The vector ``control`` of tasks, and the open round's sum of the part ``control`` of reports."""

    def __init__(self, size: int, devices: int) -> None:
        """``size``: elements of the model. ``devices``: how many there are, SCAFFOLD's N."""
        self.vector: Vector = np.zeros(size, np.float32)
        self._devices = devices
        self._sum = exact_mean.init(size)

    def refuse(self, found: TrainedDevices) -> tuple[int, str] | None:
        """Return the first row that the coordinator does not accept, and why. None: it accepts all rows."""
        largest = _largest(found)
        ones = np.ones(len(found), np.int64)
        passes = found.diverged | exact_mean.passes_check(largest, ones)
        if passes.all():
            return None
        row = int(passes.argmin())
        try:
            exact_mean.check(float(largest[row]), 1)
        except ProtocolError as error:
            return row, f"rejected: {error.code.value}"
        raise AssertionError(f"row {row} is refused only together with others")

    def add(self, found: TrainedDevices) -> None:
        """Add the reports of these devices, which are not refused."""
        changes = found.vectors[CONTROL]
        if len(found):
            exact_mean.add_many(self._sum, [changes], np.ones(len(found), np.int64), _largest(found))

    def end_round(self, committed: bool) -> None:
        """Make the next vector of the sum if the round is committed. Begin a new sum."""
        if committed:
            self.vector = next_control(self.vector, self._sum, self._devices)
        self._sum = exact_mean.init(self.vector.size)


def _largest(found: TrainedDevices) -> NDArray[np.float64]:
    """Return the greatest magnitude of each row's part, (n,)."""
    largest: NDArray[np.float64] = np.abs(found.vectors[CONTROL]).max(axis=1, initial=0.0).astype(np.float64)
    return largest
