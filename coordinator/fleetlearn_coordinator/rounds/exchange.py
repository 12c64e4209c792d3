"""Exchanges: devices are each asked one thing, and each answers once, beside the training rounds.

What is asked, and what an answer is, is the driver's business; here it has a kind, a word. A policy
says when exchanges of its kind are due and how many devices must answer until when
(``ExchangePolicy``). It may let one exchange follow another with the devices that answered: they
are one series, and each is a phase of it.

The devices are drawn when an exchange opens, from all connected devices that can answer, whatever
they do at that moment: a device that trains answers when its task is over, before it is given
another one. So devices that are seldom free are drawn like the others. A device that is asked holds
a lease, in a book of the series' own; a device has one lease at a time, of training or of any kind
of exchange. A device that is lost, or fails, is replaced by another while there is one. It is asked
again, once it has checked in again, where the exchange would not be valid without it
(SECOND_CHANCES)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    Ask,
    CancelTask,
    Command,
    ExchangeClosed,
    ExchangeOpened,
    Unanswered,
)
from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms
from fleetlearn_coordinator.rounds.pace import Pace
from fleetlearn_coordinator.rounds.random_draws import shuffled
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES, Selection


class ExchangeTerms(NamedTuple):
    """How many devices are to answer in one exchange, and until when."""

    devices: int
    """Answers that close the exchange. So many devices are asked at a time."""
    minimum: int
    """Fewest answers with which the exchange is valid."""
    deadline: float
    """Seconds after which the exchange ends with the answers that are there."""


class ExchangePolicy(Protocol):
    """What exchanges of one kind are. A policy has no state: what it must know it is told."""

    @property
    def kind(self) -> str:
        """One word for it, for drivers and people. The draw of the devices depends on it."""

    @property
    def letter(self) -> str:
        """Begins a task's id, after the run's prefix. No other kind has it, and it is no digit."""

    @property
    def training_after(self) -> int | None:
        """How many exchanges of a series come before a round's training, 0 or more: its devices
        alone take part in them, and those that answer in the last of them alone are given tasks.
        The others come between the round's reports and its model, and begin with the devices whose
        reports count. None: the series has nothing to do with rounds (round_exchanges.py)."""

    def due(self, last: int, newest: int, *, final: bool) -> bool:
        """Return whether a series is due, where model version ``last`` had the last one and
        ``newest`` is the newest. ``final``: no newer version will follow."""

    def terms(self, phase: int) -> ExchangeTerms:
        """Return the terms of a series' exchange. ``phase``: its number in the series, from 1."""

    def next_members(self, phase: int, answered: Collection[str]) -> Collection[str] | None:
        """Return the devices that the next exchange of the series asks, given who answered in this
        one, which is valid. None: this one is the last. A series also ends with an exchange that is
        not valid. Where training comes between the two (``training_after``), ``answered`` are the
        devices whose reports count."""


class SavedExchange(NamedTuple):
    """The exchange that an earlier process opened last, with rows of (task, device, ...)."""

    number: int
    version: int
    is_open: bool
    leases: list[tuple[str, str]]
    accepted: list[tuple[str, str]]
    dropped: list[tuple[str, str, str]]
    """With the cause."""
    phase: int = 1
    members: Sequence[str] | None = None
    """As ``ExchangeOpened`` said."""
    is_valid: bool = False
    """As ``ExchangeClosed`` said, where it is over."""


