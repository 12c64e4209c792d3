"""The lease book: which device holds which task, from which model version on and until when, and
how leases ended.

The book decides nothing. Participation (participation.py) and selection (selection.py) read it, the
engine writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from math import inf
from typing import Any, NamedTuple

from fleetlearn_coordinator.rounds.commands import LATE, LOST, STALLED
from fleetlearn_coordinator.rounds.progress_watch import Watch

CHECKS_PER_STALL = 4
"""A lease cannot stall while it waits for the coordinator or while its device is away. It is then
checked again after ``LeaseBook.stall`` divided by this. So a lease that stalls soon after a wait or
an absence may end that much late."""


class Terms(NamedTuple):
    """What leases that are given together have in common."""

    version: int
    """The model version that they began from."""
    ends: float
    """When they end at the latest. Leases that are given later do not end sooner."""
    short: bool = False
    """Whether they have less than half a round's time: to be late is then not the device's
    fault."""
    region: str | None = None
    """The region in which they were given. None: rounds have no regions."""


@dataclass(slots=True)
class LeaseBook:
    """All leases of a run. A device has one at most. Times are seconds on the engine's clock."""

    grace: float
    """How long a lease outlives its device's connection, all absences together, until the device
    makes progress."""
    stall: float = inf
    """How long a lease lives without progress. Infinite: progress is not watched."""
    outlive: bool = False
    """Whether leases outlive their round. They then end by their own terms."""
    tasks: dict[str, str] = field(default_factory=dict)
    """Device -> its running task: its hold on one slot."""
    terms: dict[str, Terms] = field(default_factory=dict)
    """Device -> the terms of its lease. The lease that was given first is the first."""
    absent: dict[str, float] = field(default_factory=dict)
    """Device with a lease that is not connected -> when its lease ends unless it returns."""
    accepted: dict[str, str] = field(default_factory=dict)
    """Task -> device, of leases that ended with a report that counts."""
    early: dict[str, str] = field(default_factory=dict)
    """Task -> device, for reports that came while no round was open. They count for the next round,
    or for a later one."""
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Task -> (device, cause), of leases that ended otherwise."""
    lost: dict[str, tuple[str, Terms]] = field(default_factory=dict)
    """Task -> (device, terms), of leases that ended because the device was lost, and may go on if
    it returns."""
    lost_of: Counter[str] = field(default_factory=Counter)
    """Device -> how many leases it has in ``lost``."""
    watches: dict[str, Watch] = field(default_factory=dict)
    """Device -> its lease's watch. Where progress is not watched, only devices that were
    disconnected have one."""
    _lost_checks: list[tuple[float, str, str]] = field(default_factory=list)
    """(when, device, task), a heap: each lease ends then, unless its device has returned."""
    _stall_checks: list[tuple[float, str, str]] = field(default_factory=list)
    """(when, device, task), a heap: when to check which lease for progress."""

    # --- what the book says ---

    def causes(self) -> dict[str, int]:
        """Return how many leases ended without a report that counts, by cause."""
        return dict(Counter(cause for _, cause in self.dropped.values()))

    def oldest_version(self) -> int | None:
        """Return the oldest model version that a running lease began from, or None without leases.
        Models from there on are still needed."""
        return min((terms.version for terms in self.terms.values()), default=None)

    def wake_at(self) -> float | None:
        """Return when ``next_lost``, ``next_stalled`` or ``next_expired`` may find a lease, or
        None."""
        due = self._lost_checks[0][0] if self._lost_checks else None
        if self._stall_checks and (due is None or self._stall_checks[0][0] < due):
            due = self._stall_checks[0][0]
        if self.outlive and self.terms:
            ends = next(iter(self.terms.values())).ends
            due = ends if due is None else min(due, ends)
        return due

    def too_old(self, oldest: int) -> Sequence[str]:
        """Return the devices whose leases began from a model before version ``oldest``. A lease
        that was revived may be left out."""
        rows = self.terms.items()
        return [device for device, _ in takewhile(lambda row: row[1].version < oldest, rows)]

    def held_up(self, device: str, cause: str) -> bool:
        """Return whether the device's lease, which is to end by ``cause``, held its slot up by the
        device's fault: it stalled, it was late, or its device was lost after returns without any
        progress."""
        watch = self.watches.get(device)
        if cause == LOST:
            return watch is not None and not watch.progressed and watch.grace < self.grace
        waits = watch is not None and watch.waits is not None  # for the coordinator
        return cause == STALLED or (cause == LATE and not self.terms[device].short and not waits)

    # --- how leases begin and end ---

    def give(self, devices: Sequence[str], tasks: Sequence[str], terms: Terms, now: float) -> None:
        """Begin a lease for each of these devices, which have none."""
        self.tasks.update(zip(devices, tasks, strict=True))
        self.terms.update(dict.fromkeys(devices, terms))
        if self.stall < inf:
            for device in devices:
                self.watch(device, now)

    def restore(
        self,
        leases: Iterable[tuple[str, str, Terms]],
        accepted: Iterable[tuple[str, str]],
        dropped: Iterable[tuple[str, str, str]],
        lost: Iterable[tuple[str, str, Terms]],
        expires: float,
    ) -> None:
        """Fill an empty book after a restart with rows of (task, device[, terms or cause]), the
        oldest leases first. No device is connected yet; those that do not return by ``expires``
        lose their leases. Progress made before the restart is not known."""
        for task, device, terms in leases:
            self.tasks[device], self.terms[device], self.absent[device] = task, terms, expires
            heappush(self._lost_checks, (expires, device, task))
        self.accepted = dict(accepted)
        self.dropped = {task: (device, cause) for task, device, cause in dropped}
        self.keep_lost({task: (device, terms) for task, device, terms in lost})

    def snapshot(self) -> dict[str, Any]:
        """Return what outlives a round, as plain values: for ``take_up``."""
        return {
            "leases": [[device, task, *self.terms[device]] for device, task in self.tasks.items()],
            "lost": [[task, device, *terms] for task, (device, terms) in self.lost.items()],
            "early": [*self.early.items()],
            "absent": [*self.absent.items()],
            "watches": [[device, *astuple(watch)] for device, watch in self.watches.items()],
            "lost_checks": [*self._lost_checks],
            "stall_checks": [*self._stall_checks],
        }

    def take_up(self, taken: Mapping[str, Any]) -> None:
        """Fill an empty book with what another one's ``snapshot`` returned."""
        self.tasks = {device: task for device, task, *_ in taken["leases"]}
        self.terms = {device: Terms(*terms) for device, _, *terms in taken["leases"]}
        self.keep_lost({task: (device, Terms(*terms)) for task, device, *terms in taken["lost"]})
        self.early, self.absent = dict(taken["early"]), dict(taken["absent"])
        self.watches = {device: Watch(*values) for device, *values in taken["watches"]}
        self._lost_checks = [*map(tuple, taken["lost_checks"])]
        heapify(self._lost_checks)  # an earlier version wrote them in the order of a queue
        self._stall_checks = [*map(tuple, taken["stall_checks"])]

    def complete(
        self, devices: Sequence[str], tasks: Sequence[str], *, early: bool = False
    ) -> Sequence[str]:
        """End these leases: their reports count, in the open round or, ``early``, in a later one.
        Returns those of the devices that are connected."""
        (self.early if early else self.accepted).update(zip(tasks, devices, strict=False))
        return self._release(devices)

    def begin_round(self, most: int) -> Sequence[str]:
        """A round opens: the first ``most`` of the early reports count in it. Returns their
        devices."""
        moved = list(islice(self.early.items(), most))
        for task, device in moved:
            self.accepted[task] = device
            del self.early[task]
        return [device for _, device in moved]

    def drop(self, device: str, cause: str) -> Sequence[str]:
        """End the device's lease without a report that counts. Returns the device if it is
        connected."""
        task = self.tasks[device]
        self.dropped[task] = device, cause
        if cause == LOST:
            self.lost[task] = device, self.terms[device]
            self.lost_of[device] += 1
        return self._release([device])

    def revive(self, device: str, task: str, ends: float) -> bool:
        """Let the lease of a lost device go on until ``ends``. Returns False, and changes nothing,
        if the task did not end by the loss of this device, or too long ago."""
        found = self.lost.get(task)
        if found is None or found[0] != device:
            return False
        del self.lost[task]
        self.lost_of[device] -= 1
        self.dropped.pop(task, None)
        self.tasks[device] = task
        self.terms[device] = found[1]._replace(ends=ends, short=False)
        return True

    def _release(self, devices: Sequence[str]) -> Sequence[str]:
        for device in devices:
            del self.tasks[device], self.terms[device]
        if self.watches:
            for device in devices:
                self.watches.pop(device, None)
        if not self.absent:
            return devices
        return [device for device in devices if self.absent.pop(device, None) is None]

    def end_round(self, oldest: int) -> None:
        """Forget the round's reports, and how its leases ended. Where leases outlive their round,
        those of lost devices may go on that began from version ``oldest`` or a newer one; else no
        lease runs."""
        self.accepted.clear()
        if self.outlive:
            kept = {task: row for task, row in self.lost.items() if row[1].version >= oldest}
            self.keep_lost(kept)
            return
        self.dropped.clear()
        self.keep_lost({})
        self._lost_checks.clear()
        self._stall_checks.clear()

    def keep_lost(self, leases: dict[str, tuple[str, Terms]]) -> None:
        """Only these leases of lost devices may go on."""
        self.lost = leases
        self.lost_of = Counter(device for device, _ in leases.values())

    # --- absence and progress ---

    def watch(self, device: str, now: float) -> Watch:
        """Return the watch of the device's lease. It begins now if the lease has none: after a
        restart or a revival, and where progress is not watched."""
        watch, task = self.watches.get(device), self.tasks[device]
        if watch is None:
            watch = self.watches[device] = Watch(task, now, self.grace)
            if self.stall < inf:
                heappush(self._stall_checks, (now + self.stall, device, task))
        return watch

    def leave(self, device: str, now: float) -> None:
        """The device's connection is gone. Its lease, if it has one, lives on for what is left of
        its grace."""
        if device in self.tasks and device not in self.absent:
            watch = self.watch(device, now)
            watch.leave(now)
            self._await_return(device, now + watch.grace)

    def come_back(self, device: str, now: float) -> None:
        """The device, which has a lease, is connected again."""
        self.absent.pop(device, None)
        self.watch(device, now).come_back(self.grace, now)

    def next_lost(self, now: float) -> str | None:
        """Return a device that was away for longer than its grace, or None. Its lease is to be
        dropped at once."""
        while self._lost_checks and self._lost_checks[0][0] <= now:
            _, device, task = heappop(self._lost_checks)
            expires = self.absent.get(device)
            if expires is not None and self.tasks[device] == task:
                if expires <= now:
                    return device
                self._await_return(device, expires)  # it came back and left again meanwhile
        return None

    def next_stalled(self, now: float) -> str | None:
        """Return a device that made no progress for too long, or None. Its lease is to be dropped
        at once."""
        while self._stall_checks and self._stall_checks[0][0] <= now:
            _, device, task = heappop(self._stall_checks)
            watch = self.watches.get(device)
            if watch is None or watch.task != task:
                continue
            again = watch.moved + self.stall
            if watch.waits is not None or watch.gone is not None:
                again = now + self.stall / CHECKS_PER_STALL
            if again <= now:
                return device
            heappush(self._stall_checks, (again, device, task))
        return None

    def next_expired(self, now: float) -> str | None:
        """Return a device whose lease has outlived its round and its terms, or None. It is to be
        dropped at once."""
        device = next(iter(self.terms), None) if self.outlive else None
        return None if device is None or self.terms[device].ends > now else device

    def _await_return(self, device: str, expires: float) -> None:
        self.absent[device] = expires
        heappush(self._lost_checks, (expires, device, self.tasks[device]))
