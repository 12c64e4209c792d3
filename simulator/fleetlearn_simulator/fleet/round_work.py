"""The work of one round: what devices train, what arrives of it, and what it cost.

Training cannot change what happens in a round but for a device that fails by it, so it is begun as soon as it is known
who will report: many devices together, on other processes meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import count, repeat
from math import fsum
from operator import add, sub
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_coordinator import aggregator
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random as draw
from fleetlearn_simulator.rows import rows_of
from fleetlearn_simulator.training.backend import Backend, Job
from fleetlearn_simulator.training.trained_devices import NONE, Outcomes, Take, joined

LOOK_AHEAD = 2**28
"""Bytes of updates that may be trained before their reports are due, and of those that wait to be added up."""
SPOILT = frozenset({"scaled", "flipped", "garbage"})
"""Updates that are not what training made."""


class Flight(NamedTuple):
    """A task that is out."""

    ends: float
    """When its update is at the coordinator, or it comes to nothing."""
    serial: int
    """Of tasks that end at the same time the first one given comes first."""
    device: int
    name: str
    """The device's, in the engine."""
    task: str
    round: int
    seed: int
    began: float
    cause: str
    """Why it comes to nothing, if it does."""
    steps: int | None
    """Steps that the device does; None: all."""
    corrupt: str
    factor: float
    tier: int


class Flights(NamedTuple):
    """Tasks that are out: columns of ``Flight``, for a round may have too many for an object each."""

    ends: list[float]
    serial: list[int]
    device: list[int]
    name: list[str]
    task: list[str]
    round: list[int]
    seed: list[int]
    began: list[float]
    cause: list[str]
    steps: list[int | None]
    corrupt: list[str]
    factor: list[float]
    tier: list[int]

    def row(self, row: int) -> Flight:
        return Flight._make(column[row] for column in self)

    def take(self, rows: Sequence[int]) -> Flights:
        """Those rows; itself, where they are all in order."""
        if list(rows) == list(range(len(self.task))):
            return self
        return Flights._make([column[row] for row in rows] for column in self)


def flights_of(rows: Iterable[Flight]) -> Flights:
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Flights._make(columns or ([] for _ in Flights._fields))