@dataclass(slots=True)
class ExchangeSeries:
    """The exchanges of one kind in a run. One at most is open. Times are seconds on the engine's
    clock."""

    policy: ExchangePolicy
    seed: int
    prefix: str
    """Task ids begin with it."""
    selection: Selection
    """Devices that are asked are taken out of it."""
    pace: Pace | None
    book: LeaseBook
    """The leases of devices that are asked, the accepted ones included until the next exchange
    opens."""
    books: Sequence[LeaseBook] = ()
    """The books of training and of all kinds of exchanges: who has a lease in one of them is asked
    later."""
    number: int = 0
    """Of the series that was opened last; they are numbered from 1."""
    phase: int = 1
    """Which exchange of that series was opened last, from 1."""
    version: int = 0
    """The model version that the series is about."""
    members: frozenset[str] | None = None
    """Who alone may answer: those that the exchange before leaves. None: every device that can."""
    is_open: bool = False
    is_valid: bool = False
    """Whether enough devices answered in the exchange that was opened last. It is over."""
    deadline: float = 0.0
    """When the open exchange ends."""
    requested: bool = False
    """Whether somebody asked for a series about the newest model."""
    able: set[str] = field(default_factory=set)
    """Connected devices that can answer."""
    chosen: set[str] = field(default_factory=set)
    """Connected devices that are to be asked as soon as they are free."""
    _queue: deque[str] = field(default_factory=deque)
    """Devices that may take the place of others, in the order of the draw, then in the order in
    which they came."""
    _asked: set[str] = field(default_factory=set)
    """Devices that are in the queue or were taken from it: each answers once in an exchange."""
    _again: dict[str, None] = field(default_factory=dict)
    """Connected devices that failed to answer, and have checked in again since, in the order in
    which they came."""
    _given: int = 0
    """How many leases were given in the open exchange."""

    # --- what the engine and drivers ask ---

    @property
    def terms(self) -> ExchangeTerms:
        """The terms of the exchange that was opened last."""
        return self.policy.terms(self.phase)

    def due(self, version: int, *, last: bool) -> bool:
        """Return whether a series about this version, the newest, is to be opened. ``last``: no
        other will follow."""
        if self.is_open:
            return False
        return self.requested or self.policy.due(self.version, version, final=last)

    def wake_at(self) -> float | None:
        """Return when the open exchange needs ``tick`` next. None: none is open."""
        if not self.is_open:
            return None
        lost = self.book.wake_at()
        return self.deadline if lost is None else min(lost, self.deadline)

    def takes_answer(self, device: str, task: str) -> bool:
        """Return whether the device's answer would still count."""
        return self.book.tasks.get(device) == task

    def has_counted(self, device: str, task: str) -> bool:
        """Return whether the device's answer counts, in the exchange that was opened last."""
        return self.book.accepted.get(task) == device

    def oldest_version(self) -> int | None:
        """Return the model version that an open exchange is about, or None."""
        return self.version if self.is_open else None

    @property
    def has_next(self) -> bool:
        """Whether devices are to be asked as soon as they are free."""
        return bool(self.chosen or self._again)

    def failures(self, device: str) -> int:
        """Return how many leases of the device ended without an answer in the open exchange."""
        return sum(owner == device for owner, _ in self.book.dropped.values())

    # --- events ---

    def restore(self, found: SavedExchange, now: float, expires: float) -> None:
        """Go on with what an earlier process left. An open exchange gets its whole time again; its
        leases wait for their devices until ``expires``."""
        self.number, self.version, self.is_open = found.number, found.version, found.is_open
        self.phase = found.phase
        self.members = None if found.members is None else frozenset(found.members)
        self.is_valid = found.is_valid
        if not found.is_open:
            self.book.restore((), found.accepted, (), (), expires)
            return
        self.deadline = now + self.terms.deadline
        terms = Terms(found.version, self.deadline)
        leases = [(task, device, terms) for task, device in found.leases]
        self.book.restore(leases, found.accepted, found.dropped, (), expires)
        rows = [*found.leases, *found.accepted, *(row[:2] for row in found.dropped)]
        self._asked, self._given = {device for _, device in rows}, len(rows)

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain values, for ``take_up``, without who is able to answer."""
        taken: dict[str, Any] = {
            "number": self.number,
            "phase": self.phase,
            "version": self.version,
            "requested": self.requested,
            "is_open": self.is_open,
        }
        if not self.is_open:
            return taken
        return taken | {
            "members": None if self.members is None else sorted(self.members),
            "deadline": self.deadline,
            "chosen": sorted(self.chosen),
            "queue": [*self._queue],
            "asked": sorted(self._asked),
            "again": [*self._again],
            "given": self._given,
            "leases": self.book.snapshot(),
            "accepted": [*self.book.accepted.items()],
            "dropped": [[task, *row] for task, row in self.book.dropped.items()],
        }

    def take_up(self, taken: Mapping[str, Any]) -> None:
        """Go on from what another series' ``snapshot`` returned, on the same clock."""
        self.number, self.phase, self.version = taken["number"], taken["phase"], taken["version"]
        self.requested, self.is_open = taken["requested"], taken["is_open"]
        if not self.is_open:
            return
        members = taken["members"]
        self.members = None if members is None else frozenset(members)
        self.deadline, self.chosen = taken["deadline"], {*taken["chosen"]}
        self._queue, self._asked = deque(taken["queue"]), {*taken["asked"]}
        self._again, self._given = dict.fromkeys(taken["again"]), taken["given"]
        self.book.take_up(taken["leases"])
        self.book.accepted = dict(taken["accepted"])
        self.book.dropped = {task: (device, cause) for task, device, cause in taken["dropped"]}

    def join(self, device: str) -> None:
        """The device checks in, and can answer. Call before the engine's ``check_in``."""
        self.able.add(device)
        if not self.is_open:
            return
        if device not in self._asked:
            if device in self._who_may_answer([device]):
                self._asked.add(device)
                self._queue.append(device)
        elif 0 < self.failures(device) <= SECOND_CHANCES and not self._has_turn(device):
            self._again[device] = None

    def _who_may_answer(self, devices: Collection[str]) -> Collection[str]:
        """Return those of these devices that may take part in the open exchange."""
        if self.members is not None:
            return self.members.intersection(devices)
        if self.policy.training_after:  # who answers before a round's training is given its tasks
            return {*filter(self.selection.may_take_part, devices)}
        return devices

    def _has_turn(self, device: str) -> bool:
        """Return whether the device was asked, is to be asked, or has answered."""
        if device in self.chosen:
            return True
        return device in self.book.tasks or device in self.book.accepted.values()

    def come_back(self, device: str, now: float) -> list[Command] | None:
        """Ask a device that checks in again what it was asked. Returns None if it has no lease
        here."""
        task = self.book.tasks.get(device)
        if task is None:
            return None
        self.book.come_back(device, now)
        return [self._ask(device, task, again=True)]

    def leave(self, device: str, now: float) -> None:
        """The device's connection is gone. Its lease, if it has one, lives on for the grace
        period."""
        self.able.discard(device)
        self._again.pop(device, None)
        if device in self.chosen:
            self.chosen.discard(device)
            self._asked.discard(device)  # it was not asked yet: it may be chosen again
        self.book.leave(device, now)

    def count(self, device: str, task: str) -> None:
        """The device's answer is safe: it counts. Call only where ``takes_answer`` holds."""
        self._put_back(*self.book.complete([device], [task]))

    def end(self, device: str, task: str, cause: str) -> list[Command]:
        """The device cannot answer. Harmless when repeated."""
        return [self._drop(device, cause)] if self.takes_answer(device, task) else []

    def tick(self, now: float) -> list[Command]:
        """End the leases of devices that were away for too long. ``go_on`` does the rest."""
        commands: list[Command] = []
        while (device := self.book.next_lost(now)) is not None:
            commands.append(self._drop(device, LOST))
        return commands

    def open(
        self,
        version: int,
        now: float,
        number: int | None = None,
        members: Collection[str] | None = None,
    ) -> list[Command]:
        """Open a series about this version, the newest. ``number``: of the series, where it is not
        the next one. ``members``: who alone is asked. Call only where ``due``, or for a round."""
        self.number = self.number + 1 if number is None else number
        self.version, self.requested = version, False
        return self._open_phase(1, members, now)

    def open_next(self, members: Collection[str], now: float) -> list[Command]:
        """Go on with the series after training, with these devices."""
        return self._open_phase(self.phase + 1, members, now)

    def give_up(self, why: str) -> list[Command]:
        """End the series, with the exchange that is open. ``why``: for people."""
        return self._end(why, valid=False) if self.is_open else []

    def go_on(self, now: float) -> list[Command]:
        """Do what the state allows now: choose devices, ask those that are free, close."""
        if not self.is_open:
            return []
        commands: list[Command] = []
        terms, book = self.terms, self.book
        while self._queue and self._taking_part() < terms.devices:
            device = self._queue.popleft()
            if device in self.able:
                self.chosen.add(device)
            else:
                self._asked.discard(device)  # it left before its turn, and may come back
        while self._again and self._taking_part() < terms.minimum:
            device = next(iter(self._again))
            del self._again[device]
            self.chosen.add(device)
        if self.chosen and (free := sorted(filter(self._is_free, self.chosen))):
            commands += self._give(free, now)
        nobody_is_left = not (book.tasks or self.chosen or self._queue)
        needed = terms.minimum if nobody_is_left else terms.devices
        if len(book.accepted) >= needed or now >= self.deadline:
            commands += self._close(now)
        return commands

    # --- what follows from them ---

    def _taking_part(self) -> int:
        """Return how many devices answered, are asked, or are to be asked."""
        return len(self.book.accepted) + len(self.book.tasks) + len(self.chosen)

    def _is_free(self, device: str) -> bool:
        return not any(device in book.tasks for book in self.books)

    def _open_phase(self, phase: int, members: Collection[str] | None, now: float) -> list[Command]:
        self.phase, self.is_open, self.is_valid = phase, True, False
        self.members = None if members is None else frozenset(members)
        self.deadline, self._given = now + self.terms.deadline, 0
        self.book.end_round(self.version)
        asked = self._who_may_answer(self.able)
        self._queue = deque(shuffled(self.seed, self.number, asked, self.policy.kind))
        self._asked = set(asked)
        told = None if self.members is None else tuple(sorted(self.members))
        opened = ExchangeOpened(self.number, self.version, self.policy.kind, phase, told)
        return [opened, *self.go_on(now)]

    def _give(self, devices: list[str], now: float) -> list[Command]:
        place = f"{self.number}" if self.phase == 1 else f"{self.number}.{self.phase}"
        first = self._given + 1
        begin = f"{self.prefix}{self.policy.letter}{place}-"
        tasks = [f"{begin}{number}" for number in range(first, first + len(devices))]
        for device in devices:
            self.selection.remove(device)
        self.chosen.difference_update(devices)
        self._given += len(devices)
        self.book.give(devices, tasks, Terms(self.version, self.deadline), now)
        rows = zip(devices, tasks, strict=True)
        return [self._ask(device, task, again=False) for device, task in rows]

    def _ask(self, device: str, task: str, *, again: bool) -> Ask:
        kind, phase = self.policy.kind, self.phase
        return Ask(device, task, self.number, self.version, self.deadline, again, kind, phase)

    def _drop(self, device: str, cause: str) -> Unanswered:
        task = self.book.tasks[device]
        self._put_back(*self.book.drop(device, cause))
        return Unanswered(device, task, cause, self.policy.kind)

    def _put_back(self, *devices: str) -> None:
        """These connected devices may train again."""
        self.selection.end_measuring(devices)
        if self.pace is not None:
            self.pace.measured(devices)

    def _close(self, now: float) -> list[Command]:
        """End the open exchange, and open the one of the series that follows, unless training comes
        first."""
        answered = [*self.book.accepted.values()]
        valid = len(answered) >= self.terms.minimum
        commands = self._end("its deadline has passed", valid=valid)
        if valid and self.phase != self.policy.training_after:
            members = self.policy.next_members(self.phase, answered)
            if members is not None:
                commands += self._open_phase(self.phase + 1, members, now)
        return commands

    def _end(self, why: str, *, valid: bool) -> list[Command]:
        commands: list[Command] = []
        kind = self.policy.kind
        for device, task in list(self.book.tasks.items()):
            there = device not in self.book.absent
            commands.append(self._drop(device, LATE if there else LOST))
            if there:
                text = f"{kind} {self.number} is over: {why}"
                commands.append(CancelTask(device, task, Code.ROUND_OVER, text))
        self.is_open, self.is_valid = False, valid
        self.chosen.clear()
        self._queue.clear()
        self._asked.clear()
        self._again.clear()
        causes = self.book.causes()
        return [
            *commands,
            ExchangeClosed(self.number, self.version, causes, valid, kind, self.phase),
        ]
