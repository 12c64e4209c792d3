"""The round engine: events in, commands out. It opens no socket, reads no clock and starts no task.

Time is handed to every event as seconds on one clock that never goes back; what to do next comes
back as a list of commands, to be carried out in order. The websocket server and the simulator are
two drivers of it.

A device's task is a lease (lease_book.py). It ends by a report that counts, a failure, the device's
loss, a stall, its time, or the end of the round (training_tasks.py). When rounds open and end, and
whether leases outlive them, is decided in participation.py, who is given a task in selection.py,
who stays connected in pace.py. What follows from an event is in round_course.py, and what a driver
may ask in round_state.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.rounds.commands import (
    STALE,
    Abandon,
    Command,
    Commit,
    Finish,
)
from fleetlearn_coordinator.rounds.exchange import SavedExchange
from fleetlearn_coordinator.rounds.participation import SynchronousRounds
from fleetlearn_coordinator.rounds.round_course import RoundCourse
from fleetlearn_coordinator.rounds.settings import Phase, Settings
from fleetlearn_coordinator.rounds.training_tasks import Restored

RESTART_GRACE = 90.0
"""Seconds that a lease waits for its device after the coordinator restarted: above a device's
longest back-off."""


class Snapshot(NamedTuple):
    """An engine whose round is being committed. The driver knows which devices are connected."""

    version: int
    round: int
    book: dict[str, Any] | None = None
    """Tasks that go on, as ``LeaseBook.snapshot`` returned them. None: no task does."""
    pace: dict[str, Any] | None = None
    """What ``Pace.snapshot`` returned."""
    exchanges: Mapping[str, dict[str, Any]] = {}
    """Kind -> what ``ExchangeSeries.snapshot`` returned."""
    releases: int = 0
    limits: list[Any] | None = None
    """What ``ParticipationLimits.snapshot`` returned. None: participation is not limited."""
    measured: Sequence[tuple[int, float]] = ()
    """Versions and their values of the metric whose improvement is watched, in order."""
    goal: int | None = None
    """Of the round, where that was a share of the devices."""
    fleet_is_there: bool = False
    """As in ``SynchronousRounds``."""


@dataclass(slots=True)
class Engine(RoundCourse):
    """The state of a training run's rounds, and the events that change it."""

    # --- the state, taken and brought back ---

    def snapshot(self) -> Snapshot:
        """Return the state between a round and its ``committed``, as plain values. Raises
        ValueError at any other time."""
        self._check_committing()
        return Snapshot(
            self.version,
            self.round,
            self.book.snapshot(),
            None if self.pace is None else self.pace.snapshot(),
            {kind: series.snapshot() for kind, series in self.exchanges.items()},
            self.releases,
            None if self.limits is None else self.limits.snapshot(),
            [*self.improvement.values.items()],
            self.settings.own_goal,
            isinstance(self.participation, SynchronousRounds) and self.participation.fleet_is_there,
        )

    @classmethod
    def from_snapshot(
        cls, settings: Settings, prefix: str, taken: Snapshot, connected: Iterable[str]
    ) -> Engine:
        """Return an engine that goes on from a snapshot with these devices. The driver must say who
        is able to answer exchanges (``ExchangeSeries.able``), and call ``committed`` next. What the
        engine remembered about devices that failed is forgotten, as after a restart."""
        engine = cls(settings, prefix, taken.version, taken.round, taken.releases, Phase.COMMITTING)
        engine._take_up_goal(taken.goal)
        if isinstance(engine.participation, SynchronousRounds):
            engine.participation.fleet_is_there = taken.fleet_is_there
        if taken.book is not None:
            engine.book.take_up(taken.book)
        if engine.pace is not None and taken.pace is not None:
            engine.pace.take_up(taken.pace)
        for kind, saved in taken.exchanges.items():
            engine.exchanges[kind].take_up(saved)
        if engine.limits is not None and taken.limits is not None:
            engine.limits.take_up(taken.limits)
        for version, value in taken.measured:
            engine.improvement.note(version, value)
        engine.selection.resting.update(
            device for device in connected if not engine.has_task(device)
        )
        return engine

    def restore(self, found: Restored, now: float) -> list[Command]:
        """Go on after a restart with what was stored.

        An open round gets its whole time again, and each running lease RESTART_GRACE for its device
        to return.
        """
        if found.round is not None:
            self.round, self.phase = found.round, Phase.OPEN
            self._take_up_goal(found.goal)
        self.deadline = self._round_deadline(now)
        ends = partial(self.participation.lease_ends, self.deadline, now)
        expires = now + max(self.settings.grace, RESTART_GRACE)
        self.tasks.restore(found, self.round, self.version, ends, expires)
        if self.regional is not None:
            self.regional.book.count_restored(found.regions, found.over)
        self._restore_limits()
        beside = self.round_exchanges
        if beside is not None and found.round is not None and beside.closes(self.round):
            self.phase, beside.commit = Phase.COMMITTING, Commit(self.round, self.causes())
        if found.closed:
            return self._restore_closed(now)
        return self._advance(now)

    def _restore_closed(self, now: float) -> list[Command]:
        """The open round was closed by an earlier process: commit it with the reports that it
        has."""
        self.phase = Phase.COMMITTING
        return [*self._advance(now), Commit(self.round, self.causes())]

    def _restore_limits(self) -> None:
        """Count the reports that the book was restored with."""
        if self.limits is None:
            return
        first = self.limits.release
        for device in self.book.accepted.values():
            self.limits.count(device, first)
        first += self.phase is Phase.OPEN  # early reports are for the rounds after the open one
        for place, device in enumerate(self.book.early.values()):
            self.limits.count(device, first + place // self.settings.largest_goal)

    def restore_exchange(self, kind: str, found: SavedExchange, now: float) -> None:
        """Go on with the exchange of this kind that an earlier process opened last. ``begin``
        follows."""
        self.exchanges[kind].restore(found, now, now + max(self.settings.grace, RESTART_GRACE))

    def begin(self, now: float) -> list[Command]:
        """Begin after a start, when all is restored: an exchange may be due."""
        return self._advance(now) + self._begin_exchanges(now)

    # --- events ---

    def check_in(self, device: str, held: str | None, now: float) -> list[Command]:
        """The device is connected; ``held`` is the task whose finished update it still has."""
        commands = self._check_in(device, held, now)
        if self.pace is None:
            return commands
        leaving = self.pace.check_in(
            device, self.books, now,
            has_update=held is not None, may_serve=self.selection.may_serve(device),
            not_before=None if self.limits is None else self.limits.seconds_until,
        )  # fmt: skip
        for command in leaving:
            self.selection.remove(command.device)
            self._leave_exchanges(command.device, now)
        return [*leaving, *commands]

    def _check_in(self, device: str, held: str | None, now: float) -> list[Command]:
        for series in self.exchanges.values():
            asked = series.come_back(device, now)
            if asked is not None:
                return asked
        if self.phase is Phase.FINISHED:
            return self._advance(now)
        task = self.book.tasks.get(device)
        if task is not None:
            self.book.come_back(device, now)
            return [] if held == task else [*self.tasks.assign_again(device)]
        if held is not None and (revived := self._revive(device, held, now)):
            self.book.watch(device, now)
            return revived
        self.selection.come_back(device)
        return self._advance(now)

    def disconnect(self, device: str, now: float) -> list[Command]:
        """The device's connection is gone. Its lease, if it has one, lives on for the grace
        period."""
        self.selection.remove(device)
        self.book.leave(device, now)
        if self.pace is not None:
            self.pace.disconnect(device)
        self._leave_exchanges(device, now)
        return self._advance(now)

    def withdraw(self, device: str, now: float) -> None:
        """The connected device, which has no task here, serves another run from now on."""
        self.selection.remove(device)
        self._leave_exchanges(device, now)
        if self.pace is not None:
            self.pace.withdraw(device)

    def progress(self, device: str, task: str | None, what: str, amount: int, now: float) -> None:
        """The device came as far as ``amount`` in ``what``: its steps, its upload, or a content
        that it fetches.

        Only a larger amount than before is progress.
        """
        watch = self.book.watches.get(device)
        if watch is not None and watch.task == task:
            watch.progress(what, amount, self.settings.grace, now)

    def wait(self, device: str, now: float) -> None:
        """From now on it is the coordinator's turn to act: to grant the device's upload, or to send
        what it fetches. Meanwhile its lease, if it has one, does not stall."""
        if device in self.book.tasks:
            self.book.watch(device, now).begin_wait(now)

    def proceed(self, device: str, now: float) -> None:
        """It is the device's turn again. Harmless where it was."""
        watch = self.book.watches.get(device)
        if watch is not None:
            watch.end_wait(now)

    def announce(self, device: str, task: str, round: int, now: float) -> list[Command]:
        """The device offers the update of its task, which does not count yet (``accepted``). It may
        upload it.

        Raises ProtocolError (stale-round, unknown-task, not-wanted) and changes nothing. It is a
        PrivacyLimitError where the device takes part too often: the caller ends the task.
        """
        away = not self.has_task(device)  # it trained on while it was away
        if away and self.book.lost.get(task, ("",))[0] == device:
            self.check_participation(device)  # it would not be revived
        commands = self._revive(device, task, now) if away else []
        self.check_wanted(device, task, round)
        self.check_staleness(device)
        self.check_participation(device)
        return commands

    def count_report(self, device: str, task: str, now: float) -> list[Command]:
        """The device's update is safe: its report counts. Call only where ``takes_report``
        holds."""
        return self.count_reports([device], [task], now)

    def count_reports(
        self, devices: Sequence[str], tasks: Sequence[str], now: float
    ) -> list[Command]:
        """The updates of these devices' tasks are safe, the last of them now: their reports count.

        Does what ``count_report`` would do for one after the other. Call only where
        ``takes_report`` holds for each, and for no more than ``reports_together``. Raises
        ValueError at the first report for which it does not; those before it count.
        """
        # Where leases outlive their round, a report between two rounds counts for the next one.
        early = self.phase is not Phase.OPEN and self.settings.outlive
        good = min(self.reports_together(), self._held_tasks(devices, tasks))
        if self.limits is not None:
            release = self.release_of_reports()
            good = next((row for row in range(good) if not self.may_report(devices[row])), good)
            for device in devices[:good]:
                self.limits.count(device, release)
        self.tasks.complete(devices[:good], tasks, early=early)
        if good < len(tasks):
            device, task = devices[good], tasks[good]
            raise ValueError(
                f"task {task} of {device} is not wanted in round {self.round} ({self.phase})"
            )
        if self.participation.only_waits(self.book) and not self.asks_next():
            return []  # their slots stay taken: no device can be given a task
        return self._advance(now)

    def _held_tasks(self, devices: Sequence[str], tasks: Sequence[str]) -> int:
        """Return how many of these tasks, from the first on, are held by their devices."""
        seen = set[str]()
        for row, (device, task) in enumerate(zip(devices, tasks, strict=True)):
            # A device has one task at a time: its second report here cannot count.
            if device in seen or self.book.tasks.get(device) != task:
                return row
            seen.add(device)
        return len(tasks)

    def end(self, device: str, task: str, cause: str, now: float) -> list[Command]:
        """The device failed its task or its update was rejected: its slot comes back. Harmless when
        repeated.

        A device that stops is given nothing more until it checks in again, in this round or
        later."""
        if not self.takes_report(device, task):
            series = self.exchange_of(device, task)
            return [] if series is None else [*series.end(device, task, cause), *self._advance(now)]
        return [self.tasks.stop(device, cause, self.round_for_ended_tasks), *self._advance(now)]

    def committed(
        self,
        now: float,
        *,
        change: float,
        metrics: Mapping[str, float],
        done: Finish | None = None,
    ) -> list[Command]:
        """The driver made the round's model: ``change`` is the L2 norm of its difference,
        ``metrics`` the round's that may stop the run. They are of the model with which the round
        began, the version before. ``done``: why the driver wants no further round; None: it does
        not know a reason."""
        self._check_committing()
        self.version += 1
        self.selection.begin_model()
        self.releases += 1
        self.note_measured(metrics, self.version - 1)
        finish = self.finishing or done or self.finish(change, metrics, self.version - 1)
        if self.limits is not None:
            self.limits.commit(now)
        self._end_round()
        if finish is not None:
            return self._finish(finish, now)
        commands = self.tasks.end_stale(self.round_for_ended_tasks, self.version)
        return commands + self._advance(now) + self._begin_exchanges(now)

    def leave_out(self, tasks: Collection[str], cause: str) -> list[Command]:
        """Reports of the round that is being committed count no more. The driver counts the cause
        in the round's summary. Below ``may_go_on`` it calls ``give_up_commit``."""
        self._check_committing()
        devices = [self.book.accepted[task] for task in tasks]
        if self.limits is not None:
            self.limits.take_back(devices)
        self.left_out += devices
        return [*self.tasks.leave_out(tasks, cause, self.round)]

    def spend(self, devices: Collection[str]) -> None:
        """A sum of masked updates was made that has these devices' updates of the newest model, and
        no model was made of it: they may have no other task before there is another model."""
        self.selection.spend(devices)

    def may_go_on(self) -> bool:
        """Return whether the round that is being committed still has its minimum of reports."""
        return self.participation.may_commit(self.book)

    def give_up_commit(self, text: str, dropped: dict[str, int], now: float) -> list[Command]:
        """The driver cannot make the model of the round that is being committed. ``text``: why.
        ``dropped``: as in ``Abandon``."""
        self._check_committing()
        return self._abandon(text, dropped, now)

    def roll_back(self) -> list[Command]:
        """The driver makes an earlier model the next version: give up the open round, or the one
        that is about to be committed, the tasks that run, and all reports that came early.
        ``go_on_from_model`` follows when the model is there."""
        text, commands = "the run goes back to an earlier model", list[Command]()
        for device in list(self.book.tasks):
            commands += self.tasks.cancel(
                device, STALE, self.round_for_ended_tasks, Code.STALE_ROUND, text
            )
        commands += self.tasks.give_up()
        if self.round_exchanges is not None:
            commands += self.round_exchanges.give_up(text)
        if self.phase in (Phase.OPEN, Phase.COMMITTING):
            commands.append(Abandon(self.round, self.causes(), text))
            self._count_abandoned()
        self.book.dropped.clear()
        self.finishing = None
        self.improvement.clear()
        self.version += 1
        self.selection.begin_model()
        self._end_round([] if self.limits is None else self.limits.give_up())
        return commands

    def go_on_from_model(self, now: float) -> list[Command]:
        """The earlier model is there. Of the stop rules, the one on the number of versions alone
        may be met by it."""
        return self.measured({}, self.version, now) or self.begin(now)

    def count_answer(self, device: str, task: str, now: float) -> list[Command]:
        """What the device answered in an exchange is safe: it counts. Raises ValueError where the
        device does not hold the task."""
        series = self.exchange_of(device, task)
        if series is None:
            raise ValueError(f"task {task} of {device} is not wanted in any exchange")
        series.count(device, task)
        return self._advance(now)

    def request_exchange(self, kind: str, now: float) -> list[Command]:
        """Somebody asks for an exchange about the newest model. It opens when the one before is
        over."""
        self.exchanges[kind].requested = True
        return self._begin_exchanges(now)

    def measured(self, metrics: Mapping[str, float], version: int, now: float) -> list[Command]:
        """These metrics of the model of this version, which may stop the run, were measured outside
        of its round. A round that is open then stays as it is, and goes on if the run is resumed
        with another stop rule."""
        self.note_measured(metrics, version)
        finish = None if self.phase is Phase.FINISHED else self.finish(inf, metrics, version)
        if finish is None:
            return []
        if self.phase is Phase.COMMITTING:  # ``committed`` follows
            self.finishing = finish
            return []
        return self._finish(finish, now)

    def note_measured(self, metrics: Mapping[str, float], version: int) -> None:
        """These metrics of the model of this version were measured, now or by an earlier
        process."""
        metric = self.settings.metric
        if self.settings.patience is not None and metric is not None and metric in metrics:
            self.improvement.note(version, metrics[metric])

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        commands = [command for series in self.exchanges.values() for command in series.tick(now)]
        if self.phase is Phase.FINISHED:
            return commands + self._advance(now)
        commands += self.tasks.tick(self.round_for_ended_tasks, now)
        if self.phase is Phase.OPEN and now >= self.deadline:
            if not self.participation.goes_on(self.book):
                return commands + self._close(now, by_deadline=True)
            self.deadline = now + self.settings.deadline
            self.selection.end_rest()
        return commands + self._advance(now)
