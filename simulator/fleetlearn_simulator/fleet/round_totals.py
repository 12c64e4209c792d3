"""What arrived in one round, and what the round cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import add, sub
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.commit import weights_of
from fleetlearn_coordinator.aggregation.round_summary import NOTHING, Measurements, summarise_staleness
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_protocol.errors import ProtocolError
from numpy.typing import NDArray

from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.fleet.update_file import UpdateFile
from fleetlearn_simulator.training.trained_devices import LARGE_UPDATE, NO_DEVICES, TrainedDevices, concatenate

MAX_BYTES_WAITING = 2**28
"""Bytes of updates that may wait to be added together."""


class RoundTotals:
    """The accepted reports of a round, their aggregate, and the costs of all of its tasks."""

    def __init__(self, aggregator: Aggregator[Any], size: int, max_weight: int) -> None:
        """``size``: elements of an update. ``max_weight``: the most examples for which a device counts in the
        metrics."""
        self.aggregator, self.max_weight = aggregator, max_weight
        self.opened = 0.0
        """When the round opened."""
        self.devices: list[int] = []
        """Devices whose reports were accepted."""
        self.accepted: Counter[int] = Counter()
        """Tier -> how many reports were accepted."""
        self.reports: list[tuple[NDArray[np.int64], TrainedDevices]] = []
        """The accepted reports without their updates, and their weights in the metrics."""
        self.aggregate = aggregator.init(size)
        """The aggregator's state, with all accepted updates except the waiting ones."""
        self.waiting: list[tuple[NDArray[np.int64], NDArray[np.float64], Sequence[float], NDArray[np.float32]]] = []
        """Weights, largest magnitudes, factors (or nothing: all are 1) and updates of the last reports, which are added
        together later."""
        self.given_in: list[int] = []
        """Where updates may be stale: the rounds in which the tasks of the accepted reports were given."""
        self.staleness: list[int] = []
        """The same: the staleness of the accepted reports."""
        self.bytes_waiting = 0
        self.kept = UpdateFile(size) if aggregator.keeps_updates and size >= LARGE_UPDATE else None
        self.causes: Counter[str] = Counter()
        """Cause -> tasks that were lost by it."""
        self.assigned: Counter[int] = Counter()
        """Tier -> tasks."""
        self.useful = self.wasted = 0.0
        """Seconds that devices spent on tasks whose reports were accepted, and on lost tasks."""
        self.down = self.up = 0
        """Bytes that devices fetched and sent."""

    def refuse(self, found: TrainedDevices, weights: NDArray[np.int64]) -> tuple[int, str] | None:
        """Return the first row that the coordinator does not accept, and why. None: it accepts all rows. ``weights``:
        of the updates in the mean, shape (n,)."""
        passes = ~found.diverged & self.aggregator.passes_check(found.largest, weights)
        if passes.all():
            return None
        row = int(passes.argmin())
        if found.diverged[row]:
            return row, "failed: diverged"
        try:
            self.aggregator.check(float(found.largest[row]), int(weights[row]))
        except ProtocolError as error:
            return row, f"rejected: {error.code.value}"
        raise AssertionError(f"the aggregator {self.aggregator.name} refuses row {row} only together with others")

    def add_reports(
        self,
        tasks: RunningTasks,
        rows: slice,
        found: TrainedDevices,
        weights: NDArray[np.int64],
        times: Sequence[float],
        staleness: Sequence[int] = (),
        factors: Sequence[float] = (),
    ) -> None:
        """Count the reports of these tasks, which arrived at these times and are not refused. ``staleness``,
        ``factors``: theirs, or nothing where no update is stale."""
        self.devices += tasks.device[rows]
        self.accepted.update(tasks.tier[rows])
        counted = weights_of(found.examples, self.max_weight)
        self.reports.append((counted, replace(found, updates=NO_DEVICES.updates, vectors={})))
        # Added one after the other, as if they came alone. sum() rounds differently from Python 3.12 on.
        self.useful = reduce(add, map(sub, times, tasks.began[rows]), self.useful)
        if staleness:
            self.given_in += tasks.round[rows]
            self.staleness += staleness
        if found.updates.shape[1] >= LARGE_UPDATE:  # at once: to collect them would only cost memory
            factors = factors or [1.0] * len(found)
            each = zip(found.updates, weights.tolist(), found.largest.tolist(), factors, strict=True)
            for update, weight, largest, factor in each:
                row = self.kept.keep(update) if self.kept else ArrayUpdate(update)
                self.aggregator.add(self.aggregate, row, weight, largest, factor)
            return
        self.waiting.append((weights, found.largest, factors, found.updates))
        self.bytes_waiting += found.updates.nbytes
        if self.bytes_waiting > MAX_BYTES_WAITING:
            self.add_up()

    def add_up(self) -> None:
        """Add the waiting updates to the aggregate."""
        if self.waiting:
            weights, largest, factors, updates = zip(*self.waiting, strict=True)
            together = np.array([*chain.from_iterable(factors)]) if factors[0] else None
            columns = np.concatenate(weights), np.concatenate(largest), together
            self.aggregator.add_many(self.aggregate, updates, *columns)
        self.waiting, self.bytes_waiting = [], 0

    def complete(self) -> int:
        """Return how many accepted reports are of a complete task."""
        return sum(int(found.complete.sum()) for _, found in self.reports)

    def training(self) -> Measurements:
        """Return what the devices measured in their training, in the order in which their reports were accepted."""
        if not self.reports:
            return NOTHING
        weights = np.concatenate([weights for weights, _ in self.reports])
        found = concatenate([found for _, found in self.reports])
        means = {"loss": found.loss, **found.metrics}
        return Measurements(weights, {name: weights * values for name, values in means.items()})

    def summary(self) -> dict[str, Any]:
        """Return what goes into the round's line of rounds.jsonl."""
        return {
            **({"staleness": summarise_staleness(self.staleness)} if self.staleness else {}),
            "causes": dict(sorted(self.causes.items())),
            "assigned": dict(sorted(self.assigned.items())),
            "accepted": dict(sorted(self.accepted.items())),
            "device_seconds": {"useful": self.useful, "wasted": self.wasted},
            "bytes": {"down": self.down, "up": self.up},
        }
