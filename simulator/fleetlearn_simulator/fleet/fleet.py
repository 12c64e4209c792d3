"""The virtual driver of the coordinator's engine: a heap of events in place of sockets and clocks.

What happens to a device in its task is known when the task is assigned; the events are put on the heap and come true
unless the round ends first. The engine hears of them as the websocket server would tell it. Devices train when the
first of their reports is due, those together that the round still has room for.

At most ``population.connected`` devices are connected at a time, the others are told to come back later: so a round's
cost follows its cohort, however large the population is.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import count, repeat
from math import inf
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_coordinator import aggregator
from fleetlearn_coordinator.engine import Abandon, Assign, Cancel, Command, Commit, Ended, Engine, Finish, Opened, Phase
from fleetlearn_coordinator.optimizers import change_norm
from fleetlearn_coordinator.run import settings_of
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import EVAL, TRAIN
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random as draw
from fleetlearn_simulator.data.factory import Source
from fleetlearn_simulator.fleet.round_work import Flights, Tally, Training, flights_of
from fleetlearn_simulator.population.availability import online, until
from fleetlearn_simulator.population.failures import CAUSES, CORRUPTIONS, fates
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend, Task, means, steps_of
from fleetlearn_simulator.training.trained_devices import Outcomes

RETRY, MAX_RETRY = 60.0, 3600.0
"""Seconds after which free places among the connected devices are filled again, at least and at most: a tenth of the
time since a round ended."""
BACK_OFF = 30.0
"""Most seconds until a device is back after the coordinator restarted: its delays are spread evenly below it."""
IN_VAIN = 1000
"""Rounds that come to nothing, one after the other, after which training is given up."""
IDLE = 366 * 86400.0
"""Seconds without a round after which nothing is expected to happen any more."""
TRIES = 64
"""Draws for each device that comes, at most; where few are online and not connected, some places stay free."""
GIVEN_UP = ("straggler", "out-of-time")
"""Causes of which the device tells the coordinator; else it is gone without a word."""
Note = Callable[[Sequence[Any]], None]


class Event(NamedTuple):
    """Something that comes true at its time."""

    time: float
    serial: int
    kind: str
    device: int = -1
    flights: Flights | None = None
    """Of which the task in ``row`` ends, if its device has it then."""
    row: int = -1


class Assigned(msgspec.Struct, frozen=True, gc=False):
    """A line of the event log."""

    time: float
    event: str
    device: int
    task: str


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """A line of the event log."""

    time: float
    event: str
    device: int
    task: str
    steps: int


class Fleet:
    """A population, the engine, and the time."""

    def __init__(
        self, scenario: Scenario, bundle: Bundle, source: Source, backend: Backend, task: Task, note: Note
    ) -> None:
        self.scenario, self.plan, self.bundle = scenario, scenario.plan, bundle
        self.source, self.backend, self.task, self._note = source, backend, task, note
        self.optimizer = self.plan.optimizer()
        self.model: Vector = bundle.parameters()[: bundle.manifest.size].copy()
        self.state = self.optimizer.init(self.model)
        self.earlier: Vector = self.model
        """The model before this round's: stale updates are of it."""
        self.engine = Engine(settings_of(self.plan), prefix="s-")
        self.now = self.last = 0.0
        """``last``: when a round ended, or training began."""
        self.finished: str | None = None
        self.until = 0.0
        """When the engine's next tick is due."""
        self.in_vain = 0
        """Rounds that were abandoned since the last that was not."""
        self.connected: dict[int, float] = {}
        """Device -> when it goes offline."""
        self.away: dict[int, float] = {}
        """Device -> when it is back, after the coordinator's restart."""
        self.heap: list[Event] = []
        self.holds: dict[int, tuple[Flights, int]] = {}
        """Device -> its task, while that is out, and its row."""
        self._begin_round()
        self.down = False
        self.history: list[dict[str, Any]] = []
        """The summaries of the rounds."""
        self.serial = self.arrivals = 0
        self.filling = True
        """Whether a filling up of the free places is on the heap."""
        self._waiting: list[Event] = []
        """What devices would say while the coordinator is down."""
        self.has_bundle: set[int] = set()
        self.bundle_bytes = sum(bundle.manifest.files[file].size for file in (TRAIN, EVAL))
        self.round_ended: Callable[[dict[str, Any]], None] = lambda summary: None
        """Called with each round's summary."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called when a round's model is made and no task is out, before the engine goes on."""
        for time in scenario.coordinator.crashes:
            self._expect(time, "crash")
        self._expect(0.0, "fill")

    # Time

    def advance(self) -> bool:
        """Let the next thing happen. False: training is over, or nothing will ever happen again."""
        if self.finished is not None:
            return False
        wake = None if self.down else self.engine.wake_at()
        self.until = inf if wake is None else max(wake, self.now)
        due = self.heap[0].time if self.heap else inf
        if min(due, self.until) > self.last + IDLE:
            self.finished = "no round began for a year: too few devices are online at a time"
        elif due <= self.until:
            event = heapq.heappop(self.heap)
            self.now = max(self.now, event.time)
            HANDLERS[event.kind](self, event)
        else:
            self.now = self.until
            self.carry_out(self.engine.tick(self.now))
        return self.finished is None

    def note(self, event: str, **more: Any) -> None:
        """Put it in the event log."""
        self._note([{"time": self.now, "event": event, **more}])

    def _begin_round(self) -> None:
        self.tally = Tally(len(self.model), self.plan.round.max_weight, self.now)
        self.training = Training(self.backend, self.model, self.earlier, self.scenario.seed)

    def _expect(self, time: float, kind: str, device: int = -1, flights: Flights | None = None, row: int = -1) -> None:
        if time < inf:
            self.serial += 1
            heapq.heappush(self.heap, Event(time, self.serial, kind, device, flights, row))

    # Devices that come and go

    def _fill(self, event: Event) -> None:
        """Let devices that are online check in, while there is room for more connections."""
        room = self.scenario.population.connected - len(self.connected)
        if room > 0 and not self.down:
            for device, end in self._arriving(room):
                self.connected[device] = end
                self._expect(end, "leave", device)
                self.carry_out(self.engine.check_in(name_of(device), None, self.now))
        self.filling = False
        self._fill_later()

    def _fill_later(self) -> None:
        most = min(self.scenario.population.connected, self.scenario.population.size)
        if not self.filling and len(self.connected) < most:
            self.filling = True
            self._expect(self.now + min(max(RETRY, (self.now - self.last) / 10), MAX_RETRY), "fill")

    def _arriving(self, room: int) -> list[tuple[int, float]]:
        """Devices that are online and not connected, in a random order, with the ends of their times online."""
        size, seed = self.scenario.population.size, self.scenario.seed
        if size <= 2 * self.scenario.population.connected:
            there = self._new(np.arange(size))
            luck = draw.uniform(seed, "arrival", np.array(there, np.int64), self.arrivals)
            self.arrivals += 1
            chosen = [there[place] for place in np.argsort(luck, kind="stable")[:room].tolist()]
        else:
            found: dict[int, None] = {}
            count = more = 0
            while len(found) < room and more * TRIES >= count:
                count, before = max(64, 2 * (room - len(found))), len(found)
                drawn = draw.uniform(seed, "arrival", self.arrivals + np.arange(count))
                self.arrivals += count
                found |= dict.fromkeys(self._new((drawn * size).astype(np.int64)))
                more = len(found) - before
            chosen = [*found][:room]
        ends = until(self.scenario, np.array(chosen, np.int64), self.now)
        return [(device, float(end)) for device, end in zip(chosen, ends, strict=True)]

    def _new(self, devices: NDArray[np.int64]) -> list[int]:
        """Those of them that may connect now."""
        # One that vanished is away until its task is given up: it would be given that again.
        held = self.engine.leases
        return [row for row in self._online(devices) if row not in self.connected and name_of(row) not in held]

    def _online(self, devices: NDArray[np.int64]) -> list[int]:
        there: list[int] = devices[online(self.scenario, devices, self.now)].tolist()
        return there

    def _leave(self, event: Event) -> None:
        """The device's time online is over."""
        if self.connected.get(event.device) != event.time:
            return
        self._vanish(event.device, "offline")

    def _vanish(self, device: int, cause: str) -> None:
        """The device is gone, without a word, and its task with it."""
        if device in self.holds:
            self._lost(*self.holds[device], cause)
        self.connected.pop(device, None)
        self.away.pop(device, None)
        self._fill_later()
        if not self.down:
            self.carry_out(self.engine.disconnect(name_of(device), self.now))

    def _lost(self, flights: Flights, row: int, cause: str) -> None:
        """A task came to nothing on its device; the engine finds out by itself."""
        device, task = flights.device[row], flights.task[row]
        del self.holds[device]
        self.training.drop(task)
        self.tally.causes[cause] += 1
        self.tally.wasted += self.now - flights.began[row]
        self.note("lost", device=device, task=task, cause=cause)

    # Tasks

    def _assign(self, assigned: Sequence[Assign]) -> None:
        names, tasks, _, seeds, *_ = map(list, zip(*assigned, strict=True))
        numbers, size, now = list(map(device_of, names)), len(assigned), self.now
        devices = np.array(numbers, np.int64)
        steps = steps_of(self.task, self.source.examples(devices))
        down = np.full(size, self.model.nbytes)
        if not self.has_bundle.issuperset(numbers):
            down += self.bundle_bytes * np.array([device not in self.has_bundle for device in numbers])
            self.has_bundle.update(numbers)
        found = fates(
            self.scenario,
            devices,
            self.engine.round,
            now=now,
            deadline=self.engine.deadline,
            steps=steps,
            down=down,
            up=np.full(size, self.model.nbytes),
        )
        self.tally.down += int(down.sum())
        self.tally.assigned.update(found.tier.tolist())
        self._note(list(map(Assigned, repeat(now), repeat("assigned"), numbers, tasks)))
        flights = Flights(
            (now + found.seconds).tolist(),
            [*range(self.serial + 1, self.serial + 1 + size)],
            numbers,
            names,
            tasks,
            [self.engine.round] * size,
            seeds,
            [now] * size,
            [CAUSES[code] for code in found.cause.tolist()],
            [None if own >= most else own for own, most in zip(found.steps.tolist(), steps.tolist(), strict=True)],
            [CORRUPTIONS[code] for code in found.corrupt.tolist()],
            found.factor.tolist(),
            found.tier.tolist(),
        )
        self.serial += size
        flights = flights.take(sorted(range(size), key=flights.ends.__getitem__))
        self.holds.update(zip(flights.device, zip(repeat(flights), count()), strict=False))
        if not self.training.started:  # those that come later, one by one, train together when one of them is due
            self.training.begin(flights, self._room())
        self._expect_tasks(flights, 0)

    def _room(self) -> int:
        """How many reports the round still takes."""
        return self.engine.settings.goal - len(self.engine.accepted)

    def _expect_tasks(self, flights: Flights, row: int) -> None:
        """The end of the task in that row, or of the next that is out. Those after it are expected when it is over."""
        while row < len(flights.task) and not self._out(flights, row):
            row += 1
        if row < len(flights.task) and flights.ends[row] < inf:
            event = Event(flights.ends[row], flights.serial[row], "tasks", flights.device[row], flights, row)
            heapq.heappush(self.heap, event)

    def _out(self, flights: Flights, row: int) -> bool:
        """Whether the device still has that task."""
        return self.holds.get(flights.device[row], (None, 0))[0] is flights

    def _tasks(self, event: Event) -> None:
        """The end of a task on its device, unless its round ended first; and of those with it that come next."""
        flights, row, after = event.flights, event.row, event.row + 1
        assert flights is not None
        if self._out(flights, row):
            cause = flights.cause[row]
            if cause and cause not in GIVEN_UP:
                self._vanish(event.device, cause)
            elif not self._not_now(event):
                after = self._give_up(flights, row) if cause else self._report(flights, row, self._due(event))
        if event.kind == "tasks":
            self._expect_tasks(flights, after)

    def _give_up(self, flights: Flights, row: int) -> int:
        """The device is still there, and says that it cannot do its task."""
        cause = flights.cause[row]
        self._lost(flights, row, cause)
        self.carry_out(self.engine.end(flights.name[row], flights.task[row], f"failed: {cause}", self.now))
        return row + 1

    def _report(self, flights: Flights, row: int, end: int) -> int:
        """The updates from that row to before ``end`` are at the coordinator. Returns the first row yet to come: after
        one that is refused, other things may happen first."""
        while row < end:
            found = self.training.take(flights.task[row:end])
            refused = self.tally.refuse(found)
            good = len(found) if refused is None else refused[0]
            commands = self._accept(flights, slice(row, row + good), found.take(range(good)))
            if refused is not None:
                last, row = row + len(found), row + good
                self.now = max(self.now, flights.ends[row])
                self.training.put_back(flights.task[row + 1 : last], found.take(range(good + 1, len(found))))
                self.tally.up += self.model.nbytes
                self._lost(flights, row, refused[1])
                commands = self.engine.end(flights.name[row], flights.task[row], refused[1], self.now)
                good, end = 1, row + 1
            del found  # or it would keep its memory while the next round begins
            self.carry_out(commands)
            row += good
        return row

    def _due(self, event: Event) -> int:
        """The row behind those whose reports are there before anything else can happen: the event's, and the next whose
        devices are trained. Who else is trained depends on who reported by then."""
        flights, begin, begun = event.flights, event.row + 1, self.training.begun
        assert flights is not None
        if flights.task[event.row] not in begun:
            self._train(flights, event.row)
        if event.kind != "tasks":
            return begin
        while self.heap and (held := self.heap[0].flights) is not None and not self._out(held, self.heap[0].row):
            over = heapq.heappop(self.heap)  # of a task that has ended otherwise
            if over.kind == "tasks":
                self._expect_tasks(held, over.row)
        end = bisect_right(flights.ends, self.until, begin, min(event.row + self._room(), len(flights.task)))
        if self.heap:
            end = bisect_left(flights.ends, self.heap[0].time, begin, end)
        tasks, devices = flights.task[begin:end], flights.device[begin:end]
        if all(map(begun.__contains__, tasks)) and self.away.keys().isdisjoint(devices):
            return end
        rows = zip(count(begin), tasks, devices, strict=False)
        return next(row for row, task, device in rows if task not in begun or device in self.away)

    def _train(self, flights: Flights, row: int) -> None:
        """Begin with the task in that row, and with others that are out whose reports are due next."""
        begun, room, task = self.training.begun, self._room(), flights.task[row]
        others = [
            (held, at)
            for held, at in self.holds.values()
            if not held.cause[at] and held.task[at] != task and held.task[at] not in begun
        ]
        others.sort(key=lambda hold: hold[0].ends[hold[1]])
        due = [(flights, row), *others[: self.training.most(room) - 1]]
        self.training.begin(flights_of(held.row(at) for held, at in due), room)

    def _accept(self, flights: Flights, rows: slice, found: Outcomes) -> list[Command]:
        times = flights.ends[rows]
        if not times:
            return []
        if times[0] < self.now:
            times = [max(self.now, time) for time in times]
        self.now = times[-1]
        self.tally.up += self.model.nbytes * len(times)
        self.tally.accept(flights, rows, found, times)
        devices, tasks = flights.device[rows], flights.task[rows]
        self._note(list(map(Accepted, times, repeat("accepted"), devices, tasks, found.steps.tolist())))
        for device in devices:
            del self.holds[device]
        return self.engine.accept_many(flights.name[rows], tasks, self.now)

    def _not_now(self, event: Event) -> bool:
        """Whether the coordinator cannot hear it yet: it is down, or the device is not connected to it again."""
        if self.down:
            self._waiting.append(event)
            return True
        back = self.away.get(event.device)
        if back is not None and back > self.now:
            self._expect(back, "task", event.device, event.flights, event.row)
            return True
        return False

    # What the engine says

    def carry_out(self, commands: Iterable[Command]) -> None:
        waiting = list(commands)
        while waiting:
            assigned = [row for row in waiting if isinstance(row, Assign) and not row.again]
            rest, waiting = [row for row in waiting if not isinstance(row, Assign)], []
            for command in rest:
                match command:
                    case Opened(number):
                        self._begin_round()
                        self.note("opened", round=number, connected=len(self.connected))
                    case Ended(device, task, _, cause):
                        self._ended(device_of(device), task, cause)
                    case Cancel():
                        pass  # what ended is on its device too
                    case Commit(number, dropped):
                        waiting = self._commit(number, dropped)
                    case Abandon(number, dropped, text):
                        self._close("abandoned", number, dropped, 0.0)
                        self.note("abandoned", round=number, text=text)
                        self.in_vain += 1
                        if self.in_vain >= IN_VAIN:
                            self.finished = f"{self.in_vain} rounds one after the other were abandoned: {text}"
                            return
                    case Finish(reason):
                        self.finished = reason
            if assigned:
                self._assign(assigned)

    def _ended(self, device: int, task: str, cause: str) -> None:
        flights, row = self.holds.get(device, (None, 0))
        if flights is not None and flights.task[row] == task:  # it is late, or one too many: the device stays
            self._lost(flights, row, cause)

    def _commit(self, number: int, dropped: dict[str, int]) -> list[Command]:
        self.tally.add_up()
        before = self.model
        self.state, self.model = self.optimizer.apply(self.state, aggregator.mean(self.tally.total), before)
        self.earlier, self.in_vain = before, 0
        change = change_norm(before, self.model)
        summary = self._close("committed", number, dropped, change)
        self.note("committed", round=number, change=change)
        self.before_commit()
        return self.engine.committed(self.now, change=change, metrics=summary["metrics"])

    def _close(self, how: str, number: int, dropped: dict[str, int], change: float) -> dict[str, Any]:
        metrics = self.tally.means()
        summary: dict[str, Any] = {"train": metrics, "evaluation": {}, "metrics": metrics}
        if self.plan.local.evaluate and self.tally.devices and how == "committed":
            evaluation = self._evaluated()
            summary |= {"evaluation": evaluation, "metrics": metrics | evaluation}
        summary |= {
            "round": number,
            "how": how,
            "reports": len(self.tally.devices),
            "partial": len(self.tally.devices) - self.tally.complete(),
            "time": self.now,
            "seconds": self.now - self.tally.opened,
            "connected": len(self.connected),
            "dropped": dropped,
            **self.tally.summary(),
            "change": change,
        }
        self.history.append(summary)
        self.last = self.now
        self.round_ended(summary)
        return summary

    def _evaluated(self) -> dict[str, float]:
        """The round's model, before training, on the data of those whose reports were accepted."""
        return means(self.backend.evaluate(self.earlier, sorted(self.tally.devices)))

    # The coordinator's own failures

    def _crash(self, event: Event) -> None:
        """The coordinator's process dies. Accepted updates are safe; so are the tasks that are out."""
        if not self.down:
            self.down = True
            self.note("crash")
            self._expect(self.now + self.scenario.coordinator.restart, "restart")

    def _restart(self, event: Event) -> None:
        """It is there again, with what was on its disk; each device comes back when its back-off is over."""
        self.down = False
        self.note("restart")
        old = self.engine
        self.engine = Engine(old.settings, prefix=old.prefix, version=old.version, round=old.round)
        delays = draw.uniform(self.scenario.seed, "back off", np.array([*self.connected], np.int64), old.round)
        for device, delay in zip(self.connected, (BACK_OFF * delays).tolist(), strict=True):
            self.away[device] = self.now + delay
            self._expect(self.now + delay, "back", device)
        waiting, self._waiting = self._waiting, []
        for later in waiting:
            self._expect(self.away.get(later.device, self.now), "task", later.device, later.flights, later.row)
        if old.phase is Phase.OPEN:
            leases = [(task, device) for device, task in old.leases.items()]
            dropped = [(task, device, cause) for task, (device, cause) in old.dropped.items()]
            self.carry_out(self.engine.restore(old.round, leases, old.accepted.items(), dropped, self.now))

    def _back(self, event: Event) -> None:
        if self.away.get(event.device) == event.time and not self.down:
            del self.away[event.device]
            self.carry_out(self.engine.check_in(name_of(event.device), None, self.now))


HANDLERS: dict[str, Callable[[Fleet, Event], None]] = {
    "fill": Fleet._fill,
    "leave": Fleet._leave,
    "tasks": Fleet._tasks,
    "task": Fleet._tasks,
    "crash": Fleet._crash,
    "restart": Fleet._restart,
    "back": Fleet._back,
}


def name_of(device: int) -> str:
    """The device's name in the engine: sorted as the numbers are."""
    return f"d{device:08d}"


@lru_cache(2**16)  # a fraction of the cost, as the same devices come again
def device_of(name: str) -> int:
    return int(name[1:])
