"""Selection: which of the waiting devices are given tasks.

Who is chosen follows from the seed, the round, the devices that wait, and what is remembered of
them (reliability.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from fleetlearn_coordinator.rounds.commands import LATE, PAUSED, PRIVACY_LIMIT, STALE, SURPLUS
from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.participation_limits import LimitedDevices, ParticipationLimits
from fleetlearn_coordinator.rounds.random_draws import picks
from fleetlearn_coordinator.rounds.reliability import DOUBT, Reliability
from fleetlearn_coordinator.rounds.settings import RoundSize, Settings

MAX_COPIED_NAMES = 4096
"""Up to this many names are copied into a plain list before some are taken out: a list is quicker
to take from than a SortedList, and of more names the copy costs more than that saves."""
SECOND_CHANCES = 3
"""How many more tasks of a round, or measurements of an evaluation, a device may be given whose
tasks in it failed. A device that fails each time cannot keep a round from ending: it is given one
only where the round could not have a model without it."""
REBUILD_RATIO = 32
"""A change of more than one name in this many makes the SortedList again as a whole. A smaller
change takes the names out, or puts them back, one by one.

With MAX_COPIED_NAMES and REBUILD_RATIO the engine takes 1.7 CPU-us for a report with 1,000 devices,
100 of them in a round, and 4.0 us with 100,000 and 10,000. With SortedList's ``pop`` and ``update``
alone it takes 2.2 and 4.8 us."""


@dataclass(slots=True)
class Selection:
    """The connected devices that have no task. Each is idle, or in doubt, or rests until the round
    ends, or is limited: it may not take part in the next release (``ParticipationLimits``).

    In synchronous rounds a device has one turn in a round. Asynchronously a device whose report
    counts may have another at once, up to ``Settings.max_updates`` in a round; one whose task
    failed rests until the round, or its time, is over.

    A device whose task failed may have another in the same round, once it has checked in again,
    where nobody else is there for a slot that the round needs (``choose_again``)."""

    settings: Settings
    idle: SortedList[str] = field(default_factory=SortedList)
    """Devices that may be given a task. Sorted, so that who is chosen does not depend on who came
    first."""
    doubted: dict[int, SortedList[str]] = field(default_factory=dict)
    """Level of doubt (``Reliability.level``) -> devices that would be idle if their last tasks had
    not failed."""
    resting: set[str] = field(default_factory=set)
    """Devices that had their turn in this round."""
    had_turn: set[str] = field(default_factory=set)
    """Devices that had their turn in this round, connected or not. In synchronous rounds a turn
    begins with the lease; asynchronously a device has had it when it may have no other."""
    failures: Counter[str] = field(default_factory=Counter)
    """Device -> its tasks that ended in this round without a report that counts."""
    again: set[str] = field(default_factory=set)
    """Devices in ``resting`` that checked in again after their task failed: they may have
    another."""
    updates: Counter[str] = field(default_factory=Counter)
    """Device -> its updates that count in this round. Empty unless they are limited."""
    reliability: Reliability = field(default_factory=Reliability)
    held_up: int = 0
    """How many of this round's leases kept their slots from other devices
    (``LeaseBook.held_up``)."""
    next_round: int = 1
    """The open round, or the next one to open."""
    members: frozenset[str] | None = None
    """The devices that alone may be given tasks in this round. None: all may."""
    limits: ParticipationLimits | None = None
    """How often devices may take part. None: at any time. The engine tells them what happens."""
    limited: LimitedDevices = field(default_factory=LimitedDevices)
    spent: set[str] = field(default_factory=set)
    """Devices, connected or not, that may have no task of the newest model: a sum with their
    updates of it was made, and another one could be compared with that."""
    held: set[str] = field(default_factory=set)
    """Connected devices that wait for another model, as they are in ``spent``."""
    freed: list[str] | None = None
    """Connected devices whose tasks ended, until the driver takes them from here: other runs come
    first. None: there are no other runs, and devices wait here again."""

    def ready(self) -> int:
        """Return how many devices that are not in doubt a new round could give tasks."""
        return len(self.idle)

    def waiting(self) -> int:
        """Return how many devices may be given a task, in doubt or not."""
        return len(self.idle) + sum(map(len, self.doubted.values()))

    def eligible(self) -> int:
        """Return how many devices wait for a task, also where a round's quotas would not take
        them all."""
        return len(self.idle) + sum(map(len, self.doubted.values()))

    def is_eligible(self, device: str) -> bool:
        """Return whether the device is one of ``eligible``."""
        return device in self.idle or any(device in names for names in self.doubted.values())

    def resize(self, size: RoundSize) -> None:
        """The next round, or the open one, has this size."""
        self.settings = self.settings._replace(**size._asdict())

    def add(self, device: str) -> None:
        """The connected device may be given a task from now on."""
        for names in self.doubted.values():  # its level of doubt may have changed since it came
            names.discard(device)
        if self.limits is not None and self._is_limited(device, self.limits):
            return
        if device in self.spent:
            self.idle.discard(device)
            self.held.add(device)
            return
        if self.members is not None and device not in self.members:
            self.idle.discard(device)
            self.resting.add(device)
            return
        level = self.reliability.level(device) if self.reliability.points else 0
        if level:
            self.doubted.setdefault(level, self._no_names()).add(device)
        elif device not in self.idle:
            self.idle.add(device)

    def _is_limited(self, device: str, limits: ParticipationLimits) -> bool:
        """Let the device wait for a later release, if it may not take part in the next one. Returns
        whether it does."""
        self.limited.discard(device)
        first = limits.first_release(device)
        if first <= limits.release:
            return False
        self.idle.discard(device)
        self.limited.add(device, first)
        return True

    def _limit_resting(self, limits: ParticipationLimits) -> None:
        """Another release is the next one: of the devices that rest, let those wait that may take
        part in a later one alone, and let those rest that waited for this one."""
        release = limits.release
        due = self.limited.take_due(release)
        for device in list(self.resting):
            first = limits.first_release(device)
            if first > release:
                self.resting.remove(device)
                self.limited.add(device, first)
        self.resting.update(due)

    def may_take_part(self, device: str) -> bool:
        """Return whether the device may take part in the next release: whether limits let it, and
        no sum was made that has its update of the newest model."""
        if device in self.spent:
            return False
        return self.limits is None or self.limits.may_take_part(device, self.limits.release)

    def look_again(self, devices: Iterable[str]) -> None:
        """Reports of these devices counted for a release that is not made: those that wait for a
        later one may take part sooner."""
        for device in devices:
            if device in self.limited:
                self.add(device)

    def _no_names(self) -> SortedList[str]:
        return SortedList()

    def restrict(self, members: Iterable[str]) -> None:
        """Let only these devices be given tasks until the round is over. Others rest."""
        self.members = frozenset(members)
        waiting = [device for names in (self.idle, *self.doubted.values()) for device in names]
        for device in set(waiting) - self.members:
            self.remove(device)
            self.resting.add(device)

    def spend(self, devices: Collection[str]) -> None:
        """These devices may have no other task of the newest model."""
        self.spent.update(devices)
        for device in devices:
            if self._waits(device):
                self.remove(device)
                self.held.add(device)

    def begin_model(self) -> None:
        """Another model is the newest: all may have tasks of it."""
        held = sorted(self.held)
        self.spent.clear()
        self.held.clear()
        for device in held:
            self.add(device)

    def may_serve(self, device: str) -> bool:
        """Return whether the plan's rules let this connected device have a task in the next
        round."""
        return device not in self.limited and device not in self.spent

    def come_back(self, device: str) -> None:
        """The device is connected and has no task: let it wait, or rest until the round is over if
        it had its turn."""
        if device in self.had_turn:  # until the round is committed or abandoned
            self.resting.add(device)
            if 0 < self.failures.get(device, 0) <= SECOND_CHANCES:
                self.again.add(device)
        else:
            self.add(device)

    def remove(self, device: str) -> None:
        """The device's connection is gone."""
        self.idle.discard(device)
        for names in self.doubted.values():
            names.discard(device)
        self.resting.discard(device)
        self.again.discard(device)
        self.limited.discard(device)
        self.held.discard(device)

    def report(self, devices: Sequence[str], there: Collection[str]) -> None:
        """Leases of these devices ended, ``there`` are those that are connected: their reports
        count."""
        self.reliability.clear(devices)
        if self.failures:
            self._forgive(devices)
        if not self.settings.asynchronous:
            self.rest(there)
            if self.settings.carry:  # its turn may have begun in the round before
                self.had_turn.update(devices)
            return
        self.count(devices)
        if self.settings.max_updates is not None:
            self.had_turn.update(filter(self._is_at_limit, devices))
        if self.freed is not None:
            self.freed += there
            return
        for device in there:
            if device in self.had_turn:
                self.resting.add(device)
            else:
                self.add(device)

    def _forgive(self, devices: Sequence[str]) -> None:
        """These devices have reported, in spite of earlier failures in this round."""
        for device in devices:
            if self.failures.pop(device, 0) and self.settings.asynchronous:
                self.had_turn.discard(device)

    def rest(self, devices: Iterable[str]) -> None:
        """These connected devices had their turn, and have no task any more."""
        if self.freed is not None:
            self.freed += devices
        else:
            self.resting.update(devices)

    def end_measuring(self, devices: Iterable[str]) -> None:
        """These connected devices have measured, and may train again."""
        if self.freed is not None:
            self.freed += devices
        else:
            for device in devices:
                self.come_back(device)

    def count(self, devices: Iterable[str]) -> None:
        """Updates of these devices count in the open round."""
        if self.settings.max_updates is not None:
            self.updates.update(devices)

    def end_turns(self, devices: Iterable[str]) -> None:
        """The open round began with updates of these devices, which have no task: let those rest
        that had their turn."""
        self.count(devices)
        for device in devices:
            if not self.settings.asynchronous or self._is_at_limit(device):
                self.had_turn.add(device)
                if self._waits(device):
                    self.remove(device)
                    self.resting.add(device)

    def _waits(self, device: str) -> bool:
        return device in self.limited or self.is_eligible(device)

    def _is_at_limit(self, device: str) -> bool:
        most = self.settings.max_updates
        return most is not None and self.updates[device] >= most

    def end_rest(self) -> None:
        """Devices that rest may be given tasks again, except those that have as many updates in the
        round as they may."""
        self.had_turn = set(filter(self._is_at_limit, self.updates))
        over = self.resting - self.had_turn
        self.resting -= over
        self.again.clear()
        self.failures.clear()
        for device in sorted(over):
            self.add(device)

    def end_turn(self, device: str) -> None:
        """The device's task ended without a report that counts."""
        self.had_turn.add(device)
        self.failures[device] += 1

    def fail(self, device: str, cause: str, held_up: bool) -> None:
        """Remember that the device's lease ends without a report that counts."""
        self.held_up += held_up
        if held_up or cause not in (SURPLUS, LATE, STALE, PAUSED, PRIVACY_LIMIT):
            self.reliability.fail(device, DOUBT if held_up else 1)

    def end_round(self, reported: Collection[str]) -> None:
        """The round is over: all devices may be given a task again. ``reported``: those whose
        reports counted."""
        self.members = None
        if self.limits is not None:
            self._limit_resting(self.limits)
        held = self.spent & self.resting
        self.resting -= held
        self.held |= held
        # no device waits for another there
        held_up = 0 if self.settings.asynchronous else self.held_up
        self.reliability.end_round(reported, held_up, self.settings.cohort - self.settings.goal)
        if self.reliability.points:
            doubted = [device for device in self.resting if self.reliability.level(device)]
            self.resting.difference_update(doubted)
            for device in doubted:
                self.add(device)
        self._end_rest_of_all()
        self.resting.clear()
        self.again.clear()
        self.failures.clear()
        self.had_turn.clear()
        self.updates.clear()
        self.held_up = 0

    def _end_rest_of_all(self) -> None:
        put_back(self.idle, self.resting)

    def go_on(self, devices: Iterable[str]) -> None:
        """After a restart: these devices were given the open round's tasks so far."""

    def choose(
        self, most: int, round: int, first: int, book: LeaseBook, region: str | None = None
    ) -> list[str]:
        """Take ``most`` devices, or all that there are. ``first``: the number of the round's first
        lease among them. ``region``: the one in which they are; None: rounds have no regions."""
        if self.doubted or self.reliability.careful:
            devices = self._choose_with_care(most, round, first, book)
        else:
            devices = take(
                self.idle, picks(self.settings.seed, round, first, min(most, len(self.idle)))
            )
        if not self.settings.asynchronous:
            self.had_turn.update(devices)
        return devices

    def choose_again(
        self, most: int, round: int, lost: Collection[str], region: str | None = None
    ) -> list[str]:
        """Take up to ``most`` of the devices that failed in this round and checked in again: first
        those that failed least often. ``lost``: devices that get back the task that they had, which
        was counted when it was given. ``region``: as in ``choose``."""
        chosen = list[str]()
        for device in sorted(self.again, key=lambda device: (self.failures[device], device)):
            if len(chosen) == most:
                break
            if not self.may_take_part(device):
                continue
            if device in lost or (
                not self.settings.one_task and self._may_try_again(device, round)
            ):
                chosen.append(device)
                self.again.discard(device)
                self.resting.discard(device)
        return chosen

    def _may_try_again(self, device: str, round: int) -> bool:
        return True

    def _choose_with_care(self, most: int, round: int, first: int, book: LeaseBook) -> list[str]:
        """Choose where tasks failed lately, or a round was held up.

        In a careful round the slots that the goal needs go to proven devices first. A few of the
        others are tried, and so are a few of those in doubt, in slots that the round can spare.
        Devices in doubt fill what is left only where the round would be below its minimum.
        """
        seed, known = self.settings.seed, self.reliability
        draws = list(picks(seed, round, first, most))
        spare, chosen = self._spare(), list[str]()
        if self.doubted and self._is_first(first) and most < self._idle_here():
            trials = spare or 1 - bool(known.careful)
            chosen += self._choose_trials(picks(seed, round, 1, trials, "trials"))
        if known.careful:
            proven = [device for device in known.proven if device in self.idle]
            unproven = sum(device not in known.proven for device in book.tasks) + len(chosen)
            count = min(most - len(chosen) - max(0, spare - unproven), len(proven))
            picked = self._take(
                SortedList(proven), draws[len(chosen) : len(chosen) + max(0, count)]
            )
            for device in picked:
                self.idle.discard(device)
            chosen += picked
        chosen += self._take(self.idle, draws[len(chosen) :])
        if self._lacks_minimum(book):
            for level in sorted(self.doubted):
                chosen += self._take(self.doubted[level], draws[len(chosen) :])
        return chosen

    def _spare(self) -> int:
        """Return how many slots the round can spare for devices that may fail."""
        return (self.settings.cohort - self.settings.goal + 1) // 2

    def _idle_here(self) -> int:
        return len(self.idle)

    def _is_first(self, first: int) -> bool:
        """Return whether no device was chosen in this round before. ``first``: as in ``choose``."""
        return first == 1

    def _lacks_minimum(self, book: LeaseBook) -> bool:
        return len(book.accepted) < self.settings.minimum

    def _take(self, names: SortedList[str], draws: Sequence[int]) -> list[str]:
        """Take a device out for each number."""
        return take(names, draws)

    def _choose_trials(self, draws: Iterable[int]) -> list[str]:
        """Take devices in doubt that get another chance though others are idle: each draw names
        one, which has it with probability 2^-level."""
        chosen = list[str]()
        for number in draws:
            place = number % max(1, sum(map(len, self.doubted.values())))
            for level, names in sorted(self.doubted.items()):
                if place < len(names):
                    if number >> (64 - level) == 0:
                        chosen.append(names.pop(place))
                    break
                place -= len(names)
        return chosen


def take(names: SortedList[str], draws: Sequence[int]) -> list[str]:
    """Take a name out for each number, one after the other: the one at the number modulo how many
    are left. Ends when no name is left."""
    copied = len(names) <= MAX_COPIED_NAMES and not _are_few(draws, names)
    left = list(names) if copied else names
    taken = [
        left.pop(number % size)
        for number, size in zip(draws, range(len(left), 0, -1), strict=False)
    ]
    if copied:
        names.clear()
        names.update(left)
    return taken


def put_back(names: SortedList[str], others: Collection[str]) -> None:
    """Add names that are not there yet."""
    if _are_few(others, names):
        for name in others:
            names.add(name)
    else:
        together = [*names, *others]  # runs in order are quick to sort
        names.clear()
        names.update(together)


def _are_few(some: Collection[object], names: Collection[str]) -> bool:
    return REBUILD_RATIO * len(some) < len(names)
