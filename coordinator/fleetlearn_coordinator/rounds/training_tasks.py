"""The tasks of the training rounds: how they are given and end, for all that keep account of them.

A device's task is a lease in the lease book. While it runs, the device is not there to be selected,
and stays connected (pace.py); when it ends, selection remembers how. This file tells them, and
makes the commands for the driver. When tasks are given and end is the engine's business
(engine.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from math import inf
from typing import NamedTuple

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.rounds.commands import (
    GIVEN_BACK,
    LATE,
    LOST,
    STALE,
    STALLED,
    SURPLUS,
    Assign,
    CancelTask,
    Command,
    Ended,
    Revived,
)
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.pace import Pace
from fleetlearn_coordinator.rounds.random_draws import task_seeds
from fleetlearn_coordinator.rounds.reliability import DOUBT, MAX_LEVEL
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.settings import Settings


class Restored(NamedTuple):
    """What an earlier process left, in its own order: rows of (task, device, ...)."""

    round: int | None
    """The open round, or None."""
    leases: Iterable[tuple[str, str, int | None]]
    """Task, device, and the version of the model that the task began from. None: the newest
    version."""
    accepted: Iterable[tuple[str, str]]
    """Task and device of each report that counts in the open round."""
    dropped: Iterable[tuple[str, str, str]]
    """Task, device and cause of each task that ended in the open round, or since the last one."""
    lost: Iterable[tuple[str, str, int | None]] = ()
    """Tasks that ended because their devices were lost, and may go on: the same columns as
    ``leases``."""
    early: Iterable[tuple[str, str]] = ()
    """Reports that count for rounds after the open one, or after the last one."""
    closed: bool = False
    """Whether the open round was closed: it takes no other report, and is to be committed."""
    regions: Mapping[str, str] = {}
    """Task -> its region, of the leases and of the reports that count in the open round. Empty:
    rounds have no regions."""
    over: Mapping[str, bool] = {}
    """Region whose part of the open round is over -> whether it is done."""
    goal: int | None = None
    """Of the open round, where that was a share of the devices."""


@dataclass(slots=True)
class TrainingTasks:
    """The tasks of the training rounds. A device has one at most."""

    settings: Settings
    prefix: str
    """Task ids begin with it."""
    book: LeaseBook
    selection: Selection
    pace: Pace | None
    given: int = 0
    """How many tasks were given in this round."""
    turns: Counter[str] = field(default_factory=Counter)
    """Asynchronous: device -> how many tasks it was given in this round."""

    def round_of(self, task: str) -> int:
        """Return the round in which a task was given."""
        return int(task[len(self.prefix) :].partition("-")[0])

    # --- rounds, and a restart ---

    def begin_round(self) -> None:
        """A round opens. Early reports count in it."""
        self.given = 0
        self.turns.clear()
        self.selection.end_turns(self.book.begin_round(self.settings.goal))

    def end_round(self, round: int, version: int) -> None:
        """A round is over: devices rest no longer. ``version`` is of the newest model."""
        self.selection.next_round = round + 1
        self.selection.end_round(self.book.accepted.values())
        self.book.end_round(version - self.settings.max_staleness)

    def restore(
        self,
        found: Restored,
        round: int,
        version: int,
        ends: Callable[[str | None], float],
        expires: float,
    ) -> None:
        """Go on after a restart with what was stored. ``round``: the open round, or the last one.
        ``ends``: returns when leases of a region end at the latest. ``expires``: until when each
        waits for its device."""

        def with_terms(
            rows: Iterable[tuple[str, str, int | None]],
        ) -> Iterable[tuple[str, str, Terms]]:
            for task, device, began in rows:
                region = found.regions.get(task)
                own = version if began is None else began
                yield task, device, Terms(own, ends(region), region=region)

        book, selection = self.book, self.selection
        book.restore(
            with_terms(found.leases), found.accepted, found.dropped, with_terms(found.lost), expires
        )
        book.early = dict(found.early)
        for device, cause in book.dropped.values():
            if cause == STALLED:  # a restart forgets every other failure of devices
                selection.reliability.fail(device, DOUBT)
        rows = [
            *book.accepted.items(),
            *((task, device) for task, (device, _) in book.dropped.items()),
        ]
        given = [
            *rows,
            *((task, device) for device, task in book.tasks.items()),
            *book.early.items(),
        ]
        given = [row for row in given if row[0].startswith(f"{self.prefix}{round}-")]
        self.given = len(given)
        if self.settings.asynchronous:
            self.turns.update(device for _, device in given)
        selection.next_round = round + (found.round is None)
        if found.round is not None:
            selection.go_on(device for _, device in given)
        ended = self._unforgiven()
        selection.failures.update(ended)
        if self.settings.one_task:
            ended = [device for device, _ in book.dropped.values()]
        selection.had_turn = {*ended, *(() if self.settings.asynchronous else book.tasks)}
        selection.end_turns(list(book.accepted.values()))

    def _unforgiven(self) -> list[str]:
        """Return the device of each task that ended without a report that counts, and after the
        device's last report that does: a report makes up for earlier failures."""
        book, last = self.book, dict[str, tuple[int, int]]()
        for task, device in chain(book.accepted.items(), book.early.items()):
            last[device] = max(self._order(task), last.get(device, (0, 0)))
        # Tasks of an open round are surplus only if the run finished during the round, and is
        # resumed now.
        return [
            device
            for task, (device, cause) in book.dropped.items()
            if cause not in (*GIVEN_BACK, SURPLUS) and self._order(task) > last.get(device, (0, 0))
        ]

    def _order(self, task: str) -> tuple[int, int]:
        """Return the round and the number in it of a task. Later tasks have larger ones."""
        return self.round_of(task), int(task.rpartition("-")[2].partition(".")[0])

    # --- how tasks are given ---

    def give(self, most: int, round: int, terms: Terms, now: float) -> list[Assign]:
        """Give tasks to up to ``most`` devices, of the region that the terms name."""
        devices = self.selection.choose(most, round, self.given + 1, self.book, terms.region)
        return self._give_to(devices, round, terms, now)

    def give_again(self, most: int, round: int, terms: Terms, now: float) -> list[Command]:
        """Give tasks to up to ``most`` devices, of the region that the terms name, that failed in
        this round and checked in again. A device that was lost gets back the task that it had: it
        may still be at it. Where tasks outlive their round it gets another, since the one that it
        had may be of an older model."""
        commands, others = list[Command](), list[str]()
        lost = {} if self.settings.outlive else self.book.lost
        had = {device: task for task, (device, own) in lost.items() if own.region == terms.region}
        for device in self.selection.choose_again(most, round, had, terms.region):
            task = had.get(device)
            if task is not None and self.book.revive(device, task, terms.ends):
                self.book.watch(device, now)
                commands += [Revived(device, task, round), *self.assign_again(device)]
            else:
                others.append(device)
        return [*commands, *self._give_to(others, round, terms, now)]

    def _give_to(
        self, devices: Sequence[str], round: int, terms: Terms, now: float
    ) -> list[Assign]:
        first, begin = self.given + 1, f"{self.prefix}{round}-"
        tasks = [f"{begin}{number}" for number in range(first, first + len(devices))]
        if self.settings.asynchronous:
            self.turns.update(devices)
            turns = map(self.turns.__getitem__, devices)
            tasks = [
                task if turn == 1 else f"{task}.{turn}"
                for task, turn in zip(tasks, turns, strict=True)
            ]
        self.book.give(devices, tasks, terms, now)
        self.given += len(devices)
        return self._assign(devices, tasks, round, terms.ends, terms.version, again=False)

    def assign_again(self, device: str) -> list[Assign]:
        """Return the command that tells a device of the task that it has already."""
        task, terms = self.book.tasks[device], self.book.terms[device]
        return self._assign(
            [device], [task], self.round_of(task), terms.ends, terms.version, again=True
        )

    def _assign(
        self,
        devices: Sequence[str],
        tasks: Sequence[str],
        round: int,
        ends: float,
        version: int,
        *,
        again: bool,
    ) -> list[Assign]:
        names = devices
        # a device that has two turns in a round trains in another order in the second
        if self.settings.asynchronous:
            names = [
                device + task.partition(".")[2] for device, task in zip(devices, tasks, strict=True)
            ]
        seeds = task_seeds(self.settings.seed, round, names)
        rows = zip(
            devices,
            tasks,
            repeat(round),
            seeds,
            repeat(ends),
            repeat(again),
            repeat(version),
            strict=False,
        )
        # a third of the cost of calling the type
        return list(map(partial(tuple.__new__, Assign), rows))

    def revive(self, device: str, task: str, ends: float) -> bool:
        """Let the task of a lost device go on until ``ends``. Returns False, and changes nothing,
        if the task did not end by the loss of this device, or too long ago."""
        if not self.book.revive(device, task, ends):
            return False
        self.selection.remove(device)  # it may wait for another task
        return True

    # --- how tasks end ---

    def give_up(self) -> list[Ended]:
        """End what may still count for a round to come: reports that came early, and tasks of lost
        devices that may go on."""
        book = self.book
        rows = {
            **book.early,
            **({task: row[0] for task, row in book.lost.items()} if self.settings.outlive else {}),
        }
        book.early.clear()
        book.keep_lost({})
        return [Ended(device, task, self.round_of(task), STALE) for task, device in rows.items()]

    def complete(self, devices: Sequence[str], tasks: Sequence[str], *, early: bool) -> None:
        """The reports of these devices' tasks count: in the open round or, ``early``, in a later
        one."""
        there = self.book.complete(devices, tasks, early=early)
        self.selection.report(devices, there)
        if self.pace is not None:
            self.pace.free(there)

    def leave_out(self, tasks: Iterable[str], cause: str, round: int) -> list[Ended]:
        """Reports of the closed round count no more. All others come before their devices, also
        those that are in doubt: a report that is left out each time clears its device of doubt
        before."""
        ended = list[Ended]()
        for task in tasks:
            device = self.book.accepted.pop(task)
            self.selection.reliability.fail(device, DOUBT * MAX_LEVEL)
            ended.append(Ended(device, task, round, cause))
        return ended

    def drop(self, device: str, cause: str, round: int) -> Ended:
        """End the device's task without a report that counts. The end counts for this round."""
        task = self.book.tasks[device]
        if self.settings.stall < inf:
            self.selection.fail(device, cause, self.book.held_up(device, cause))
        there = self.book.drop(device, cause)
        self.selection.rest(there)
        if self.pace is not None:
            self.pace.free(there)
        self.selection.end_turn(device)
        return Ended(device, task, round, cause)

    def cancel(self, device: str, cause: str, round: int, code: Code, text: str) -> list[Command]:
        """End the device's task as ``drop`` does, and tell the device if it is connected."""
        task, connected = self.book.tasks[device], device not in self.book.absent
        ended = self.drop(device, cause, round)
        return [ended, CancelTask(device, task, code, text)] if connected else [ended]

    def stop(self, device: str, cause: str, round: int) -> Ended:
        """End the task of a device that failed, stops or pauses. One that stops or pauses is given
        nothing more until it checks in again, in this round or later."""
        ended = self.drop(device, cause, round)
        if cause in GIVEN_BACK:
            if not self.settings.one_task:
                self.selection.had_turn.discard(device)
            del self.selection.failures[device]
            self.selection.resting.discard(device)
            if self.selection.freed is not None and device in self.selection.freed:
                self.selection.freed.remove(device)
        return ended

    def tick(self, round: int, now: float) -> list[Command]:
        """End the tasks of devices that were away for too long or made no progress, and those whose
        time is over."""
        commands = list[Command]()
        while (device := self.book.next_lost(now)) is not None:
            commands.append(self.drop(device, LOST, round))
        while (device := self.book.next_stalled(now)) is not None:
            seconds = f"{self.settings.stall:g} s"
            text = (
                f"no step and no byte for {seconds} (round.stall); the slot is given to another "
                "device"
            )
            commands += self.cancel(device, STALLED, round, Code.NOT_WANTED, text)
        while (device := self.book.next_expired(now)) is not None:
            text = "the task has had all the time that round.deadline gives it"
            commands += self.cancel(device, LATE, round, Code.ROUND_OVER, text)
        return commands

    def end_stale(self, round: int, version: int) -> list[Command]:
        """A newer model is there: end the tasks whose updates would be too stale for it."""
        commands = list[Command]()
        for device in self.book.too_old(version - self.settings.max_staleness):
            text = self.too_stale(
                self.book.tasks[device], version - self.book.terms[device].version
            )
            commands += self.cancel(device, STALE, round, Code.STALE_ROUND, text)
        return commands

    def too_stale(self, task: str, staleness: int) -> str:
        """Return why the task's update does not count."""
        most = self.settings.max_staleness
        return f"task {task} began from a model {staleness} versions ago; staleness.max is {most}"
