"""The round engine: events in, commands out. It opens no socket, reads no clock and starts no task.

Time is handed to every event as seconds on one clock that never goes back; what to do next comes back as a list of
commands, to be carried out in order. The websocket server and the simulator are two drivers of it.

Synchronous rounds after Bonawitz et al., "Towards Federated Learning at Scale" (arXiv 1902.01046): more devices than
the goal are selected, the round closes at the goal count or at its deadline, and below the minimum it is abandoned.
A device's task is a lease: it ends by an accepted report, a failure, the device's loss, or the end of the round.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import repeat
from struct import unpack
from typing import Literal, NamedTuple

from fleetlearn_protocol.errors import Code, ProtocolError

from fleetlearn_coordinator.idle import Idle


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
    """How long a lease outlives its device's connection."""
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

LOST, LATE, SURPLUS = "lost", "late", "surplus"
"""Causes of the engine's own: the device vanished; the deadline passed; the goal was reached without it."""
RESTART_GRACE = 90.0
"""Seconds that a lease waits for its device after the coordinator restarted: above a device's longest back-off."""


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
    resting: set[str] = field(default_factory=set)
    """Connected devices that had their turn in this round."""
    _turns: set[str] = field(default_factory=set)
    """Devices that had a lease in this round."""
    _serial: int = 0
    _gather_until: float | None = None
    _graces: deque[tuple[float, str, str]] = field(default_factory=deque)
    """(when, device, task) in order of time: leases that lose their device unless it returns."""

    # --- what a driver may ask ---

    def wake_at(self) -> float | None:
        """When ``tick`` is next due, or None."""
        due = self._graces[0][0] if self._graces else None
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
        self._turns = {*self.leases, *self.accepted.values(), *(device for device, _ in self.dropped.values())}
        self._serial = len(self.leases) + len(self.accepted) + len(self.dropped)
        return self._advance(now)

    def check_in(self, device: str, held: str | None, now: float) -> list[Command]:
        """The device is connected; ``held`` is the task whose finished update it still has."""
        if self.phase is Phase.FINISHED:
            return []
        task = self.leases.get(device)
        if task is not None:
            self.absent.pop(device, None)
            return [] if held == task else [*self._assign([device], [task], again=True)]
        if held is not None and self._revive(device, held):
            return []
        if device in self._turns and self.phase is Phase.OPEN:
            self.resting.add(device)
        elif device not in self.idle:
            self.idle.add(device)
        return self._advance(now)

    def disconnect(self, device: str, now: float) -> list[Command]:
        """The device's connection is gone. Its lease, if it has one, lives on for the grace period."""
        self.idle.discard(device)
        self.resting.discard(device)
        if device in self.leases and device not in self.absent:
            self._await_return(device, now + self.settings.grace)
        return self._advance(now)

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
        self.accepted.update(zip(tasks, devices[:good], strict=False))
        if good < len(tasks):
            task, device = tasks[good], devices[good]
            raise ValueError(f"task {task} of {device} is not wanted in round {self.round} ({self.phase})")
        if len(self.accepted) < self.settings.goal and self.leases:
            return []  # their slots stay taken, and the round goes on
        return self._advance(now)

    def end(self, device: str, task: str, cause: str, now: float) -> list[Command]:
        """The device failed its task or its update was rejected: its slot comes back. Harmless when repeated."""
        if self.leases.get(device) != task:
            return []
        return [self._drop(device, cause), *self._advance(now)]

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
        if free > 0 and self.idle:
            commands += self._lease_out(min(free, len(self.idle)))
        if not self.leases and len(self.accepted) >= self.settings.minimum:
            return commands + self._close(now, by_deadline=False)  # nobody is left to wait for
        return commands

    def _may_open(self, now: float) -> bool:
        ready = len(self.idle)
        if ready >= self.settings.goal:  # devices that check in later fill what is free
            return True
        if ready < self.settings.minimum:
            self._gather_until = None
            return False
        if self._gather_until is None:
            self._gather_until = now + self.settings.gather
        return now >= self._gather_until

    def _lease_out(self, count: int) -> list[Assign]:
        """Pick idle devices. Which ones follows from the seed, the round and the idle devices alone."""
        devices = self.idle.take(_picks(self.settings.seed, self.round, self._serial + 1, count))
        begin = f"{self.prefix}{self.round}-"
        tasks = [f"{begin}{serial}" for serial in range(self._serial + 1, self._serial + 1 + count)]
        self.leases.update(zip(devices, tasks, strict=True))
        self._turns.update(devices)
        self._serial += count
        return self._assign(devices, tasks, again=False)

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

    def _release(self, devices: Sequence[str]) -> None:
        """Their leases are over; those that are connected had their turn."""
        for device in devices:
            del self.leases[device]
        there = [device for device in devices if self.absent.pop(device, None) is None] if self.absent else devices
        self.resting.update(there)

    def _drop(self, device: str, cause: str) -> Ended:
        task = self.leases[device]
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
        self.idle.update(self.resting)
        for remembered in (self.resting, self._turns, self.accepted, self.dropped, self._graces):
            remembered.clear()
        self._serial = 0


@lru_cache(2)
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


def _picks(seed: int, round: int, first: int, count: int) -> Sequence[int]:
    """64 random bits for each of so many picks from number ``first`` on; a digest has eight."""
    found: list[int] = []
    for block in range(first // 8, (first + count - 1) // 8 + 1):
        drawn = _start(seed, round, "picks", 64).copy()
        drawn.update(str(block).encode())
        found += unpack("<8Q", drawn.digest())
    return found[first % 8 : first % 8 + count]
