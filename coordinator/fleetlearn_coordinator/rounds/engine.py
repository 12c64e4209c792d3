"""The round engine: events in, commands out. It opens no socket, reads no clock and starts no task.

Time is handed to every event as seconds on one clock that never goes back; what to do next comes back as a list of
commands, to be carried out in order. The websocket server and the simulator are two drivers of it.

A device's task is a lease (lease_book.py). It ends by a report that counts, a failure, the device's loss, a stall, its
time, or the end of the round. When rounds open and end, and whether leases outlive them, is decided in
participation.py, who is given a task in selection.py, who stays connected in pace.py.
"""

from __future__ import annotations

from collections import Counter
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
    STALE,
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
from fleetlearn_coordinator.rounds.evaluation import Evaluations, SavedEvaluation
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.pace import Pace
from fleetlearn_coordinator.rounds.participation import Participation, participation_of
from fleetlearn_coordinator.rounds.random_draws import task_seeds
from fleetlearn_coordinator.rounds.reliability import DOUBT
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.settings import Phase, Settings
from fleetlearn_coordinator.rounds.strategies.ruled_selection import selection_of

RESTART_GRACE = 90.0
"""Seconds that a lease waits for its device after the coordinator restarted: above a device's longest back-off."""


class Snapshot(NamedTuple):
    """An engine whose round is being committed, where no lease outlives its round. So none runs then; the driver knows
    which devices are connected."""

    version: int
    round: int


class Restored(NamedTuple):
    """What an earlier process left, in its own order: rows of (task, device, ...)."""

    round: int | None
    """The open round, or None."""
    leases: Iterable[tuple[str, str, int | None]]
    """With the version of the model that the task began from, if it is known: by default the newest."""
    accepted: Iterable[tuple[str, str]]
    """Of the open round."""
    dropped: Iterable[tuple[str, str, str]]
    """With the cause. Of the open round, or since the last one."""
    lost: Iterable[tuple[str, str, int | None]] = ()
    """As ``leases``: tasks that ended because their devices were lost, and may go on."""
    early: Iterable[tuple[str, str]] = ()
    """Reports that count for rounds after the open one, or after the last one."""


