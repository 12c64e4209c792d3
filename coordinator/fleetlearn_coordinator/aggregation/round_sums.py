"""What a round's reports become, part by part: the aggregator's state of each part that devices
report.

The part ``update`` counts with its weight and its factor, together with the values of the part
``buffers``. Every other part, such as SCAFFOLD's ``control``, counts whole, with a weight of 1: it
tells by how much something changed that the device keeps, and the coordinator's sum of these
changes must be what the devices have together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.exact_mean import Sum, add_up
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Values, concatenated

Aggregators = Mapping[str, Aggregator[Any]]
"""Part -> its aggregator; that of ``update`` has ``buffers`` too."""
MAX_BYTES_WAITING = 2**28
"""Bytes of arrays that may wait to be added together."""


class WaitingPart(NamedTuple):
    """One part of n reports that is to be added."""

    elements: NDArray[Any]
    """As in ``ReportColumns.parts``."""
    weights: NDArray[np.int64]
    largest: NDArray[np.float64]
    factors: Sequence[float]
    """Empty: all are 1."""
    values: Values
    """Of the model's buffers."""


class RoundSums:
    """The aggregators' states with a round's reports. Arrays wait, and are added together: for
    small models that costs a fraction of adding one by one. What is read where it is, is added at
    once."""

    def __init__(self, aggregators: Aggregators, size: int) -> None:
        """Without reports, for a model of ``size`` elements."""
        self.aggregators = aggregators
        self.states = {part: aggregator.init(size) for part, aggregator in aggregators.items()}
        """Part -> its aggregator's state, without what waits."""
        self.waiting: dict[str, list[WaitingPart]] = {part: [] for part in aggregators}
        self.bytes_waiting = 0

    def check(self, largest: Mapping[str, float], weight: int) -> None:
        """Raise ProtocolError (not-finite, out-of-range) if a report must be refused. ``largest``:
        part -> the largest magnitude of its elements. ``weight``: of the update."""
        for part, aggregator in self.aggregators.items():
            aggregator.check(largest[part], weight if part == UPDATE else 1)

    def passes_check(self, reports: ReportColumns) -> NDArray[np.bool_]:
        """Return which of n reports ``check`` lets pass, (n,)."""
        ones = np.ones(len(reports), np.int64)
        passes = ones > 0
        for part, aggregator in self.aggregators.items():
            weights = reports.weights if part == UPDATE else ones
            passes &= aggregator.passes_check(reports.largest[part], weights)
        return passes

    def add(
        self, reports: ReportColumns, factors: Sequence[float] = (), values: Values = NO_VALUES
    ) -> None:
        """Add reports that have passed ``check``. ``factors``, ``values``: of the updates beside
        their weights, as in ``Aggregator.add_many``; no factors: all are 1."""
        for part in self.aggregators:
            if part not in reports.parts:
                continue
            if part == UPDATE:
                self._add_part(part, reports, reports.weights, factors, values)
            else:  # what is no update counts whole
                self._add_part(part, reports, np.ones(len(reports), np.int64), (), NO_VALUES)
        if self.bytes_waiting > MAX_BYTES_WAITING:
            self.add_waiting()

    def _add_part(
        self,
        part: str,
        reports: ReportColumns,
        weights: NDArray[np.int64],
        factors: Sequence[float],
        values: Values,
    ) -> None:
        elements, largest = reports.parts[part], reports.largest[part]
        if isinstance(elements, np.ndarray):
            self.waiting[part].append(WaitingPart(elements, weights, largest, factors, values))
            self.bytes_waiting += elements.nbytes
            return
        columns = elements, weights.tolist(), largest.tolist(), factors or [1.0] * len(reports)
        aggregator, state = self.aggregators[part], self.states[part]
        for row, (update, weight, most, factor) in enumerate(zip(*columns, strict=True)):
            own = values if values is NO_VALUES else values.select(row)
            aggregator.add(state, update, weight, most, factor, own)

    def add_waiting(self) -> None:
        """Add what waits."""
        for part, waiting in self.waiting.items():
            if waiting:
                elements, weights, largest, factors, values = zip(*waiting, strict=True)
                self.aggregators[part].add_many(
                    self.states[part],
                    elements,
                    np.concatenate(weights),
                    np.concatenate(largest),
                    np.array([*chain.from_iterable(factors)]) if factors[0] else None,
                    concatenated(values),
                )
            waiting.clear()
        self.bytes_waiting = 0

    def merge(self, other: RoundSums) -> None:
        """Add the reports of ``other``, whose aggregators are the same, as if they had been added
        here. ``other`` is not used afterwards. Raises ProtocolError (out-of-range), ValueError."""
        self.add_waiting()
        other.add_waiting()
        for part, aggregator in self.aggregators.items():
            aggregator.merge(self.states[part], other.states[part])

    def to_tensors(self) -> dict[str, NDArray[np.generic]]:
        """Return the states as flat tensors by name, which may share their memory. Nothing may
        wait."""
        return {
            _prefix(part) + name: tensor
            for part, aggregator in self.aggregators.items()
            for name, tensor in aggregator.to_tensors(self.states[part]).items()
        }

    def first_version_tensors(self) -> dict[str, NDArray[np.generic]]:
        """Return arrays like those that the first version saved these states as: it had sums for
        the mean alone. Empty: it had no such states."""
        if any(aggregator.init is not exact_mean.init for aggregator in self.aggregators.values()):
            return {}
        return {
            _prefix(part) + name: tensor
            for part, total in self.states.items()
            for name, tensor in exact_mean.first_version_tensors(total.size).items()
        }

    def load_tensors(self, tensors: Mapping[str, NDArray[np.generic]]) -> None:
        """Undo ``to_tensors``, in new memory. Raises ValueError if the tensors are of no such
        states."""
        for part, aggregator in self.aggregators.items():
            others = tuple(
                _prefix(other) for other in self.aggregators if other not in (part, UPDATE)
            )
            prefix = _prefix(part)
            mine = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if (name.startswith(prefix) if prefix else not name.startswith(others))
            }
            self.states[part] = aggregator.from_tensors(mine)


def _prefix(part: str) -> str:
    return "" if part == UPDATE else f"{part}."


def next_control(control: Vector, total: Sum, devices: int) -> Vector:
    """Return SCAFFOLD's next server control variate: c + sum(c_k' - c_k) / N, float32, shape (P,).

    Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (2020),
    arXiv 1910.06378, Algorithm 1, line 17. ``total`` has the round's changes of c_k, each with a
    weight of 1; ``devices`` is N."""
    after: Vector = (control + add_up(total) / devices).astype(np.float32)
    return after
