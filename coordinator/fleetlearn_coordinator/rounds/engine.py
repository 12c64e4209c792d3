"""The round engine: events in, commands out. It opens no socket, reads no clock and starts no task.

Time is handed to every event as seconds on one clock that never goes back; what to do next comes back as a list of
commands, to be carried out in order. The websocket server and the simulator are two drivers of it.

Synchronous rounds after Bonawitz et al., "Towards Federated Learning at Scale" (arXiv 1902.01046): more devices than
the goal are selected, the round closes at the goal count or at its deadline, and below the minimum it is abandoned.
A device's task is a lease: it ends by an accepted report, a failure, the device's loss, a standstill, or the end of
the round. Devices whose tasks came to nothing are chosen less (standing.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import repeat
from math import inf
from struct import unpack
from typing import Literal, NamedTuple

from fleetlearn_protocol.errors import Code, ProtocolError

from fleetlearn_coordinator.rounds.standing import DOUBT, Standing
from fleetlearn_coordinator.rounds.waiting_devices import Idle


class Settings(NamedTuple):
    """What the engine needs of a plan. Durations are seconds."""

    goal: int
    """Reports that close the round."""
    cohort: int
    """Most slots of a round: leases that run plus reports accepted. goal x over-selection."""
    minimum: int
    """Fewest reports of a round that counts."""
    deadline: float
    """Length of a round."""
    grace: float
    """How long a lease outlives its device's connection, all absences together, until the device makes progress."""
    gather: float
    """How long to wait for ``goal`` devices once ``minimum`` are there."""
    seed: int = 0
    rounds: int | None = None
    """Stop after this many committed rounds."""
    metric: str | None = None
    """Stop once this metric is at least ``target``, or at most where ``below``."""
    target: float = 0.0
    below: bool = False
    epsilon: float = 0.0
    """Stop once the L2 norm of the model's change is below this."""
    stall: float = inf
    """How long a lease lives without progress. Infinite: ``progress`` is not told, and no device is remembered."""


class Phase(StrEnum):
    GATHERING = "gathering"
    """No round is open; waiting for enough devices."""
    OPEN = "open"
    COMMITTING = "committing"
    """The round is closed; the driver owes ``committed``."""
    FINISHED = "finished"


class Opened(NamedTuple):
    """A round began."""

    round: int


class Assign(NamedTuple):
    """Give the device its task: a new one, or again the one it holds, after it came back without its work."""

    device: str
    task: str
    round: int
    seed: int
    deadline: float
    """When the round ends, on the engine's clock."""
    again: bool


class Ended(NamedTuple):
    """A lease ended without an accepted report."""

    device: str
    task: str
    round: int
    cause: str


class Cancel(NamedTuple):
    """Tell a connected device that its task is no longer wanted."""

    device: str
    task: str
    code: Code
    text: str


class Commit(NamedTuple):
    """Make the new model of the accepted reports, then call ``committed``."""

    round: int
    dropped: dict[str, int]
    """How many of the round's leases ended without an accepted report, by cause."""


class Abandon(NamedTuple):
    """The round ended below its minimum; the model stays."""

    round: int
    dropped: dict[str, int]
    text: str


class Finish(NamedTuple):
    """Training is over, by one of the stop rules."""

    reason: str
    """For people."""
    rule: Literal["rounds", "epsilon", "metric"]
    value: float
    """The rounds done, the L2 norm of the model's change, or the metric's value."""
    limit: float
    """What the rule compares it with."""
    metric: str | None = None
    """The metric's name, where the rule is one of a metric."""


Command = Opened | Assign | Ended | Cancel | Commit | Abandon | Finish