class Training:
    """A round's devices, trained from its model in batches."""

    def __init__(self, backend: Backend, model: Vector, earlier: Vector, seed: int) -> None:
        """``earlier``: the model before the round's; stale updates are of it."""
        self.backend, self.model, self.earlier, self.seed = backend, model, earlier, seed
        self.begun: dict[str, tuple[Take, int]] = {}
        """Task -> how to get what comes of it, and with which place."""
        self.started = False

    def most(self, room: int) -> int:
        """How many may be begun together, where the round has room for so many."""
        return max(1, min(room, LOOK_AHEAD // max(1, self.model.nbytes)))

    def begin(self, flights: Flights, room: int) -> None:
        """Begin with the first of these tasks of which reports will come, as many as the round has ``room`` for."""
        self.started = True
        due = [row for row, cause in enumerate(flights.cause) if not cause]
        if self.begun:
            due = [row for row in due if flights.task[row] not in self.begun]
        chosen = flights.take(due[: self.most(room)])
        if "stale" in chosen.corrupt:
            fresh = [row for row, corrupt in enumerate(chosen.corrupt) if corrupt != "stale"]
            stale = [row for row, corrupt in enumerate(chosen.corrupt) if corrupt == "stale"]
            self._begin(self.model, chosen.take(fresh))
            self._begin(self.earlier, chosen.take(stale))
        else:
            self._begin(self.model, chosen)

    def _begin(self, model: Vector, chosen: Flights) -> None:
        if chosen.task:
            take = self.backend.begin(model, rows_of(Job, chosen.device, chosen.seed, chosen.steps))
            if not SPOILT.isdisjoint(chosen.corrupt):
                take = partial(sent, self.seed, take, chosen)
            self.begun.update(zip(chosen.task, zip(repeat(take), count()), strict=False))

    def take(self, tasks: Sequence[str]) -> Outcomes:
        """What the device of the first of these tasks sends, and of as many after it as is there. Once only."""
        begun = [self.begun.pop(task) for task in tasks]
        first = begun[0][0]
        # Those that were not begun with it come another time.
        apart = next((place for place, (take, _) in enumerate(begun) if take is not first), len(begun))
        found = first([place for _, place in begun[:apart]])
        self.begun.update(zip(tasks[len(found) :], begun[len(found) :], strict=True))
        return found

    def put_back(self, tasks: Sequence[str], found: Outcomes) -> None:
        """To be taken another time: what was found of these."""
        self.begun.update(zip(tasks, zip(repeat(found.take), count()), strict=False))

    def drop(self, task: str) -> None:
        """Nobody will ask for what comes of it."""
        self.begun.pop(task, None)


def sent(seed: int, take: Take, flights: Flights, places: Sequence[int]) -> Outcomes:
    """What these send, some of whom spoil what came of it."""
    found = take(places)
    for row, place in enumerate(places[: len(found)]):
        if flights.corrupt[place] in SPOILT and not found.diverged[row]:
            with np.errstate(over="ignore"):  # what overflows is refused as it arrives
                found.updates[row] = update = corrupted(seed, flights.row(place), found.updates[row])
            found.largest[row] = np.abs(update).max()
    return found


def corrupted(seed: int, flight: Flight, update: Vector) -> Vector:
    factor = np.float32(flight.factor)
    match flight.corrupt:
        case "scaled":
            return factor * update
        case "flipped":
            return -factor * update
        case "garbage":
            noise = draw.generator(seed, "garbage", flight.device, flight.round)
            length = float(np.linalg.norm(update)) * float(factor)
            made = noise.standard_normal(update.size, np.float32)
            return made * np.float32(length / max(float(np.linalg.norm(made)), 1e-30))
    raise ValueError(f"corruption {flight.corrupt!r} is not known")


class Tally:
    """What arrived in a round, and what the round cost."""

    def __init__(self, size: int, max_weight: int, opened: float) -> None:
        """``size``: elements of an update."""
        self.max_weight, self.opened = max_weight, opened
        self.devices: list[int] = []
        """Those whose reports were accepted."""
        self.accepted: Counter[int] = Counter()
        """How many these are by tier."""
        self.reports: list[tuple[NDArray[np.int64], Outcomes]] = []
        """Their weights, and what they sent but for their updates."""
        self.total = aggregator.init(size)
        self.waiting: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float32]]] = []
        """Weights, largest elements and updates of the last reports, that are not in the sum yet."""
        self.held = 0
        """Bytes of these updates."""
        self.causes: Counter[str] = Counter()
        """Tasks that came to nothing, by what happened to the device."""
        self.assigned: Counter[int] = Counter()
        """Tasks by tier."""
        self.useful = self.wasted = 0.0
        """Device-seconds."""
        self.down = self.up = 0
        """Bytes."""

    def refuse(self, found: Outcomes) -> tuple[int, str] | None:
        """The first row that the coordinator does not take, and why; None: it takes them all."""
        weights, largest = np.minimum(found.examples, self.max_weight), found.largest
        well = ~found.diverged & aggregator.fits(largest, weights)
        if well.all():
            return None
        row = int(well.argmin())
        if found.diverged[row]:
            return row, "failed: diverged"
        return row, f"rejected: {(Code.OUT_OF_RANGE if np.isfinite(largest[row]) else Code.NOT_FINITE).value}"

    def accept(self, flights: Flights, rows: slice, found: Outcomes, times: Sequence[float]) -> None:
        """What came of these tasks, at these times; none that is to be refused."""
        weights = np.minimum(found.examples, self.max_weight)
        self.devices += flights.device[rows]
        self.accepted.update(flights.tier[rows])
        self.reports.append((weights, replace(found, updates=NONE.updates)))
        # One after the other, whatever comes together: sum() rounds in another way from Python 3.12 on.
        self.useful = reduce(add, map(sub, times, flights.began[rows]), self.useful)
        if found.updates.shape[1] >= aggregator.BLOCK:  # at once: many of them together would only cost memory
            for update, weight, largest in zip(found.updates, weights.tolist(), found.largest.tolist(), strict=True):
                aggregator.add(self.total, update, weight, largest)
            return
        self.waiting.append((weights, found.largest, found.updates))
        self.held += found.updates.nbytes
        if self.held > LOOK_AHEAD:
            self.add_up()

    def add_up(self) -> None:
        """Put the updates that wait for it into the sum."""
        if self.waiting:
            weights, largest, updates = zip(*self.waiting, strict=True)
            aggregator.add_many(self.total, updates, np.concatenate(weights), np.concatenate(largest))
        self.waiting, self.held = [], 0

    def complete(self) -> int:
        """How many of the reports are of a whole task."""
        return sum(int(found.complete.sum()) for _, found in self.reports)

    def means(self) -> dict[str, float]:
        """Of the accepted trainings, weighted as their updates are, as ``fleetlearn_coordinator.run.pooled``."""
        if not self.reports:
            return {}
        weights = np.concatenate([weights for weights, _ in self.reports])
        found = joined([found for _, found in self.reports])
        means = {}
        for name, values in {"loss": found.loss, **found.metrics}.items():
            there = np.isfinite(values)
            if there.any():
                products, total = (weights * values)[there].tolist(), int(weights[there].sum())
                means[name] = fsum(products) / total
        return means

    def summary(self) -> dict[str, Any]:
        """As rounds.jsonl has it."""
        return {
            "causes": dict(sorted(self.causes.items())),
            "assigned": dict(sorted(self.assigned.items())),
            "accepted": dict(sorted(self.accepted.items())),
            "device_seconds": {"useful": self.useful, "wasted": self.wasted},
            "bytes": {"down": self.down, "up": self.up},
        }
