"""The work of one round: what devices train, what arrives of it, and what it cost.

Training cannot change what happens in a round but for a device that fails by it, so it is begun as soon as it is known
who will report: many devices together, on other processes meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_coordinator import aggregator
from fleetlearn_coordinator.run import pooled
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator import draw
from fleetlearn_simulator.training import Backend, Job, Result

LOOK_AHEAD = 2**28
"""Bytes of updates that may be trained before their reports are due, and of those that wait to be added up."""


class Flight(NamedTuple):
    """A task that is out."""

    device: int
    name: str
    """The device's, in the engine."""
    task: str
    round: int
    seed: int
    began: float
    ends: float
    """When its update is at the coordinator, or it comes to nothing."""
    cause: str
    """Why it comes to nothing, if it does."""
    steps: int | None
    """Steps that the device does; None: all."""
    corrupt: str
    factor: float
    tier: int


class Training:
    """A round's devices, trained from its model in batches."""

    def __init__(self, backend: Backend, model: Vector, earlier: Vector, seed: int) -> None:
        """``earlier``: the model before the round's; stale updates are of it."""
        self.backend, self.model, self.earlier, self.seed = backend, model, earlier, seed
        self.begun: dict[str, tuple[Callable[[int], Result], int]] = {}
        """Task -> how to get its result, and with what."""
        self.started = False

    def begin(self, out: Iterable[Flight], room: int, first: Flight | None = None) -> None:
        """Begin with ``first`` and those whose reports are due next, as many as the round has ``room`` for."""
        self.started = True
        most = max(1, min(room, LOOK_AHEAD // max(1, self.model.nbytes)))
        due = [flight for flight in out if not flight.cause and flight.task not in self.begun]
        due = sorted(due, key=lambda flight: (flight is not first, flight.ends, flight.task))[:most]
        for stale in (False, True):
            chosen = [flight for flight in due if (flight.corrupt == "stale") is stale]
            if chosen:
                model = self.earlier if stale else self.model
                results = self.backend.begin(model, [Job(row.device, row.seed, row.steps) for row in chosen])
                self.begun.update((flight.task, (results, place)) for place, flight in enumerate(chosen))

    def result(self, flight: Flight) -> Result:
        """What the device sends. Once only."""
        results, place = self.begun.pop(flight.task)
        result = results(place)
        if not flight.corrupt or flight.corrupt == "stale" or result.failed:
            return result
        with np.errstate(over="ignore"):  # what overflows is refused as it arrives
            update = self._corrupted(flight, result.update)
        return result._replace(update=update, largest=float(np.abs(update).max()))

    def _corrupted(self, flight: Flight, update: Vector) -> Vector:
        factor = np.float32(flight.factor)
        match flight.corrupt:
            case "scaled":
                return factor * update
            case "flipped":
                return -factor * update
            case "garbage":
                noise = draw.generator(self.seed, "garbage", flight.device, flight.round)
                length = float(np.linalg.norm(update)) * float(factor)
                made = noise.standard_normal(update.size, np.float32)
                return made * np.float32(length / max(float(np.linalg.norm(made)), 1e-30))
        raise ValueError(f"corruption {flight.corrupt!r} is not known")


class Report(NamedTuple):
    """What was accepted of a device, beside its update."""

    device: int
    tier: int
    weight: int
    """Of the update in the mean, as the coordinator has it."""
    complete: bool
    loss: float
    metrics: dict[str, float]


class Tally:
    """What arrived in a round, and what the round cost."""

    def __init__(self, size: int, max_weight: int, opened: float) -> None:
        """``size``: elements of an update."""
        self.max_weight, self.opened = max_weight, opened
        self.reports: list[Report] = []
        self.total = aggregator.init(size)
        self.waiting: list[Vector] = []
        """Updates of the last reports, that are not in the sum yet."""
        self.held = 0
        """Their bytes."""
        self.causes: Counter[str] = Counter()
        """Tasks that came to nothing, by what happened to the device."""
        self.assigned: Counter[int] = Counter()
        """Tasks by tier."""
        self.useful = self.wasted = 0.0
        """Device-seconds."""
        self.down = self.up = 0
        """Bytes."""

    def accept(self, flight: Flight, result: Result, now: float) -> None:
        """Raises ProtocolError where the update is not one that the coordinator takes."""
        if not isfinite(result.largest):
            raise ProtocolError(Code.NOT_FINITE, "an element of the update is not finite")
        weight = min(result.examples, self.max_weight)
        aggregator.check(result.largest, weight)
        self.reports.append(Report(flight.device, flight.tier, weight, result.complete, result.loss, result.metrics))
        self.useful += now - flight.began
        if len(result.update) >= aggregator.BLOCK:  # at once: many of them together would only cost memory
            aggregator.add(self.total, result.update, weight, result.largest)
            return
        self.waiting.append(result.update)
        self.held += result.update.nbytes
        if self.held > LOOK_AHEAD:
            self.add_up()

    def add_up(self) -> None:
        """Put the updates that wait for it into the sum."""
        if self.waiting:
            weights = np.array([report.weight for report in self.reports[-len(self.waiting) :]], np.int64)
            aggregator.add_many(self.total, np.stack(self.waiting), weights)
        self.waiting, self.held = [], 0

    def means(self) -> dict[str, float]:
        """Of the accepted trainings, weighted as their updates are."""
        rows = []
        for report in self.reports:
            weight = report.weight
            sums = {"loss": weight * report.loss}
            for name, value in report.metrics.items():
                sums[name] = weight * value
            rows.append((weight, sums))
        return pooled(rows)

    def summary(self) -> dict[str, Any]:
        """As rounds.jsonl has it."""
        return {
            "causes": dict(sorted(self.causes.items())),
            "assigned": dict(sorted(self.assigned.items())),
            "accepted": dict(sorted(Counter(report.tier for report in self.reports).items())),
            "device_seconds": {"useful": self.useful, "wasted": self.wasted},
            "bytes": {"down": self.down, "up": self.up},
        }
