"""What follows from an engine's events: rounds open, give tasks, wait for their exchanges, and end
with a commit or without a model; training is over.

``Engine`` (engine.py) has the events. When rounds open and end is decided in participation.py, what
becomes of tasks in training_tasks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    SURPLUS,
    Abandon,
    Command,
    Commit,
    Finish,
    Opened,
    RegionEnded,
    Revived,
)
from fleetlearn_coordinator.rounds.lease_book import Terms
from fleetlearn_coordinator.rounds.regional_rounds import IN_WORDS, End, RegionalRounds
from fleetlearn_coordinator.rounds.round_state import EngineState
from fleetlearn_coordinator.rounds.settings import Phase, RoundSize


@dataclass(slots=True)
class RoundCourse(EngineState):
    """The course of a run's rounds."""

    def _advance(self, now: float) -> list[Command]:
        """Do what the state allows now: open a round, fill its slots, close it."""
        commands = list[Command]()
        if not self.paused:
            for series in self.exchanges.values():
                commands += series.go_on(now)
        if self.phase is Phase.FINISHED:
            return commands + self._begin_exchanges(now)
        if self.phase is Phase.COMMITTING:
            commands += self._go_on_to_commit(now)
        waiting, policy, book = self.selection, self.participation, self.book
        if self.phase is Phase.GATHERING and not (self.paused or self.draining):
            commands += self._open_round(now)
        if self.phase is not Phase.OPEN or not self._may_give_tasks(commands, now):
            return commands
        commands += self._end_regions(now, filled=False)
        if policy.wanted_reports(self.book) <= 0:
            return commands + self._close(now, by_deadline=False)
        for region in () if self.paused else policy.parts():
            free = policy.free_slots(book, region)
            if free > 0 and (waiting.idle or waiting.doubted):
                commands += self.tasks.give(free, self.round, self._terms(region, now), now)
            if waiting.again and (lacking := policy.lacking(book, region)) > 0:
                terms = self._terms(region, now)
                commands += self.tasks.give_again(lacking, self.round, terms, now)
        commands += self._end_regions(now, filled=True)
        if policy.nobody_is_left(self.book):
            return commands + self._close(now, by_deadline=False)
        return commands

    def _open_round(self, now: float) -> list[Command]:
        """Open the next round, if it may open now."""
        waiting, book, share = self.selection, self.book, self.settings.share
        # A device whose report came early may wait for the round after: it is counted once.
        early = sum(not waiting.is_eligible(device) for device in book.early.values())
        there, devices = len(book.tasks) + early, None
        if share is not None:
            devices = waiting.eligible() + there
            self.resize(share.size_for(devices, len(book.early)))
        idle, able = waiting.ready() + there, waiting.waiting() + there
        if not self.participation.may_open(idle, able, now):
            return []
        self.round += 1
        self.phase, self.deadline = Phase.OPEN, self._round_deadline(now)
        self.tasks.begin_round()
        return [Opened(self.round, self.settings.own_goal, devices)]

    def resize(self, size: RoundSize) -> None:
        """The next round to open, or the open one, has this size."""
        if size == self.settings.size:
            return
        self.settings = self.settings._replace(**size._asdict())
        self.selection.resize(size)
        for part in (self.participation, self.tasks):
            part.settings = part.settings._replace(**size._asdict())

    def _take_up_goal(self, goal: int | None) -> None:
        """The round that was open had this goal, by its share of the devices. None: it had no
        share."""
        share = self.settings.share
        if share is not None and goal is not None:
            self.resize(share.size_of_goal(min(goal, share.most)))

    def _terms(self, region: str | None, now: float) -> Terms:
        """Return the terms of leases that are given now, in this region of the open round."""
        policy, deadline = self.participation, self.deadline
        ends = policy.lease_ends(deadline, now, region)
        return Terms(self.version, ends, policy.is_short(deadline, now, region), region)

    def _end_regions(self, now: float, *, filled: bool) -> list[Command]:
        """End the regions' parts of the open round whose time it is. ``filled``: as for
        ``RegionalRounds.due``."""
        regional, commands = self.regional, list[Command]()
        if regional is not None:
            for name, why in regional.due(self.deadline, now, filled=filled):
                commands += self._end_region(regional, name, why)
        return commands

    def _end_region(
        self, regional: RegionalRounds, name: str, why: End, *, by_deadline: bool = False
    ) -> list[Command]:
        """End a region's part of the open round. ``by_deadline``: whether the round's deadline ends
        it."""
        commands, late = list[Command](), by_deadline or why == "deadline"
        text = f"region {name} of round {self.round} is over: {IN_WORDS[why]}"
        for device in regional.book.devices_in(name):
            cause = LOST if device in self.book.absent else LATE if late else SURPLUS
            commands += self.tasks.cancel(device, cause, self.round, Code.ROUND_OVER, text)
        reports, least = regional.book.reported[name], regional.rules[name].minimum
        is_done, text = regional.end(name), IN_WORDS[why]
        if not is_done:
            text = f"{text}: {reports} reports, {least} are the minimum"
        return [*commands, RegionEnded(self.round, name, is_done, reports, text)]

    def _round_deadline(self, now: float) -> float:
        """Return when a round ends that opens now, with all the time that its exchanges take."""
        beside = self.round_exchanges
        return now + self.settings.deadline + (0.0 if beside is None else beside.seconds)

    def _may_give_tasks(self, commands: list[Command], now: float) -> bool:
        """Return whether the exchanges before the open round's tasks are over. Adds the commands of
        what follows for them."""
        beside = self.round_exchanges
        if beside is None:
            return True
        part = beside.before_tasks(self.round)
        if part == "due" and not self.paused:
            commands += beside.open(self.round, self.version, now)
            part = beside.before_tasks(self.round)
        if part == "failed":
            commands += self._abandon(beside.text, self.causes(), now)
        if part == "done" and beside.let_members_train():
            self.deadline = now + self.settings.deadline
        return part == "done"

    def _go_on_to_commit(self, now: float) -> list[Command]:
        """Do what the state of the exchanges between the round's reports and its model allows."""
        beside = self.round_exchanges
        if beside is None or beside.commit is None or self.paused:
            return []
        commands, part = list[Command](), beside.before_commit(self.round)
        if part == "due":
            reported = [*self.book.accepted.values()]
            opened = beside.go_on_after_training(self.round, self.version, reported, now)
            commands += opened or ()
            part = "done" if opened is None else beside.before_commit(self.round)
        if part == "open":
            return commands
        commit, beside.commit = beside.commit, None
        if part == "done":
            return [*commands, commit]
        return commands + self._abandon(beside.text, commit.dropped, now)

    def _abandon(self, why: str, dropped: dict[str, int], now: float) -> list[Command]:
        """End the open round without a model. ``dropped``: as in ``Abandon``."""
        commands: list[Command] = [Abandon(self.round, dropped, why)]
        self._end_round([] if self.limits is None else self.limits.abandon())
        self._count_abandoned()
        finish, self.finishing = self.finishing or self.finish(inf, {}), None
        return commands + (self._advance(now) if finish is None else self._finish(finish, now))

    def _count_abandoned(self) -> None:
        budget = self.settings.budget
        if budget is None:
            return
        self.releases += budget.abandoned
        if budget.if_abandoned is not None:
            self.settings = self.settings._replace(budget=budget.if_abandoned)

    def _begin_exchanges(self, now: float) -> list[Command]:
        """Open the exchanges that are due. A run that is to finish does so after the last one."""
        if self.paused or self.draining:
            return []
        commands, last = list[Command](), self.phase is Phase.FINISHED
        for series in self.exchanges.values():
            if series.due(self.version, last=last):
                commands += series.open(self.version, now)
        if last and self.finishing is not None and not self.exchanges_follow():
            commands.append(self.finishing)
            self.finishing = None
        return commands

    def _leave_exchanges(self, device: str, now: float) -> None:
        for series in self.exchanges.values():
            series.leave(device, now)

    def _finish(self, finish: Finish, now: float) -> list[Command]:
        """Training is over. If an exchange is open or due, its devices are free from now on."""
        commands: list[Command] = []
        if self.round_exchanges is not None:
            commands += self.round_exchanges.give_up("training is over")
        if self.exchanges_follow():
            for device in list(self.book.tasks):
                at, text = self.round_for_ended_tasks, "training is over"
                commands += self.tasks.cancel(device, SURPLUS, at, Code.ROUND_OVER, text)
        self.phase, self.finishing = Phase.FINISHED, finish
        return commands + self._advance(now)

    def _revive(self, device: str, task: str, now: float) -> list[Command]:
        """Let the lease of a lost device that returns with its work done go on, if it may."""
        can = self.phase is Phase.OPEN or (
            self.settings.outlive and self.phase is not Phase.FINISHED
        )
        if not can or task not in self.book.lost:
            return []
        if not self.participation.may_revive(self.book, task):
            return []
        if not self.may_report(device):
            return []
        _, terms = self.book.lost[task]
        if self.settings.outlive and not self._could_count(device, terms.version):
            return []
        ends = self.participation.lease_ends(self.deadline, now, terms.region)
        if not self.tasks.revive(device, task, ends):
            return []
        return [Revived(device, task, self.round)]

    def _close(self, now: float, *, by_deadline: bool) -> list[Command]:
        commands: list[Command] = []
        book, reports, regional = self.book, len(self.book.accepted), self.regional
        if regional is not None:
            for name in regional.parts():
                assert name is not None
                commands += self._end_region(regional, name, "round", by_deadline=by_deadline)
        why = "its deadline has passed" if by_deadline else f"it has its {reports} reports"
        text = f"round {self.round} is over: {why}"
        for device in self.participation.ends_with_round(book):
            cause = LOST if device in book.absent else LATE if by_deadline else SURPLUS
            commands += self.tasks.cancel(
                device, cause, self.round_for_ended_tasks, Code.ROUND_OVER, text
            )
        causes = self.causes()
        if self.settings.outlive:  # what ends from now on counts for the next round
            book.dropped.clear()
        if self.participation.may_commit(book):
            done = None if regional is None else (*regional.done(),)
            self.phase, commit = Phase.COMMITTING, Commit(self.round, causes, done)
            if self.round_exchanges is None:
                return [*commands, commit]
            self.round_exchanges.commit = commit
            return commands + self._advance(now)
        text = f"{reports} reports at the deadline, {self.settings.minimum} are the minimum"
        if regional is not None:
            text = regional.too_few()
        return commands + self._abandon(text, causes, now)

    def _end_round(self, not_released: Iterable[str] = ()) -> None:
        """The round is over. ``not_released``: devices whose reports count for no release any
        more."""
        self.phase, self.waits_on = Phase.GATHERING, ""
        self.tasks.end_round(self.round, self.version)
        self.selection.look_again([*not_released, *self.left_out])
        self.left_out.clear()

    def _check_committing(self) -> None:
        beside = self.round_exchanges
        if self.phase is not Phase.COMMITTING or (beside is not None and beside.commit is not None):
            raise ValueError(f"no round is being committed ({self.phase})")