LOST, LATE, SURPLUS, STALLED = "lost", "late", "surplus", "stalled"
"""Causes of the engine's own: the device vanished; the deadline passed; the goal was reached without it; no step was
made and no byte was moved for ``Settings.stall`` seconds."""
STOPPED = "failed: stopping"
"""The cause where a device gave its task back because it stops: that was no turn, should it return in this round."""
RETURNS = 4
"""Each absence takes at least this part of the grace, so that a lease outlives so many returns without progress."""
LOOKS = 4
"""A lease that cannot stall now, since it waits for the coordinator or its device is away, is looked at again after
this part of ``Settings.stall``."""
RESTART_GRACE = 90.0
"""Seconds that a lease waits for its device after the coordinator restarted: above a device's longest back-off."""


@dataclass(slots=True)
class Watch:
    """How a lease gets on. Time that is not the device's to answer for does not count: ``moved`` is put off by it."""

    task: str
    moved: float
    """When it last made progress, or began."""
    grace: float
    """What is left of it."""
    progressed: bool = False
    """Whether it ever made progress."""
    waits: float | None = None
    """Since when it has been the coordinator's turn to act: to grant an upload, or to send a content."""
    gone: float | None = None
    """Since when the device has not been connected."""
    furthest: dict[str, int] = field(default_factory=dict)
    """What moved -> how far it came: more than that is progress, the same again is not."""


