"""The round engine: events in, commands out. It opens no socket, reads no clock and starts no task.

Time is handed to every event as seconds on one clock that never goes back; what to do next comes back as a list of
commands, to be carried out in order. The websocket server and the simulator are two drivers of it.

A device's task is a lease (lease_book.py). It ends by a report that counts, a failure, the device's loss, a stall,
or the end of the round. When rounds open and end is decided in participation.py, who is given a task in selection.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from math import inf
from typing import NamedTuple

from fleetlearn_protocol.errors import Code, ProtocolError

from fleetlearn_coordinator.rounds import stop_rules
from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    STALLED,
    STOPPED,
    SURPLUS,
    Abandon,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    Finish,
    Opened,
    Revived,
)
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.participation import SynchronousRounds
from fleetlearn_coordinator.rounds.random_draws import task_seeds
from fleetlearn_coordinator.rounds.reliability import DOUBT
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.settings import Phase, Settings

RESTART_GRACE = 90.0
"""Seconds that a lease waits for its device after the coordinator restarted: above a device's longest back-off."""


class Snapshot(NamedTuple):
    """An engine whose round is being committed. No lease runs then; the driver knows which devices are connected."""

    version: int
    round: int


@dataclass(slots=True)
class Engine:
    """The state of one training run. ``version`` counts committed rounds; ``round`` numbers all of them from 1."""

    settings: Settings
    prefix: str = "t"
    """Task ids begin with it. Each run has its own, so that an update cannot be taken for one of another run."""
    version: int = 0
    round: int = 0
    phase: Phase = Phase.GATHERING
    deadline: float = 0.0
    """When the open round ends."""
    book: LeaseBook = field(init=False)
    participation: SynchronousRounds = field(init=False)
    selection: Selection = field(init=False)
    _given: int = 0
    """How many leases were given in this round."""

    def __post_init__(self) -> None:
        self.book = LeaseBook(self.settings.grace, self.settings.stall)
        self.participation = SynchronousRounds(self.settings)
        self.selection = Selection(self.settings)

    # --- what a driver may ask ---

    @property
    def leases(self) -> Mapping[str, str]:
        """Device -> its running task."""
        return self.book.tasks

    @property
    def accepted(self) -> Mapping[str, str]:
        """Task -> device, of this round's reports that count."""
        return self.book.accepted

    def causes(self) -> dict[str, int]:
        """Return how many of this round's leases ended without a report that counts, by cause."""
        return self.book.causes()

    def waiting(self) -> int:
        """Return how many connected devices may be given a task."""
        return self.selection.waiting()

    def wanted_reports(self) -> int:
        """Return how many more reports the round takes."""
        return self.participation.wanted_reports(self.book)

    def wake_at(self) -> float | None:
        """Return when ``tick`` is next due, or None."""
        due = self.book.wake_at()
        at = self.deadline if self.phase is Phase.OPEN else self.participation.gather_until
        return at if due is None else due if at is None else min(due, at)

    def finish(self, change: float, metrics: Mapping[str, float]) -> Finish | None:
        """Return the stop rule that is met at this version, if one is. ``change`` and ``metrics`` are those of the last
        committed round, as for ``committed``."""
        return stop_rules.finish(self.settings, self.version, change, metrics)

    def wanted(self, device: str, task: str) -> bool:
        """Return whether an update that is on its way would still count."""
        return self.book.tasks.get(device) == task

    # --- the state, taken and brought back ---

    def snapshot(self) -> Snapshot:
        """Return the state between a round and its ``committed``. Raises ValueError at any other time."""
        self._check_committing()
        return Snapshot(self.version, self.round)

    @classmethod
    def from_snapshot(cls, settings: Settings, prefix: str, taken: Snapshot, connected: Iterable[str]) -> Engine:
        """Return an engine that goes on from a snapshot with these devices. The driver must call ``committed`` next.
        What the engine remembered about devices is forgotten, as after a restart."""
        engine = cls(settings, prefix, taken.version, taken.round, Phase.COMMITTING)
        engine.selection.resting.update(connected)
        return engine

    def restore(
        self,
        round: int,
        leases: Iterable[tuple[str, str]],
        accepted: Iterable[tuple[str, str]],
        dropped: Iterable[tuple[str, str, str]],
        now: float,
    ) -> list[Command]:
        """Go on with an open round after a restart: (task, device[, cause]) of its leases, as they were stored.

        The round gets its whole time again, and each running lease RESTART_GRACE for its device to return.
        """
        self.round, self.phase, self.deadline = round, Phase.OPEN, now + self.settings.deadline
        expires = now + max(self.settings.grace, RESTART_GRACE)
        book, selection = self.book, self.selection
        book.restore(leases, accepted, dropped, Terms(self.version, self.deadline), expires)
        for device, cause in book.dropped.values():
            if cause == STALLED:  # a restart forgets every other failure of devices
                selection.reliability.fail(device, DOUBT)
        ended = (device for device, cause in book.dropped.values() if cause != STOPPED)
        selection.had_turn = {*book.tasks, *book.accepted.values(), *ended}
        self._given = len(book.tasks) + len(book.accepted) + len(book.dropped)
        return self._advance(now)

    # --- events ---

    def check_in(self, device: str, held: str | None, now: float) -> list[Command]:
        """The device is connected; ``held`` is the task whose finished update it still has."""
        if self.phase is Phase.FINISHED:
            return []
        task = self.book.tasks.get(device)
        if task is not None:
            self.book.come_back(device, now)
            return [] if held == task else [*self._assign([device], [task], again=True)]
        if held is not None and (revived := self._revive(device, held)):
            self.book.watch(device, now)
            return revived
        if device in self.selection.had_turn:  # until the round is committed or abandoned
            self.selection.resting.add(device)
        else:
            self.selection.add(device)
        return self._advance(now)

    def disconnect(self, device: str, now: float) -> list[Command]:
        """The device's connection is gone. Its lease, if it has one, lives on for the grace period."""
        self.selection.remove(device)
        self.book.leave(device, now)
        return self._advance(now)

    def progress(self, device: str, task: str | None, what: str, amount: int, now: float) -> None:
        """The device came as far as ``amount`` in ``what``: its steps, its upload, or a content that it fetches.

        Only a larger amount than before is progress.
        """
        watch = self.book.watches.get(device)
        if watch is not None and watch.task == task:
            watch.progress(what, amount, self.settings.grace, now)

    def wait(self, device: str, now: float) -> None:
        """From now on it is the coordinator's turn to act: to grant the device's upload, or to send what it fetches.
        Meanwhile its lease, if it has one, does not stall."""
        if device in self.book.tasks:
            self.book.watch(device, now).begin_wait(now)

    def proceed(self, device: str, now: float) -> None:
        """It is the device's turn again. Harmless where it was."""
        watch = self.book.watches.get(device)
        if watch is not None:
            watch.end_wait(now)

    def announce(self, device: str, task: str, round: int) -> list[Command]:
        """The device offers the update of its task, which does not count yet (``accepted``). It may upload it.

        Raises ProtocolError (stale-round, unknown-task, not-wanted) and changes nothing.
        """
        commands = [] if device in self.book.tasks else self._revive(device, task)  # it trained on while it was away
        self._check(device, task, round)
        return commands

    def count_report(self, device: str, task: str, now: float) -> list[Command]:
        """The device's update is safe: its report counts. Call only where ``wanted``."""
        return self.count_reports([device], [task], now)

    def count_reports(self, devices: Sequence[str], tasks: Sequence[str], now: float) -> list[Command]:
        """The updates of these devices' tasks are safe, the last of them now: their reports count.

        Does what ``count_report`` would do for one after the other. Call only where each is ``wanted``, and for no more
        than ``wanted_reports``. Raises ValueError at the first that is not wanted; those before it count.
        """
        good = min(len(tasks), self.wanted_reports())
        held = list(map(self.book.tasks.get, devices))
        if held != list(tasks) or len({*devices}) < len(devices):
            rows = enumerate(zip(devices, tasks, held, strict=True))
            good = min(good, next(row for row, (device, task, own) in rows if own != task or device in devices[:row]))
        self.selection.resting.update(self.book.complete(devices[:good], tasks))
        self.selection.reliability.clear(devices[:good])
        if good < len(tasks):
            task, device = tasks[good], devices[good]
            raise ValueError(f"task {task} of {device} is not wanted in round {self.round} ({self.phase})")
        if self.book.tasks and self.wanted_reports() > 0:
            return []  # their slots stay taken, and the round goes on
        return self._advance(now)

    def end(self, device: str, task: str, cause: str, now: float) -> list[Command]:
        """The device failed its task or its update was rejected: its slot comes back. Harmless when repeated.

        A device that stops is given nothing more until it checks in again, in this round or later."""
        if not self.wanted(device, task):
            return []
        ended = self._drop(device, cause)
        if cause == STOPPED:
            self.selection.had_turn.discard(device)
            self.selection.resting.discard(device)
        return [ended, *self._advance(now)]

    def committed(self, now: float, *, change: float, metrics: Mapping[str, float]) -> list[Command]:
        """The driver made the round's model: ``change`` is the L2 norm of its difference, ``metrics`` the round's that
        may stop the run."""
        self._check_committing()
        self.version += 1
        finish = self.finish(change, metrics)
        self._end_round()
        if finish is not None:
            self.phase = Phase.FINISHED
            return [finish]
        return self._advance(now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        commands: list[Command] = []
        while (device := self.book.next_lost(now)) is not None:
            commands.append(self._drop(device, LOST))
        while (device := self.book.next_stalled(now)) is not None:
            task, seconds = self.book.tasks[device], f"{self.settings.stall:g} s"
            text = f"no step and no byte for {seconds} (round.stall); the slot is given to another device"
            commands += [self._drop(device, STALLED), CancelTask(device, task, Code.NOT_WANTED, text)]
        if self.phase is Phase.OPEN and now >= self.deadline:
            return commands + self._close(now, by_deadline=True)
        return commands + self._advance(now)

    # --- what follows from them ---

    def _advance(self, now: float) -> list[Command]:
        """Do what the state allows now: open a round, fill its slots, close it."""
        commands: list[Command] = []
        waiting, policy = self.selection, self.participation
        if self.phase is Phase.GATHERING and policy.may_open(len(waiting.idle), waiting.waiting(), now):
            self.round += 1
            self.phase, self.deadline = Phase.OPEN, now + self.settings.deadline
            commands.append(Opened(self.round))
        if self.phase is not Phase.OPEN:
            return commands
        if policy.wanted_reports(self.book) <= 0:
            return commands + self._close(now, by_deadline=False)
        free = policy.free_slots(self.book)
        if free > 0 and (waiting.idle or waiting.doubted):
            commands += self._give_tasks(free, now)
        if policy.nobody_is_left(self.book):
            return commands + self._close(now, by_deadline=False)
        return commands

    def _give_tasks(self, most: int, now: float) -> list[Assign]:
        first, begin = self._given + 1, f"{self.prefix}{self.round}-"
        devices = self.selection.choose(most, self.round, first, self.book)
        tasks = [f"{begin}{number}" for number in range(first, first + len(devices))]
        short = self.deadline - now < self.settings.deadline / 2
        self.book.give(devices, tasks, Terms(self.version, self.deadline, short), now)
        self._given += len(devices)
        return self._assign(devices, tasks, again=False)

    def _assign(self, devices: Sequence[str], tasks: Sequence[str], *, again: bool) -> list[Assign]:
        seeds = task_seeds(self.settings.seed, self.round, devices)
        rows = zip(devices, tasks, repeat(self.round), seeds, repeat(self.deadline), repeat(again), strict=False)
        return list(map(partial(tuple.__new__, Assign), rows))  # a third of the cost of calling the type

    def _revive(self, device: str, task: str) -> list[Command]:
        """Give a lost device that returns with its work done a slot again, if one is free."""
        if self.phase is not Phase.OPEN or self.participation.free_slots(self.book) <= 0:
            return []
        if not self.book.revive(device, task, Terms(self.version, self.deadline)):
            return []
        self.selection.resting.discard(device)
        return [Revived(device, task, self.round)]

    def _check(self, device: str, task: str, round: int) -> None:
        """Raise ProtocolError where the device does not hold the task, with the reason."""
        if self.wanted(device, task):
            return
        ended = self.book.dropped.get(task)
        if ended is not None and ended[0] == device:
            raise ProtocolError(Code.NOT_WANTED, f"task {task} ended ({ended[1]}); its slot was given back")
        if round != self.round or self.phase is not Phase.OPEN:
            at = f"round {self.round} is {self.phase}" if self.round else "no round has begun"
            raise ProtocolError(Code.STALE_ROUND, f"task {task} is of round {round}; {at}")
        raise ProtocolError(Code.UNKNOWN_TASK, f"task {task} was not given to device {device} in round {round}")

    def _drop(self, device: str, cause: str) -> Ended:
        task = self.book.tasks[device]
        if self.settings.stall < inf:
            self.selection.fail(device, cause, self.book.held_up(device, cause))
        self.selection.resting.update(self.book.drop(device, cause))
        return Ended(device, task, self.round, cause)

    def _close(self, now: float, *, by_deadline: bool) -> list[Command]:
        commands: list[Command] = []
        book, reports = self.book, len(self.book.accepted)
        what = "its deadline has passed" if by_deadline else f"it has its {reports} reports"
        for device in self.participation.ends_with_round(book):
            task, connected = book.tasks[device], device not in book.absent
            commands.append(self._drop(device, LOST if not connected else LATE if by_deadline else SURPLUS))
            if connected:
                text = f"round {self.round} is over: {what}"
                commands.append(CancelTask(device, task, Code.ROUND_OVER, text))
        if self.participation.may_commit(book):
            self.phase = Phase.COMMITTING
            return [*commands, Commit(self.round, self.causes())]
        text = f"{reports} reports at the deadline, {self.settings.minimum} are the minimum"
        commands.append(Abandon(self.round, self.causes(), text))
        self._end_round()
        return commands + self._advance(now)

    def _end_round(self) -> None:
        self.phase, self._given = Phase.GATHERING, 0
        self.selection.end_round(self.book.accepted.values())
        self.book.end_round()

    def _check_committing(self) -> None:
        if self.phase is not Phase.COMMITTING:
            raise ValueError(f"no round is being committed ({self.phase})")
