"""Evaluations: a sample of the connected devices measures one version of the model, beside the training rounds.

The sample is drawn when the evaluation opens, from all connected devices that can evaluate, whatever they do at that
moment: a device that trains measures when its task is over, before it is given another one. So devices that are seldom
free are in it like the others. A measurement is a lease, in a book of its own; a device has one lease at a time, of
either kind. A device that is lost, or fails, is replaced by another while there is one. It is asked again, once it has
checked in again, where the evaluation would not be valid without it (SECOND_CHANCES).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    CancelTask,
    Command,
    EvaluationClosed,
    EvaluationOpened,
    Measure,
    MeasurementEnded,
)
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.pace import Pace
from fleetlearn_coordinator.rounds.random_draws import shuffled
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES, Selection
from fleetlearn_coordinator.rounds.settings import EvaluationSettings


class SavedEvaluation(NamedTuple):
    """The evaluation that an earlier process opened last, with rows of (task, device, ...)."""

    number: int
    version: int
    is_open: bool
    leases: list[tuple[str, str]]
    accepted: list[tuple[str, str]]
    dropped: list[tuple[str, str, str]]
    """With the cause."""


@dataclass(slots=True)
class Evaluations:
    """The evaluations of a run. One at most is open. Times are seconds on the engine's clock."""

    settings: EvaluationSettings
    seed: int
    prefix: str
    """Task ids begin with it."""
    selection: Selection
    """Devices that measure are taken out of it."""
    training: LeaseBook
    """The leases of the training rounds."""
    pace: Pace | None
    book: LeaseBook
    """The leases of measurements, the accepted ones included until the next evaluation opens."""
    number: int = 0
    """Of the evaluation that was opened last; they are numbered from 1."""
    version: int = 0
    """The model version that it measures."""
    is_open: bool = False
    deadline: float = 0.0
    """When the open evaluation ends."""
    requested: bool = False
    """Whether somebody asked for an evaluation of the newest model."""
    able: set[str] = field(default_factory=set)
    """Connected devices that can evaluate."""
    chosen: set[str] = field(default_factory=set)
    """Connected devices of the sample that have not begun to measure."""
    _queue: deque[str] = field(default_factory=deque)
    """Devices that may take the place of others, in the order of the draw, then in the order in which they came."""
    _asked: set[str] = field(default_factory=set)
    """Devices that are in the queue or were taken from it: each measures once in an evaluation."""
    _again: dict[str, None] = field(default_factory=dict)
    """Connected devices that failed to measure, and have checked in again since, in the order in which they came."""
    _given: int = 0
    """How many leases were given in the open evaluation."""

    # --- what the engine asks ---

    def due(self, version: int, *, last: bool) -> bool:
        """Return whether an evaluation of this version, the newest, is to be opened. ``last``: no other will follow."""
        if self.is_open:
            return False
        every = self.settings.every
        scheduled = every > 0 and (version // every > self.version // every or (last and version > self.version))
        return scheduled or self.requested

    def wake_at(self) -> float:
        """Return when the open evaluation needs ``tick`` next."""
        lost = self.book.wake_at()
        return self.deadline if lost is None else min(lost, self.deadline)

    def wanted(self, device: str, task: str) -> bool:
        """Return whether the device's measurement would still count."""
        return self.book.tasks.get(device) == task

    def oldest_version(self) -> int | None:
        """Return the model version that is being measured, or None."""
        return self.version if self.is_open else None

    @property
    def has_next(self) -> bool:
        """Whether devices are to measure as soon as they are free."""
        return bool(self.chosen or self._again)

    # --- events ---

    def restore(self, found: SavedEvaluation, now: float, expires: float) -> None:
        """Go on with what an earlier process left. An open evaluation gets its whole time again; its leases wait for
        their devices until ``expires``."""
        self.number, self.version, self.is_open = found.number, found.version, found.is_open
        if not found.is_open:
            return
        self.deadline = now + self.settings.deadline
        terms = Terms(found.version, self.deadline)
        leases = [(task, device, terms) for task, device in found.leases]
        self.book.restore(leases, found.accepted, found.dropped, (), expires)
        rows = [*found.leases, *found.accepted, *(row[:2] for row in found.dropped)]
        self._asked, self._given = {device for _, device in rows}, len(rows)

    def join(self, device: str) -> None:
        """The device checks in, and can evaluate. Call before the engine's ``check_in``."""
        self.able.add(device)
        if self.is_open and device not in self._asked:
            self._asked.add(device)
            self._queue.append(device)
        elif self.is_open and 0 < self.failures(device) <= SECOND_CHANCES and not self._has_turn(device):
            self._again[device] = None

    def _has_turn(self, device: str) -> bool:
        """Return whether the device measures, is to measure, or has measured."""
        return device in self.book.tasks or device in self.chosen or device in self.book.accepted.values()

    def failures(self, device: str) -> int:
        """Return how many measurements of the device failed in the open evaluation."""
        return sum(owner == device for owner, _ in self.book.dropped.values())

    def come_back(self, device: str, now: float) -> list[Command] | None:
        """Tell a device that checks in of its measurement again. Returns None if it has none."""
        task = self.book.tasks.get(device)
        if task is None:
            return None
        self.book.come_back(device, now)
        return [Measure(device, task, self.number, self.version, self.deadline, again=True)]

    def leave(self, device: str, now: float) -> None:
        """The device's connection is gone. Its lease, if it has one, lives on for the grace period."""
        self.able.discard(device)
        self._again.pop(device, None)
        if device in self.chosen:
            self.chosen.discard(device)
            self._asked.discard(device)  # it has not begun: it may be chosen again
        self.book.leave(device, now)

    def count(self, device: str, task: str) -> None:
        """The device's measurement is safe: it counts. Call only where ``wanted``."""
        self._put_back(*self.book.complete([device], [task]))

    def end(self, device: str, task: str, cause: str) -> list[Command]:
        """The device failed to measure. Harmless when repeated."""
        return [self._drop(device, cause)] if self.wanted(device, task) else []

    def tick(self, now: float) -> list[Command]:
        """End the leases of devices that were away for too long. ``go_on`` does the rest."""
        commands: list[Command] = []
        while (device := self.book.next_lost(now)) is not None:
            commands.append(self._drop(device, LOST))
        return commands

    def open(self, version: int, now: float) -> list[Command]:
        """Open an evaluation of this version, the newest. Call only where ``due``."""
        self.number, self.version, self.is_open, self.requested = self.number + 1, version, True, False
        self.deadline, self._given = now + self.settings.deadline, 0
        self.book.end_round(version)
        self._queue, self._asked = deque(shuffled(self.seed, self.number, self.able)), set(self.able)
        return [EvaluationOpened(self.number, version), *self.go_on(now)]

    def go_on(self, now: float) -> list[Command]:
        """Do what the state allows now: fill the sample, let those of it measure that are free, close."""
        if not self.is_open:
            return []
        commands: list[Command] = []
        rule, book = self.settings, self.book
        while self._queue and len(book.accepted) + len(book.tasks) + len(self.chosen) < rule.devices:
            device = self._queue.popleft()
            if device in self.able:
                self.chosen.add(device)
            else:
                self._asked.discard(device)  # it left before its turn, and may come back
        while self._again and len(book.accepted) + len(book.tasks) + len(self.chosen) < rule.minimum:
            device = next(iter(self._again))
            del self._again[device]
            self.chosen.add(device)
        if self.chosen and (free := sorted(self.chosen - self.training.tasks.keys())):
            commands += self._give(free, now)
        enough = len(book.accepted) >= rule.devices
        nobody = not book.tasks and not self.chosen and not self._queue and len(book.accepted) >= rule.minimum
        return commands + self._close() if enough or nobody or now >= self.deadline else commands

    # --- what follows from them ---

    def _give(self, devices: list[str], now: float) -> list[Command]:
        first = self._given + 1
        tasks = [f"{self.prefix}e{self.number}-{number}" for number in range(first, first + len(devices))]
        for device in devices:
            self.selection.remove(device)
        self.chosen.difference_update(devices)
        self._given += len(devices)
        self.book.give(devices, tasks, Terms(self.version, self.deadline), now)
        return [
            Measure(device, task, self.number, self.version, self.deadline, again=False)
            for device, task in zip(devices, tasks, strict=True)
        ]

    def _drop(self, device: str, cause: str) -> MeasurementEnded:
        task = self.book.tasks[device]
        self._put_back(*self.book.drop(device, cause))
        return MeasurementEnded(device, task, cause)

    def _put_back(self, *devices: str) -> None:
        """These connected devices may train again."""
        self.selection.end_measuring(devices)
        if self.pace is not None:
            self.pace.measured(devices)

    def _close(self) -> list[Command]:
        commands: list[Command] = []
        for device, task in list(self.book.tasks.items()):
            there = device not in self.book.absent
            commands.append(self._drop(device, LATE if there else LOST))
            if there:
                text = f"evaluation {self.number} is over: its deadline has passed"
                commands.append(CancelTask(device, task, Code.ROUND_OVER, text))
        self.is_open = False
        self.chosen.clear()
        self._queue.clear()
        self._asked.clear()
        self._again.clear()
        valid = len(self.book.accepted) >= self.settings.minimum
        return [*commands, EvaluationClosed(self.number, self.version, self.book.causes(), valid)]