@dataclass(slots=True)
class Engine:
    """The state of one training run. ``version`` counts committed rounds; ``round`` numbers all of them from 1."""

    settings: Settings
    prefix: str = "t"
    """Of task ids; to be the run's own, so that an update of another run cannot be taken for one of this."""
    version: int = 0
    round: int = 0
    phase: Phase = Phase.GATHERING
    deadline: float = 0.0
    leases: dict[str, str] = field(default_factory=dict)
    """Device -> its running task: its hold on one slot of the open round."""
    absent: dict[str, float] = field(default_factory=dict)
    """Device with a lease that is not connected -> when its slot comes back."""
    accepted: dict[str, str] = field(default_factory=dict)
    """Task -> device, of this round's accepted reports."""
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Task -> (device, cause), of this round's leases that ended otherwise."""
    idle: Idle = field(default_factory=Idle)
    """Connected devices that may be given a task. Sorted, so that who is picked does not depend on who came first."""
    doubted: dict[int, Idle] = field(default_factory=dict)
    """Level in ``standing`` -> devices that might be idle as well, were it not for what their last tasks came to."""
    standing: Standing = field(default_factory=Standing)
    resting: set[str] = field(default_factory=set)
    """Connected devices that had their turn in this round."""
    _turns: set[str] = field(default_factory=set)
    """Devices that had a lease in this round."""
    _serial: int = 0
    _gather_until: float | None = None
    _graces: deque[tuple[float, str, str]] = field(default_factory=deque)
    """(when, device, task) in order of time: leases that lose their device unless it returns."""
    _watches: dict[str, Watch] = field(default_factory=dict)
    """Device -> its lease's, where progress is told; else of devices that were disconnected."""
    _stalls: list[tuple[float, str, str]] = field(default_factory=list)
    """(when, device, task), a heap: leases to be looked at for progress."""
    _short: set[str] = field(default_factory=set)
    """Devices whose lease began in the second half of its round."""
    _held_up: int = 0
    """How many of this round's leases kept their slots and came to nothing: stalled, late, or lost after returns."""

    # --- what a driver may ask ---

    def wake_at(self) -> float | None:
        """When ``tick`` is next due, or None."""
        due = self._graces[0][0] if self._graces else None
        if self._stalls and (due is None or self._stalls[0][0] < due):
            due = self._stalls[0][0]
        at = self.deadline if self.phase is Phase.OPEN else self._gather_until
        return at if due is None else due if at is None else min(due, at)

    def causes(self) -> dict[str, int]:
        """How many of this round's leases ended without an accepted report, by cause."""
        return dict(Counter(cause for _, cause in self.dropped.values()))

    def finish(self, change: float, metrics: Mapping[str, float]) -> Finish | None:
        """Return the stop rule that is met at this version, if one is. ``change`` and ``metrics`` are those of the last
        committed round, as for ``committed``."""
        rule = self.settings
        if rule.rounds is not None and self.version >= rule.rounds:
            return Finish(f"{self.version} rounds done", "rounds", self.version, rule.rounds)
        if change < rule.epsilon:
            reason = f"the model's change, {change:.3g}, is below {rule.epsilon:.3g}"
            return Finish(reason, "epsilon", change, rule.epsilon)
        if rule.metric is not None and rule.metric in metrics:
            value = metrics[rule.metric]
            if value <= rule.target if rule.below else value >= rule.target:
                reason = f"{rule.metric} is {value:.6g}; the target is {rule.target:.6g}"
                return Finish(reason, "metric", value, rule.target, rule.metric)
        return None

    # --- events ---

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
        self.accepted = dict(accepted)
        self.dropped = {task: (device, cause) for task, device, cause in dropped}
        expires = now + max(self.settings.grace, RESTART_GRACE)
        for task, device in leases:
            self.leases[device], self.absent[device] = task, expires
            self._graces.append((expires, device, task))
        for device, cause in self.dropped.values():
            if cause == STALLED:  # all that a restart leaves of what was remembered
                self.standing.fail(device, DOUBT)
        ended = (device for device, cause in self.dropped.values() if cause != STOPPED)
        self._turns = {*self.leases, *self.accepted.values(), *ended}
        self._serial = len(self.leases) + len(self.accepted) + len(self.dropped)
        return self._advance(now)

    def check_in(self, device: str, held: str | None, now: float) -> list[Command]:
        """The device is connected; ``held`` is the task whose finished update it still has."""
        if self.phase is Phase.FINISHED:
            return []
        task = self.leases.get(device)
        if task is not None:
            self.absent.pop(device, None)
            self._return(device, now)
            return [] if held == task else [*self._assign([device], [task], again=True)]
        if held is not None and self._revive(device, held):
            self._watch([device], [held], now)
            return []
        if device in self._turns:  # until the round is committed or abandoned
            self.resting.add(device)
        else:
            self._queue(device)
        return self._advance(now)

    def disconnect(self, device: str, now: float) -> list[Command]:
        """The device's connection is gone. Its lease, if it has one, lives on for the grace period."""
        self.idle.discard(device)
        if self.doubted:
            for names in self.doubted.values():
                names.discard(device)
        self.resting.discard(device)
        if device in self.leases and device not in self.absent:
            watch = self._watched(device, now)
            if watch.waits is not None:
                self._end_wait(watch, now)
            watch.gone = now
            self._await_return(device, now + watch.grace)
        return self._advance(now)

    def progress(self, device: str, task: str | None, what: str, amount: int, now: float) -> None:
        """The device came so far with its task: in its steps, in a content that it fetches, in its upload.

        ``what`` tells these apart. Only more than before is progress: to do the same once more is none.
        """
        watch = self._watches.get(device)
        if watch is not None and watch.task == task and amount > watch.furthest.get(what, 0):
            watch.furthest[what] = amount
            watch.moved, watch.grace, watch.progressed = now, self.settings.grace, True

    def wait(self, device: str, now: float) -> None:
        """From now on it is the coordinator's turn to act: to grant the device's upload, or to send what it fetches.
        Meanwhile its lease, if it has one, does not stall."""
        if device in self.leases:
            watch = self._watched(device, now)
            if watch.waits is None:
                watch.waits = now

    def proceed(self, device: str, now: float) -> None:
        """It is the device's turn again. Harmless where it was."""
        watch = self._watches.get(device)
        if watch is not None:
            self._end_wait(watch, now)

    def announce(self, device: str, task: str, round: int) -> bool:
        """The device offers the update of its task. True: wanted, let it upload. False: accepted long ago.

        Raises ProtocolError (stale-round, unknown-task, not-wanted) and changes nothing.
        """
        if self.accepted.get(task) == device:
            return False
        if device not in self.leases:  # it trained on while it was away for too long
            self._revive(device, task)
        self._check(device, task, round)
        return True

    def wanted(self, device: str, task: str) -> bool:
        """Whether an update that is on its way would still be accepted."""
        return self.phase is Phase.OPEN and self.leases.get(device) == task

    def accept(self, device: str, task: str, now: float) -> list[Command]:
        """The device's update is safe. Call only where ``wanted``."""
        return self.accept_many([device], [task], now)

    def accept_many(self, devices: Sequence[str], tasks: Sequence[str], now: float) -> list[Command]:
        """The updates of these devices' tasks are safe, the last of them now. Call only where each is ``wanted``, for
        no more than the round has yet to get; with what ``accept`` would do of one after the other. At one that is not
        wanted it raises ValueError, and those before it are accepted."""
        good = min(len(tasks), self.settings.goal - len(self.accepted)) if self.phase is Phase.OPEN else 0
        held = list(map(self.leases.get, devices))
        if held != list(tasks) or len({*devices}) < len(devices):
            rows = enumerate(zip(devices, tasks, held, strict=True))
            good = min(good, next(row for row, (device, task, own) in rows if own != task or device in devices[:row]))
        self._release(devices[:good])
        self.standing.clear(devices[:good])
        self.accepted.update(zip(tasks, devices[:good], strict=False))
        if good < len(tasks):
            task, device = tasks[good], devices[good]
            raise ValueError(f"task {task} of {device} is not wanted in round {self.round} ({self.phase})")
        if len(self.accepted) < self.settings.goal and self.leases:
            return []  # their slots stay taken, and the round goes on
        return self._advance(now)

    def end(self, device: str, task: str, cause: str, now: float) -> list[Command]:
        """The device failed its task or its update was rejected: its slot comes back. Harmless when repeated.

        A device that stops is given nothing more until it checks in again, in this round or later."""
        if self.leases.get(device) != task:
            return []
        ended = self._drop(device, cause)
        if cause == STOPPED:
            self._turns.discard(device)
            self.resting.discard(device)
        return [ended, *self._advance(now)]

    def committed(self, now: float, *, change: float, metrics: Mapping[str, float]) -> list[Command]:
        """The driver made the round's model: ``change`` is the L2 norm of its difference, ``metrics`` the round's that
        may stop the run."""
        if self.phase is not Phase.COMMITTING:
            raise ValueError(f"no round is being committed ({self.phase})")
        self.version += 1
        finish = self.finish(change, metrics)
        self._next_round()
        if finish is not None:
            self.phase = Phase.FINISHED
            return [finish]
        return self._advance(now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        commands: list[Command] = []
        while self._graces and self._graces[0][0] <= now:
            _, device, task = self._graces.popleft()
            expires = self.absent.get(device)
            if expires is not None and self.leases[device] == task:
                if expires <= now:
                    commands.append(self._drop(device, LOST))
                else:  # it came back and left again meanwhile
                    self._await_return(device, expires)
        while self._stalls and self._stalls[0][0] <= now:
            commands += self._look(*heappop(self._stalls)[1:], now)
        if self.phase is Phase.OPEN and now >= self.deadline:
            return commands + self._close(now, by_deadline=True)
        return commands + self._advance(now)

    # --- the rules ---

    def _advance(self, now: float) -> list[Command]:
        """Whatever the state allows now: open a round, fill its slots, close it."""
        commands: list[Command] = []
        if self.phase is Phase.GATHERING and self._may_open(now):
            self.round += 1
            self.phase, self.deadline, self._gather_until = Phase.OPEN, now + self.settings.deadline, None
            commands.append(Opened(self.round))
        if self.phase is not Phase.OPEN:
            return commands
        if len(self.accepted) >= self.settings.goal:
            return commands + self._close(now, by_deadline=False)
        free = self.settings.cohort - len(self.leases) - len(self.accepted)
        if free > 0 and (self.idle or self.doubted):
            commands += self._lease_out(free, now)
        if not self.leases and len(self.accepted) >= self.settings.minimum:
            return commands + self._close(now, by_deadline=False)  # nobody is left to wait for
        return commands

    def _may_open(self, now: float) -> bool:
        ready = len(self.idle)
        if ready >= self.settings.goal:  # devices that check in later fill what is free
            return True
        if self.doubted:  # they take part where nobody better comes
            ready += sum(map(len, self.doubted.values()))
        if ready < self.settings.minimum:
            self._gather_until = None
            return False
        if self._gather_until is None:
            self._gather_until = now + self.settings.gather
        return now >= self._gather_until

    def _lease_out(self, most: int, now: float) -> list[Assign]:
        """Pick idle devices. Which ones follows from the seed, the round, the idle devices and what is remembered."""
        begin = f"{self.prefix}{self.round}-"
        if self.doubted or self.standing.careful:
            devices = self._choose(most)
        else:
            count = min(most, len(self.idle))
            devices = self.idle.take(_picks(self.settings.seed, self.round, self._serial + 1, count))
        tasks = [f"{begin}{serial}" for serial in range(self._serial + 1, self._serial + 1 + len(devices))]
        self.leases.update(zip(devices, tasks, strict=True))
        self._turns.update(devices)
        self._serial += len(devices)
        if self.settings.stall < inf:
            self._watch(devices, tasks, now)
            if self.deadline - now < self.settings.deadline / 2:
                self._short.update(devices)
        return self._assign(devices, tasks, again=False)

    def _choose(self, most: int) -> list[str]:
        """Pick where tasks came to nothing lately, or a round was held up by such tasks.

        In a careful round the slots that the goal needs go to proven devices first. A few of the others are tried, and
        so are a few of those in doubt; no more than the round can spare. Who is in doubt fills what is left only where
        the round would be below its minimum.
        """
        rule, standing = self.settings, self.standing
        draws = list(_picks(rule.seed, self.round, self._serial + 1, most))
        spare, chosen = (rule.cohort - rule.goal + 1) // 2, list[str]()
        if self.doubted and not self._serial and most < len(self.idle):
            count = spare or 1 - bool(standing.careful)
            chosen += self._trials(_picks(rule.seed, self.round, 1, count, "trials"))
        if standing.careful:
            known = sorted(device for device in standing.proven if device in self.idle)
            unproven = sum(device not in standing.proven for device in self.leases) + len(chosen)
            count = min(most - len(chosen) - max(0, spare - unproven), len(known))
            picked = Idle(known).take(draws[len(chosen) : len(chosen) + max(0, count)])
            for device in picked:
                self.idle.discard(device)
            chosen += picked
        chosen += self.idle.take(draws[len(chosen) : len(chosen) + len(self.idle)])
        if len(self.accepted) < rule.minimum:
            for level in sorted(self.doubted):
                names = self.doubted[level]
                chosen += names.take(draws[len(chosen) : len(chosen) + len(names)])
        return chosen

    def _trials(self, draws: Iterable[int]) -> list[str]:
        """Devices in doubt that get another chance though others are idle: each draw names one, which has it with
        probability 2^-level."""
        chosen = []
        for number in draws:
            place = number % max(1, sum(map(len, self.doubted.values())))
            for level, names in sorted(self.doubted.items()):
                if place < len(names):
                    if number >> (64 - level) == 0:
                        chosen += names.take([place])
                    break
                place -= len(names)
        return chosen

    def _queue(self, device: str) -> None:
        """The connected device may be given a task from now on."""
        if self.doubted:
            for names in self.doubted.values():  # it may be there, by what was known when it came
                names.discard(device)
        level = self.standing.level(device) if self.standing.points else 0
        if level:
            self.doubted.setdefault(level, Idle()).add(device)
        elif device not in self.idle:
            self.idle.add(device)

    def _assign(self, devices: Sequence[str], tasks: Sequence[str], *, again: bool) -> list[Assign]:
        # Not of the task: a device trains the same way in a round whichever slot it was given.
        seeds = _seeds(self.settings.seed, self.round, devices)
        rows = zip(devices, tasks, repeat(self.round), seeds, repeat(self.deadline), repeat(again), strict=False)
        return list(map(partial(tuple.__new__, Assign), rows))  # a third of the cost of calling the type

    def _revive(self, device: str, task: str) -> bool:
        """A lost device returns with its work done: it may have a slot back while one is free."""
        free = len(self.leases) + len(self.accepted) < self.settings.cohort
        if self.phase is not Phase.OPEN or not free or self.dropped.get(task) != (device, LOST):
            return False
        del self.dropped[task]
        self.resting.discard(device)
        self._short.discard(device)
        self.leases[device] = task
        return True

    def _check(self, device: str, task: str, round: int) -> None:
        """Raise ProtocolError where the device does not hold the task, with the reason."""
        if self.leases.get(device) == task:
            return
        if task in self.dropped and self.dropped[task][0] == device:
            raise ProtocolError(
                Code.NOT_WANTED, f"task {task} ended ({self.dropped[task][1]}); its slot was given back"
            )
        if round != self.round or self.phase is not Phase.OPEN:
            at = f"round {self.round} is {self.phase}" if self.round else "no round has begun"
            raise ProtocolError(Code.STALE_ROUND, f"task {task} is of round {round}; {at}")
        raise ProtocolError(Code.UNKNOWN_TASK, f"task {task} was not given to device {device} in round {round}")

    def _await_return(self, device: str, expires: float) -> None:
        self.absent[device] = expires
        entry = (expires, device, self.leases[device])
        if self._graces and entry < self._graces[-1]:  # only beside the longer graces of a restart
            self._graces = deque(sorted([*self._graces, entry]))
        else:
            self._graces.append(entry)

    def _watch(self, devices: Iterable[str], tasks: Iterable[str], now: float) -> None:
        """Follow what these leases do, if that is told."""
        stall, grace = self.settings.stall, self.settings.grace
        for device, task in zip(devices, tasks, strict=True):
            self._watches[device] = Watch(task, now, grace)
            if stall < inf:
                heappush(self._stalls, (now + stall, device, task))

    def _watched(self, device: str, now: float) -> Watch:
        """The watch of the device's lease. After a restart, and where progress is not told, it begins here."""
        watch = self._watches.get(device)
        if watch is None:
            self._watch([device], [self.leases[device]], now)
            watch = self._watches[device]
        return watch

    def _return(self, device: str, now: float) -> None:
        """The device with a lease is connected again. Its absence is taken off the grace, which progress restores."""
        watch = self._watched(device, now)
        self._end_wait(watch, now)
        if watch.gone is not None:
            away = now - watch.gone
            watch.moved += away
            watch.grace -= max(away, self.settings.grace / RETURNS)
            watch.gone = None

    def _end_wait(self, watch: Watch, now: float) -> None:
        if watch.waits is not None:
            watch.moved += now - max(watch.waits, watch.moved)
            watch.waits = None

    def _look(self, device: str, task: str, now: float) -> list[Command]:
        """End the lease if it stalled; else look again when it might have."""
        watch = self._watches.get(device)
        if watch is None or watch.task != task:
            return []
        again = watch.moved + self.settings.stall
        if watch.waits is not None or watch.gone is not None:
            again = now + self.settings.stall / LOOKS
        if again > now:
            heappush(self._stalls, (again, device, task))
            return []
        text = f"no step and no byte for {self.settings.stall:g} s (round.stall); the slot is given to another device"
        return [self._drop(device, STALLED), Cancel(device, task, Code.NOT_WANTED, text)]

    def _judge(self, device: str, cause: str) -> None:
        """Remember that the device's lease ends without an accepted report."""
        watch = self._watches.get(device)
        waits = watch is not None and watch.waits is not None  # for the coordinator: it is not to blame
        held_up = cause == STALLED or (cause == LATE and device not in self._short and not waits)
        if cause == LOST and watch is not None:  # it came back, and did nothing
            held_up = not watch.progressed and watch.grace < self.settings.grace
        self._held_up += held_up
        if held_up or cause not in (SURPLUS, LATE):
            self.standing.fail(device, DOUBT if held_up else 1)

    def _release(self, devices: Sequence[str]) -> None:
        """Their leases are over; those that are connected had their turn."""
        for device in devices:
            del self.leases[device]
        if self._watches:
            for device in devices:
                self._watches.pop(device, None)
        there = [device for device in devices if self.absent.pop(device, None) is None] if self.absent else devices
        self.resting.update(there)

    def _drop(self, device: str, cause: str) -> Ended:
        task = self.leases[device]
        if self.settings.stall < inf:
            self._judge(device, cause)
        self._release([device])
        self.dropped[task] = (device, cause)
        return Ended(device, task, self.round, cause)

    def _close(self, now: float, *, by_deadline: bool) -> list[Command]:
        commands: list[Command] = []
        what = "its deadline has passed" if by_deadline else f"it has its {len(self.accepted)} reports"
        for device, task in list(self.leases.items()):
            connected = device not in self.absent
            commands.append(self._drop(device, LOST if not connected else LATE if by_deadline else SURPLUS))
            if connected:
                text = f"round {self.round} is over: {what}"
                commands.append(Cancel(device, task, Code.ROUND_OVER, text))
        if len(self.accepted) >= self.settings.minimum:
            self.phase = Phase.COMMITTING
            return [*commands, Commit(self.round, self.causes())]
        text = f"{len(self.accepted)} reports at the deadline, {self.settings.minimum} are the minimum"
        commands.append(Abandon(self.round, self.causes(), text))
        self._next_round()
        return commands + self._advance(now)

    def _next_round(self) -> None:
        self.phase = Phase.GATHERING
        self.standing.round_over(self.accepted.values(), self._held_up, self.settings.cohort - self.settings.goal)
        if self.standing.points:
            doubted = [device for device in self.resting if self.standing.level(device)]
            self.resting.difference_update(doubted)
            for device in doubted:
                self._queue(device)
        self.idle.update(self.resting)
        for remembered in (self.resting, self._turns, self.accepted, self.dropped, self._graces):
            remembered.clear()
        self._stalls.clear()
        self._short.clear()
        self._serial = self._held_up = 0


@lru_cache(4)
def _start(seed: int, round: int, what: str, size: int) -> blake2b:
    return blake2b(f"{seed}/{round}/{what} ".encode(), digest_size=size)


def _seeds(seed: int, round: int, devices: Iterable[str]) -> list[int]:
    """53 random bits (a browser's integers) for each device that follow from the run's seed, the round and the device
    alone, so that nothing needs to be stored to repeat them."""
    start, digests = _start(seed, round, "device", 8), []
    for device in devices:
        drawn = start.copy()  # half the cost of hashing all of it
        drawn.update(device.encode())
        digests.append(drawn.digest())
    return [number >> 11 for number in unpack(f"<{len(digests)}Q", b"".join(digests))]


def _picks(seed: int, round: int, first: int, count: int, what: str = "picks") -> Sequence[int]:
    """64 random bits for each of so many picks from number ``first`` on; a digest has eight."""
    found: list[int] = []
    for block in range(first // 8, (first + count - 1) // 8 + 1):
        drawn = _start(seed, round, what, 64).copy()
        drawn.update(str(block).encode())
        found += unpack("<8Q", drawn.digest())
    return found[first % 8 : first % 8 + count]
