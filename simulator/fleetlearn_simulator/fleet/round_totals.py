"""What arrived in one round, and what the round cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import add, sub
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.commit import weights_of
from fleetlearn_coordinator.aggregation.round_summary import NOTHING, Measurements, summarise_staleness
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, ArrayUpdate, Values, concatenated
from fleetlearn_coordinator.aggregation.weighing.norms import NOT_MEASURED, measure
from fleetlearn_coordinator.aggregation.weighing.weighing import PLAIN, Reported, RoundState, Weighing
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import BUFFERS, Evaluation
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.fleet.update_file import UpdateFile
from fleetlearn_simulator.training.trained_devices import LARGE_UPDATE, NO_DEVICES, TrainedDevices, concatenate

MAX_BYTES_WAITING = 2**28
"""Bytes of updates that may wait to be added together."""


class Measured(NamedTuple):
    """What a device measured on its own data before it trained. None: it has not, or its loss was not finite."""

    model: Evaluation | None
    """Of the model that its task began from."""
    personal: Evaluation | None
    """Of its personal model, where the algorithm has one."""


class Waiting(NamedTuple):
    """Updates of n reports that are to be added."""

    weights: NDArray[np.int64]
    largest: NDArray[np.float64]
    factors: Sequence[float]
    """Of the updates; empty: all are 1."""
    updates: NDArray[np.float32]
    values: Values
    """Of the models' buffers."""


class RoundTotals:
    """The accepted reports of a round, their aggregate, and the costs of all of its tasks."""

    def __init__(
        self,
        aggregator: Aggregator[Any],
        size: int,
        max_weight: int,
        weighing: Weighing = PLAIN,
        state: RoundState | None = None,
        buffers: Sequence[slice] = (),
        present: Vector = NO_VALUES.present,
    ) -> None:
        """``size``: elements of an update. ``max_weight``: the most examples for which a device counts in the
        metrics. ``state``: of the weighing; None: of a run's first round. ``buffers``: the elements that are no trained
        parameters. ``present``: their values in the model that the round changes."""
        self.aggregator, self.max_weight = aggregator, max_weight
        self.weighing, self.state, self.buffers = weighing, state or weighing.state_after(None), buffers
        self.present = present
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
        self.waiting: list[Waiting] = []
        """The last reports' updates, which are added together later."""
        self.reported: list[Reported] = []
        """What the weighing of the accepted updates depends on, unless it is plain."""
        self.measured: list[Measured] = []
        """What the devices measured before training, in the order of their reports, if the plan asks for it."""
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

    def measure(self, found: TrainedDevices, weights: NDArray[np.int64]) -> list[Reported]:
        """Return what the weighing of these updates depends on; nothing if it is plain. Losses are training's."""
        if self.weighing.is_plain:
            return []
        norms, size = [NOT_MEASURED] * len(found), found.updates.shape[1]
        if self.weighing.needs_norms:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
                norms = [measure(ArrayUpdate(update), size, self.buffers) for update in found.updates]
        rows = zip(weights.tolist(), found.steps.tolist(), found.loss.tolist(), norms, strict=True)
        return list(map(Reported._make, rows))

    def refuse(
        self, found: TrainedDevices, weights: NDArray[np.int64], reported: Sequence[Reported] = ()
    ) -> tuple[int, str] | None:
        """Return the first row that the coordinator does not accept, and why. None: it accepts all rows. ``weights``:
        of the updates in the mean, shape (n,). ``reported``: what ``measure`` returned."""
        passes = ~found.diverged & self.aggregator.passes_check(found.largest, weights)
        finite = np.ones(len(found), np.bool_)
        if self.buffers:
            finite &= np.isfinite(found.vectors[BUFFERS]).all(axis=1)
        passes &= finite
        if reported:
            passes &= [self.weighing.passes_check(each, self.state) for each in reported]
        if passes.all():
            return None
        row = int(passes.argmin())
        if found.diverged[row]:
            return row, "failed: diverged"
        if not finite[row]:
            return row, f"rejected: {Code.NOT_FINITE.value}"
        try:
            self.aggregator.check(float(found.largest[row]), int(weights[row]))
            if reported:
                self.weighing.check(reported[row], self.state)
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
        reported: Sequence[Reported] = (),
    ) -> None:
        """Count the reports of these tasks, which arrived at these times and are not refused. ``staleness``,
        ``factors``: theirs, or nothing where no update is stale. ``reported``: what ``measure`` returned."""
        self.devices += tasks.device[rows]
        self.accepted.update(tasks.tier[rows])
        counted = weights_of(found.examples, self.max_weight)
        self.reports.append((counted, replace(found, updates=NO_DEVICES.updates, vectors={})))
        # Added one after the other, as if they came alone. sum() rounds differently from Python 3.12 on.
        self.useful = reduce(add, map(sub, times, tasks.began[rows]), self.useful)
        if staleness:
            self.given_in += tasks.round[rows]
            self.staleness += staleness
        values = self._values(found, factors)
        if reported:
            self.reported += reported
            own = [self.weighing.factor(each, self.state) for each in reported]
            factors = [a * b for a, b in zip(factors or [1.0] * len(own), own, strict=True)]
        if found.updates.shape[1] >= LARGE_UPDATE:  # at once: to collect them would only cost memory
            columns = weights.tolist(), found.largest.tolist(), factors or [1.0] * len(found)
            for row, (update, weight, largest, factor) in enumerate(zip(found.updates, *columns, strict=True)):
                held = self.kept.keep(update) if self.kept else ArrayUpdate(update)
                self.aggregator.add(self.aggregate, held, weight, largest, factor, values.select(row))
            return
        self.waiting.append(Waiting(weights, found.largest, factors, found.updates, values))
        self.bytes_waiting += found.updates.nbytes
        if self.bytes_waiting > MAX_BYTES_WAITING:
            self.add_up()

    def add_up(self) -> None:
        """Add the waiting updates to the aggregate."""
        if self.waiting:
            weights, largest, factors, updates, values = zip(*self.waiting, strict=True)
            columns = np.concatenate(weights), np.concatenate(largest), _column(factors)
            self.aggregator.add_many(self.aggregate, updates, *columns, concatenated(values))
        self.waiting, self.bytes_waiting = [], 0

    def _values(self, found: TrainedDevices, stale: Sequence[float]) -> Values:
        """Return what these devices say of the model's buffers. ``stale``: what their staleness leaves of it; empty:
        all of it."""
        rows = found.vectors[BUFFERS] if self.buffers else np.zeros((len(found), 0), np.float32)
        factors = np.array(stale) if stale else np.ones(len(found))
        if self.buffers and self.weighing.bound is not None:
            factors *= [self.weighing.factor_of_values(row, self.present, self.state) for row in rows]
        return Values(rows, factors, self.present)

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
            **self.weighing.summary(self.reported, self.causes, self.state),
            "causes": dict(sorted(self.causes.items())),
            "assigned": dict(sorted(self.assigned.items())),
            "accepted": dict(sorted(self.accepted.items())),
            "device_seconds": {"useful": self.useful, "wasted": self.wasted},
            "bytes": {"down": self.down, "up": self.up},
        }


def _column(factors: Sequence[Sequence[float]]) -> NDArray[np.float64] | None:
    """Return the factors of several reports in one column. None: there are none."""
    return np.array([*chain.from_iterable(factors)]) if factors[0] else None
