"""What arrived in one round, and what the round cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from math import fsum
from operator import add, sub
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.round_summary import UNBOUNDED, Bounds, limits
from fleetlearn_protocol.errors import Code
from numpy.typing import NDArray

from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.training.trained_devices import NO_DEVICES, TrainedDevices, concatenate

MAX_BYTES_WAITING = 2**28
"""Bytes of updates that may wait to be added to the sum."""


class RoundTotals:
    """The accepted reports of a round, their sum, and the costs of all of its tasks."""

    def __init__(self, size: int, max_weight: int, opened: float) -> None:
        """``size``: elements of an update."""
        self.max_weight, self.opened = max_weight, opened
        self.devices: list[int] = []
        """Devices whose reports were accepted."""
        self.accepted: Counter[int] = Counter()
        """Tier -> how many reports were accepted."""
        self.reports: list[tuple[NDArray[np.int64], TrainedDevices]] = []
        """The weights of the accepted reports, and the reports without their updates."""
        self.sum = exact_mean.init(size)
        self.waiting: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float32]]] = []
        """Weights, largest magnitudes and updates of the last reports, which are not in the sum yet."""
        self.bytes_waiting = 0
        self.causes: Counter[str] = Counter()
        """Cause -> tasks that were lost by it."""
        self.assigned: Counter[int] = Counter()
        """Tier -> tasks."""
        self.useful = self.wasted = 0.0
        """Seconds that devices spent on tasks whose reports were accepted, and on lost tasks."""
        self.down = self.up = 0
        """Bytes that devices fetched and sent."""

    def refuse(self, found: TrainedDevices) -> tuple[int, str] | None:
        """Return the first row that the coordinator does not accept, and why. None: it accepts all rows."""
        weights, largest = np.minimum(found.examples, self.max_weight), found.largest
        well = ~found.diverged & exact_mean.fits(largest, weights)
        if well.all():
            return None
        row = int(well.argmin())
        if found.diverged[row]:
            return row, "failed: diverged"
        return row, f"rejected: {(Code.OUT_OF_RANGE if np.isfinite(largest[row]) else Code.NOT_FINITE).value}"

    def accept(self, tasks: RunningTasks, rows: slice, found: TrainedDevices, times: Sequence[float]) -> None:
        """Count the reports of these tasks, which arrived at these times and are not refused."""
        weights = np.minimum(found.examples, self.max_weight)
        self.devices += tasks.device[rows]
        self.accepted.update(tasks.tier[rows])
        self.reports.append((weights, replace(found, updates=NO_DEVICES.updates)))
        # Added one after the other, as if they came alone. sum() rounds differently from Python 3.12 on.
        self.useful = reduce(add, map(sub, times, tasks.began[rows]), self.useful)
        if found.updates.shape[1] >= exact_mean.BLOCK:  # at once: to collect them would only cost memory
            for update, weight, largest in zip(found.updates, weights.tolist(), found.largest.tolist(), strict=True):
                exact_mean.add(self.sum, update, weight, largest)
            return
        self.waiting.append((weights, found.largest, found.updates))
        self.bytes_waiting += found.updates.nbytes
        if self.bytes_waiting > MAX_BYTES_WAITING:
            self.add_up()

    def add_up(self) -> None:
        """Add the waiting updates to the sum."""
        if self.waiting:
            weights, largest, updates = zip(*self.waiting, strict=True)
            exact_mean.add_many(self.sum, updates, np.concatenate(weights), np.concatenate(largest))
        self.waiting, self.bytes_waiting = [], 0

    def complete(self) -> int:
        """Return how many accepted reports are of a complete task."""
        return sum(int(found.complete.sum()) for _, found in self.reports)

    def means(self, bounds: Bounds = UNBOUNDED) -> dict[str, float]:
        """Return the means of the accepted reports' losses and metrics, weighted like their updates. The same as
        ``fleetlearn_coordinator.service.run.pooled``."""
        if not self.reports:
            return {}
        weights = np.concatenate([weights for weights, _ in self.reports])
        found = concatenate([found for _, found in self.reports])
        means = {}
        for name, values in {"loss": found.loss, **found.metrics}.items():
            low, high = limits(bounds, name)
            finite = np.isfinite(values) & (values >= low) & (values <= high)
            if finite.any():
                products, total = (weights * values)[finite].tolist(), int(weights[finite].sum())
                means[name] = fsum(products) / total
        return means

    def summary(self) -> dict[str, Any]:
        """Return what goes into the round's line of rounds.jsonl."""
        return {
            "causes": dict(sorted(self.causes.items())),
            "assigned": dict(sorted(self.assigned.items())),
            "accepted": dict(sorted(self.accepted.items())),
            "device_seconds": {"useful": self.useful, "wasted": self.wasted},
            "bytes": {"down": self.down, "up": self.up},
        }