class Counts(NamedTuple):
    """How a report counts that comes now."""

    round: int
    """The open round, or a later one if none is open."""
    staleness: int
    """How many versions that round's model is newer than the one that the task began from."""
    early: bool
    """Whether the round is not open yet."""


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
    """When the open round ends. Asynchronous: when it is next looked at."""
    book: LeaseBook = field(init=False)
    participation: Participation = field(init=False)
    selection: Selection = field(init=False)
    pace: Pace | None = field(init=False)
    evaluations: Evaluations = field(init=False)
    finishing: Finish | None = None
    """The stop rule that is met, while the run does not finish yet: a model is being made, or the last one is being
    measured."""
    _given: int = 0
    """How many leases were given in this round."""
    _turns: Counter[str] = field(default_factory=Counter)
    """Asynchronous: device -> how many leases it was given in this round."""

    def __post_init__(self) -> None:
        self.book = LeaseBook(self.settings.grace, self.settings.stall, self.settings.outlive)
        self.participation = participation_of(self.settings)
        self.selection = selection_of(self.settings)
        self.selection.next_round = self.round + 1
        self.pace = Pace(self.settings.pace, self.settings.seed) if self.settings.pace is not None else None
        rule, measuring = self.settings, LeaseBook(self.settings.grace)
        self.evaluations = Evaluations(
            rule.evaluation, rule.seed, self.prefix, self.selection, self.book, self.pace, book=measuring
        )

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

    def has_task(self, device: str) -> bool:
        """Return whether the device has a task, of a round or of an evaluation."""
        return device in self.book.tasks or device in self.evaluations.book.tasks

    def oldest_version(self) -> int | None:
        """Return the oldest model version that a device may still need, or None."""
        versions = (self.book.oldest_version(), self.evaluations.oldest_version())
        return min((version for version in versions if version is not None), default=None)

    @property
    def measures_last(self) -> bool:
        """Whether training is over and the run finishes when an evaluation is."""
        last = self.phase is Phase.FINISHED and self.finishing is not None
        return last and (self.evaluations.is_open or self.evaluations.due(self.version, last=True))

    def waiting(self) -> int:
        """Return how many connected devices may be given a task."""
        return self.selection.waiting()

    def wanted_reports(self) -> int:
        """Return how many more reports the round takes."""
        return self.participation.wanted_reports(self.book)

    def reports_together(self) -> int:
        """Return for how many reports ``count_reports`` may be called now."""
        if self.evaluations.chosen or (self.phase is not Phase.OPEN and self.settings.outlive):
            return 1
        return self.participation.reports_together(self.book)

    def wake_at(self) -> float | None:
        """Return when ``tick`` is next due, or None."""
        due = self.evaluations.wake_at() if self.evaluations.is_open else None
        if self.phase is Phase.FINISHED:
            return due
        lost = self.book.wake_at()
        at = self.deadline if self.phase is Phase.OPEN else self.participation.gather_until
        if lost is not None:
            at = lost if at is None else min(lost, at)
        return at if due is None else due if at is None else min(due, at)

    def finish(self, change: float, metrics: Mapping[str, float]) -> Finish | None:
        """Return the stop rule that is met at this version, if one is. ``change`` and ``metrics`` are those of the last
        committed round, as for ``committed``."""
        return stop_rules.finish(self.settings, self.version, change, metrics)

    def wanted(self, device: str, task: str) -> bool:
        """Return whether an update that is on its way would still count."""
        return self.book.tasks.get(device) == task and self.phase is not Phase.FINISHED

    def has_counted(self, device: str, task: str) -> bool:
        """Return whether the device's report of this task counts, for the open round or a later one."""
        return device in (self.book.accepted.get(task), self.book.early.get(task))

    def counts(self, device: str) -> Counts:
        """Return how the report of the device's task counts if it comes now. The device has a task."""
        version = self.book.terms[device].version
        if self.phase is Phase.OPEN:
            return Counts(self.round, self.version - version, False)
        ahead = len(self.book.early) // self.settings.goal  # whole rounds
        newest = self.version + (self.phase is Phase.COMMITTING)
        return Counts(self.round + 1 + ahead, newest + ahead - version, True)

    def round_of(self, task: str) -> int:
        """Return the round in which a task was given."""
        return int(task[len(self.prefix) :].partition("-")[0])

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

    def restore(self, found: Restored, now: float) -> list[Command]:
        """Go on after a restart with what was stored.

        An open round gets its whole time again, and each running lease RESTART_GRACE for its device to return.
        """
        self.deadline = now + self.settings.deadline
        if found.round is not None:
            self.round, self.phase = found.round, Phase.OPEN
        ends = self.participation.lease_ends(self.deadline, now)
        expires = now + max(self.settings.grace, RESTART_GRACE)

        def with_terms(rows: Iterable[tuple[str, str, int | None]]) -> Iterable[tuple[str, str, Terms]]:
            return ((row[0], row[1], Terms(self.version if row[2] is None else row[2], ends)) for row in rows)

        book, selection = self.book, self.selection
        book.restore(with_terms(found.leases), found.accepted, found.dropped, with_terms(found.lost), expires)
        book.early = dict(found.early)
        for device, cause in book.dropped.values():
            if cause == STALLED:  # a restart forgets every other failure of devices
                selection.reliability.fail(device, DOUBT)
        rows = [*book.accepted.items(), *((task, device) for task, (device, _) in book.dropped.items())]
        given = [*rows, *((task, device) for device, task in book.tasks.items()), *book.early.items()]
        given = [row for row in given if row[0].startswith(f"{self.prefix}{self.round}-")]
        self._given = len(given)
        if self.settings.asynchronous:
            self._turns.update(device for _, device in given)
        # Tasks of an open round are surplus only if the run finished during the round, and is resumed now.
        ended = (device for device, cause in book.dropped.values() if cause not in (STOPPED, SURPLUS))
        selection.next_round = self.round + (found.round is None)
        if found.round is not None:
            selection.go_on(device for _, device in given)
        selection.had_turn = {*ended, *(() if self.settings.asynchronous else book.tasks)}
        selection.end_turns(list(book.accepted.values()))
        return self._advance(now)

    def restore_evaluation(self, found: SavedEvaluation, now: float) -> None:
        """Go on with the evaluation that an earlier process opened last. ``begin`` follows."""
        self.evaluations.restore(found, now, now + max(self.settings.grace, RESTART_GRACE))

    def begin(self, now: float) -> list[Command]:
        """Begin after a start, when all is restored: an evaluation may be due."""
        return self._advance(now) + self._begin_evaluation(now)

    # --- events ---

    def check_in(self, device: str, held: str | None, now: float) -> list[Command]:
        """The device is connected; ``held`` is the task whose finished update it still has."""
        commands = self._check_in(device, held, now)
        if self.pace is None:
            return commands
        leaving = self.pace.check_in(
            device, self.book, self.evaluations.book, now,
            has_update=held is not None, may_serve=self.selection.may_serve(device),
        )  # fmt: skip
        for command in leaving:
            self.selection.remove(command.device)
            self.evaluations.leave(command.device, now)
        return [*leaving, *commands]

    def _check_in(self, device: str, held: str | None, now: float) -> list[Command]:
        measuring = self.evaluations.come_back(device, now)
        if measuring is not None:
            return measuring
        if self.phase is Phase.FINISHED:
            return self._advance(now)
        task = self.book.tasks.get(device)
        if task is not None:
            self.book.come_back(device, now)
            return [] if held == task else [*self._assign_again(device)]
        if held is not None and (revived := self._revive(device, held, now)):
            self.book.watch(device, now)
            return revived
        self.selection.come_back(device)
        return self._advance(now)

    def disconnect(self, device: str, now: float) -> list[Command]:
        """The device's connection is gone. Its lease, if it has one, lives on for the grace period."""
        self.selection.remove(device)
        self.book.leave(device, now)
        if self.pace is not None:
            self.pace.disconnect(device)
        self.evaluations.leave(device, now)
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

    def announce(self, device: str, task: str, round: int, now: float) -> list[Command]:
        """The device offers the update of its task, which does not count yet (``accepted``). It may upload it.

        Raises ProtocolError (stale-round, unknown-task, not-wanted) and changes nothing.
        """
        away = not self.has_task(device)  # it trained on while it was away
        commands = self._revive(device, task, now) if away else []
        self._check(device, task, round)
        self.check_staleness(device)
        return commands

    def check_staleness(self, device: str) -> None:
        """Raise ProtocolError (stale-round) if the update of the device's task is too stale to count now."""
        if self.settings.outlive and (staleness := self.counts(device).staleness) > self.settings.max_staleness:
            raise ProtocolError(Code.STALE_ROUND, self._too_stale(self.book.tasks[device], staleness))

    def count_report(self, device: str, task: str, now: float) -> list[Command]:
        """The device's update is safe: its report counts. Call only where ``wanted``."""
        return self.count_reports([device], [task], now)

    def count_reports(self, devices: Sequence[str], tasks: Sequence[str], now: float) -> list[Command]:
        """The updates of these devices' tasks are safe, the last of them now: their reports count.

        Does what ``count_report`` would do for one after the other. Call only where each is ``wanted``, and for no more
        than ``reports_together``. Raises ValueError at the first that is not wanted; those before it count.
        """
        early = self.phase is not Phase.OPEN and self.settings.outlive
        good = min(len(tasks), self.reports_together())
        held = list(map(self.book.tasks.get, devices))
        if held != list(tasks) or len({*devices}) < len(devices):
            rows = enumerate(zip(devices, tasks, held, strict=True))
            good = min(good, next(row for row, (device, task, own) in rows if own != task or device in devices[:row]))
        there = self.book.complete(devices[:good], tasks, early=early)
        self.selection.report(devices[:good], there)
        if self.pace is not None:
            self.pace.free(there)
        if good < len(tasks):
            task, device = tasks[good], devices[good]
            raise ValueError(f"task {task} of {device} is not wanted in round {self.round} ({self.phase})")
        goes_on = self.book.tasks and self.wanted_reports() > 0 and not self.settings.asynchronous
        if goes_on and not self.evaluations.chosen:
            return []  # their slots stay taken, and the round goes on
        return self._advance(now)

    def end(self, device: str, task: str, cause: str, now: float) -> list[Command]:
        """The device failed its task or its update was rejected: its slot comes back. Harmless when repeated.

        A device that stops is given nothing more until it checks in again, in this round or later."""
        if not self.wanted(device, task):
            measured = self.evaluations.end(device, task, cause)
            return measured and [*measured, *self._advance(now)]
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
        finish = self.finishing or self.finish(change, metrics)
        self._end_round()
        if finish is not None:
            return self._finish(finish, now)
        commands: list[Command] = []
        for device in self.book.too_old(self.version - self.settings.max_staleness):
            text = self._too_stale(self.book.tasks[device], self.version - self.book.terms[device].version)
            commands += self._drop_and_tell(device, STALE, Code.STALE_ROUND, text)
        commands += self._advance(now)
        return commands + self._begin_evaluation(now)

    def count_measurement(self, device: str, task: str, now: float) -> list[Command]:
        """What the device measured is safe: it counts. Call only where ``evaluations.wanted``."""
        self.evaluations.count(device, task)
        return self._advance(now)

    def request_evaluation(self, now: float) -> list[Command]:
        """Somebody asks for an evaluation of the newest model. It opens when the one before is over."""
        self.evaluations.requested = True
        return self._begin_evaluation(now)

    def measured(self, metrics: Mapping[str, float], now: float) -> list[Command]:
        """These metrics of a committed model, which may stop the run, were measured outside of its round. A round that
        is open then stays as it is, and goes on if the run is resumed with another stop rule."""
        finish = None if self.phase is Phase.FINISHED else self.finish(inf, metrics)
        if finish is None:
            return []
        if self.phase is Phase.COMMITTING:  # ``committed`` follows
            self.finishing = finish
            return []
        return self._finish(finish, now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        commands = self.evaluations.tick(now)
        if self.phase is Phase.FINISHED:
            return commands + self._advance(now)
        while (device := self.book.next_lost(now)) is not None:
            commands.append(self._drop(device, LOST))
        while (device := self.book.next_stalled(now)) is not None:
            seconds = f"{self.settings.stall:g} s"
            text = f"no step and no byte for {seconds} (round.stall); the slot is given to another device"
            commands += self._drop_and_tell(device, STALLED, Code.NOT_WANTED, text)
        while (device := self.book.next_expired(now)) is not None:
            text = "the task has had all the time that round.deadline gives it"
            commands += self._drop_and_tell(device, LATE, Code.ROUND_OVER, text)
        if self.phase is Phase.OPEN and now >= self.deadline:
            if not self.participation.goes_on(self.book):
                return commands + self._close(now, by_deadline=True)
            self.deadline = now + self.settings.deadline
            self.selection.end_rest()
        return commands + self._advance(now)

    # --- what follows from them ---

    def _advance(self, now: float) -> list[Command]:
        """Do what the state allows now: open a round, fill its slots, close it."""
        commands = self.evaluations.go_on(now)
        if self.phase is Phase.FINISHED:
            return commands + self._begin_evaluation(now)
        waiting, policy, book = self.selection, self.participation, self.book
        there = len(book.tasks) + len(book.early)
        if self.phase is Phase.GATHERING and policy.may_open(waiting.ready() + there, waiting.waiting() + there, now):
            self.round += 1
            self.phase, self.deadline = Phase.OPEN, now + self.settings.deadline
            self._given = 0
            self._turns.clear()
            commands.append(Opened(self.round))
            waiting.end_turns(book.begin_round(self.settings.goal))
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

    def _begin_evaluation(self, now: float) -> list[Command]:
        """Open the evaluation that is due, if one is. A run that is to finish does so after its last one."""
        last = self.phase is Phase.FINISHED
        if self.evaluations.due(self.version, last=last):
            return self.evaluations.open(self.version, now)
        if not last or self.finishing is None or self.evaluations.is_open:
            return []
        finish, self.finishing = self.finishing, None
        return [finish]

    def _finish(self, finish: Finish, now: float) -> list[Command]:
        """Training is over. If an evaluation is open or due, its devices are free from now on."""
        commands: list[Command] = []
        if self.evaluations.is_open or self.evaluations.due(self.version, last=True):
            for device in list(self.book.tasks):
                commands += self._drop_and_tell(device, SURPLUS, Code.ROUND_OVER, "training is over")
        self.phase, self.finishing = Phase.FINISHED, finish
        return commands + self._advance(now)

    def _give_tasks(self, most: int, now: float) -> list[Assign]:
        first, begin = self._given + 1, f"{self.prefix}{self.round}-"
        devices = self.selection.choose(most, self.round, first, self.book)
        tasks = [f"{begin}{number}" for number in range(first, first + len(devices))]
        short = False
        if self.settings.asynchronous:
            self._turns.update(devices)
            turns = map(self._turns.__getitem__, devices)
            tasks = [task if turn == 1 else f"{task}.{turn}" for task, turn in zip(tasks, turns, strict=True)]
        else:
            short = self.deadline - now < self.settings.deadline / 2
        ends = self.participation.lease_ends(self.deadline, now)
        self.book.give(devices, tasks, Terms(self.version, ends, short), now)
        self._given += len(devices)
        return self._assign(devices, tasks, self.round, ends, self.version, again=False)

    def _assign_again(self, device: str) -> list[Assign]:
        task, terms = self.book.tasks[device], self.book.terms[device]
        return self._assign([device], [task], self.round_of(task), terms.ends, terms.version, again=True)

    def _assign(
        self, devices: Sequence[str], tasks: Sequence[str], round: int, ends: float, version: int, *, again: bool
    ) -> list[Assign]:
        names = devices
        if self.settings.asynchronous:  # a device that has two turns in a round trains in another order in the second
            names = [device + task.partition(".")[2] for device, task in zip(devices, tasks, strict=True)]
        seeds = task_seeds(self.settings.seed, round, names)
        rows = zip(devices, tasks, repeat(round), seeds, repeat(ends), repeat(again), repeat(version), strict=False)
        return list(map(partial(tuple.__new__, Assign), rows))  # a third of the cost of calling the type

    def _revive(self, device: str, task: str, now: float) -> list[Command]:
        """Let the lease of a lost device that returns with its work done go on, if it may."""
        can = self.phase is Phase.OPEN or (self.settings.outlive and self.phase is not Phase.FINISHED)
        if not can or not self.participation.may_revive(self.book):
            return []
        if not self.book.revive(device, task, self.participation.lease_ends(self.deadline, now)):
            return []
        self.selection.remove(device)  # it may wait for another task
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
        there = self.book.drop(device, cause)
        self.selection.resting.update(there)
        if self.pace is not None:
            self.pace.free(there)
        self.selection.had_turn.add(device)
        return Ended(device, task, self.round + (self.phase is not Phase.OPEN), cause)

    def _drop_and_tell(self, device: str, cause: str, code: Code, text: str) -> list[Command]:
        task, connected = self.book.tasks[device], device not in self.book.absent
        ended = self._drop(device, cause)
        return [ended, CancelTask(device, task, code, text)] if connected else [ended]

    def _too_stale(self, task: str, staleness: int) -> str:
        most = self.settings.max_staleness
        return f"task {task} began from a model {staleness} versions ago; staleness.max is {most}"

    def _close(self, now: float, *, by_deadline: bool) -> list[Command]:
        commands: list[Command] = []
        book, reports = self.book, len(self.book.accepted)
        what = "its deadline has passed" if by_deadline else f"it has its {reports} reports"
        for device in self.participation.ends_with_round(book):
            cause = LOST if device in book.absent else LATE if by_deadline else SURPLUS
            commands += self._drop_and_tell(device, cause, Code.ROUND_OVER, f"round {self.round} is over: {what}")
        causes = self.causes()
        if self.settings.outlive:  # what ends from now on counts for the next round
            book.dropped.clear()
        if self.participation.may_commit(book):
            self.phase = Phase.COMMITTING
            return [*commands, Commit(self.round, causes)]
        text = f"{reports} reports at the deadline, {self.settings.minimum} are the minimum"
        commands.append(Abandon(self.round, causes, text))
        self._end_round()
        return commands + self._advance(now)

    def _end_round(self) -> None:
        self.phase = Phase.GATHERING
        self.selection.next_round = self.round + 1
        self.selection.end_round(self.book.accepted.values())
        self.book.end_round(self.version - self.settings.max_staleness)

    def _check_committing(self) -> None:
        if self.phase is not Phase.COMMITTING:
            raise ValueError(f"no round is being committed ({self.phase})")
