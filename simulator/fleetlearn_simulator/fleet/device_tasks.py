"""The tasks that devices have: from their assignment to their end on the device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count, repeat
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import FAILED, Assign, Command
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import FLOAT16, FLOAT32, find_encoding
from fleetlearn_protocol.manifest import EVAL, TRAIN, Manifest

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.fleet import selection
from fleetlearn_simulator.fleet.connections import Connections
from fleetlearn_simulator.fleet.coordinator import SimulatedCoordinator
from fleetlearn_simulator.fleet.device_names import device_of
from fleetlearn_simulator.fleet.events import AcceptedLine, AssignedLine, Event, EventQueue
from fleetlearn_simulator.fleet.named_rows import named_rows
from fleetlearn_simulator.fleet.pairwise_circle import bytes_of_neighbours
from fleetlearn_simulator.fleet.round_training import MOST_GATHERED
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.fleet.transfer_limits import DownloadQueue, UploadQueue
from fleetlearn_simulator.population.failures import CAUSES, sample_task_fates
from fleetlearn_simulator.population.traits import Ints
from fleetlearn_simulator.scenario.corruptions import CORRUPTIONS
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import LocalSettings, steps_of
from fleetlearn_simulator.training.trained_devices import TrainedDevices

WriteLines = Callable[[Sequence[Any]], None]
"""Writes lines of the event log: mappings or msgspec structs."""
ENDS_TRAINING = frozenset({"download", "train", "crash", "straggler", "out-of-time"})
"""Causes by which a task fails before its training is finished."""
CarryOut = Callable[[Iterable[Command]], None]
"""Does what the engine commands."""


class TaskBytes(NamedTuple):
    """What a task moves, in bytes: one number each, or those of n tasks, (n,)."""

    model: Any
    """The model."""
    down: Any
    """The model and what a task has beside it: vectors, and what neighbours sealed for the
    device."""
    up: Any
    """A report's parts."""
    bundle: Any
    """The bundle, which a device fetches once."""


def task_bytes(plan: Plan, manifest: Manifest) -> TaskBytes:
    """Return the bytes of tasks of this bundle."""
    size = manifest.size
    # A model that travels as a difference counts as all of it.
    model = (FLOAT16 if plan.encoding.down == FLOAT16.name else FLOAT32).size(size)
    down = model + len(plan.vectors) * FLOAT32.size(size)
    if plan.clusters is not None:
        down = 0  # the device has measured the model
    if plan.secure is not None and plan.secure.mode == "pairwise":
        down += bytes_of_neighbours(plan.secure, plan.round.cohort)
    parts = {part: find_encoding(name) for part, name in plan.parts(manifest).items()}
    up = sum(
        encoding.size(encoding.elements(manifest.elements_of(part)))
        for part, encoding in parts.items()
    )
    # A computation has no graphs.
    graphs = () if plan.algorithm.computes else (TRAIN, EVAL)
    return TaskBytes(model, down, up, sum(manifest.files[file].size for file in graphs))


class DeviceTasks:
    """The tasks that devices have.

    What will happen to a device in its task is known when the task is assigned. It comes true at
    its time, unless the task ended before: because its round ended, or because its device went
    offline.
    """

    def __init__(
        self,
        scenario: Scenario,
        bundles: Sequence[Bundle],
        source: Source,
        local: LocalSettings,
        events: EventQueue,
        connections: Connections,
        coordinator: SimulatedCoordinator,
        write: WriteLines,
    ) -> None:
        """``bundles``: as the coordinator has them. ``write``: writes to the event log."""
        self.scenario, self.source, self.local = scenario, source, local
        self.events, self.connections, self.coordinator = events, connections, coordinator
        self.write = write
        self.running: dict[int, tuple[RunningTasks, int]] = {}
        """Device -> its task: the tasks it is one of, and its row there."""
        self.has_bundle: set[int] = set()
        limited, service = scenario.coordinator.limits, scenario.service
        self.downloads = DownloadQueue(service.downloads) if limited else None
        self.uploads: UploadQueue[tuple[RunningTasks, int]] | None = (
            UploadQueue(service.uploads) if limited else None
        )
        self.bytes = [task_bytes(scenario.plan, bundle.manifest) for bundle in bundles]
        """Of tasks, for each of the run's bundles; with whole tables."""
        self.named = named_rows(scenario.plan, bundles[0].manifest, source)
        coordinator.named = coordinator.training.named = self.named

    def bytes_of(self, devices: Sequence[int]) -> TaskBytes:
        """Return the bytes of a task of each device, one after the other, (n,)."""
        numbers_of = self.coordinator.bundles_of
        numbers = np.zeros(len(devices), np.int64)
        if numbers_of is not None:
            numbers = np.array(numbers_of(devices), np.int64)
        found = TaskBytes(*(np.array(column)[numbers] for column in zip(*self.bytes, strict=True)))
        if self.named is None:
            return found
        return found._replace(down=self.named.down(devices), up=self.named.up(devices))

    def begin_round(self) -> None:
        """Forget the transfers of the round before, unless its tasks go on."""
        if self.coordinator.outlive:
            return
        if self.downloads is not None and self.uploads is not None:
            self.downloads.clear()
            self.uploads.clear()

    def rounds_running(self) -> set[int]:
        """Return the rounds in which tasks were given that devices still have."""
        return {tasks.round[row] for tasks, row in self.running.values()}

    def assign(self, assigned: Sequence[Assign]) -> None:
        """Give devices their tasks, and expect how these end."""
        names, ids, rounds, seeds, *_ = map(list, zip(*assigned, strict=True))
        numbers, size, now = list(map(device_of, names)), len(assigned), self.events.now
        coordinator, costs = self.coordinator, self.coordinator.costs
        devices = np.array(numbers, np.int64)
        steps = steps_of(self.local, self.source.examples(devices))
        each = self.bytes_of(numbers)
        down = each.down
        if not self.has_bundle.issuperset(numbers):
            down += each.bundle * np.array([device not in self.has_bundle for device in numbers])
            self.has_bundle.update(numbers)
        fates = sample_task_fates(
            self.scenario,
            devices,
            self._turns(names, ids),
            now=now,
            deadline=assigned[0].deadline,
            steps=steps,
            down=down,
            up=each.up,
            queue=np.zeros_like if self.downloads is None else partial(self.downloads.wait, now),
        )
        ends = fates.seconds
        if self.uploads is not None:
            ready = fates.download + fates.train
            rest = dict(zip(ids, (ends - ready).tolist(), strict=True))
            self.uploads.expect({task: seconds for task, seconds in rest.items() if seconds > 0})
            ends = np.minimum(ends, ready)
        costs.down += int(down.sum())
        costs.assigned.update(fates.tier.tolist())
        self.write(list(map(AssignedLine, repeat(now), repeat("assigned"), numbers, ids)))
        tasks = RunningTasks(
            ends=(now + ends).tolist(),
            serial=[*range(self.events.serial + 1, self.events.serial + 1 + size)],
            device=numbers,
            name=names,
            task=ids,
            round=rounds,
            seed=seeds,
            began=[now] * size,
            cause=[CAUSES[code] for code in fates.cause.tolist()],
            steps=[
                None if own >= most else own
                for own, most in zip(fates.steps.tolist(), steps.tolist(), strict=True)
            ],
            corrupt=[CORRUPTIONS[code] for code in fates.corrupt.tolist()],
            factor=fates.factor.tolist(),
            tier=fates.tier.tolist(),
            trained=(now + fates.download + fates.train).tolist(),
        )
        self.events.serial += size
        if coordinator.kept is not None:
            finishes = np.array([cause not in ENDS_TRAINING for cause in tasks.cause])
            times = np.where(finishes, tasks.trained, np.inf)
            coordinator.kept.expect(ids, times.tolist())
        tasks = tasks.select(sorted(range(size), key=tasks.ends.__getitem__))
        self.running.update(zip(tasks.device, zip(repeat(tasks), count()), strict=False))
        coordinator.training.expect(tasks, coordinator.room_ahead())
        self.expect_next(tasks, 0)

    def _turns(self, names: Sequence[str], ids: Sequence[str]) -> int | Ints:
        """Return numbers for the turns of devices that are given these tasks: of the round, where
        each has one turn in it. What becomes of a task depends on it."""
        engine = self.coordinator.engine
        failures = engine.selection.failures
        if not engine.settings.asynchronous and not failures:
            return engine.round
        rows = zip(names, ids, strict=True)
        return np.array(
            [turn_of(task) + (failures.get(name, 0) << 48) for name, task in rows], np.int64
        )

    def expect_alone(
        self, tasks: RunningTasks, row: int, time: float, serial: int | None = None
    ) -> None:
        """Expect the end of a task at this time, apart from the tasks that it was assigned with.
        Nothing happens if the device does not have it any more."""
        if not self.is_running(tasks, row):
            return
        if serial is None:
            serial = self.events.serial = self.events.serial + 1
        alone = RunningTasks.from_rows([tasks.row(row)._replace(ends=time, serial=serial)])
        self.running[tasks.device[row]] = alone, 0
        self.events.expect_end(alone, 0)

    def expect_next(self, tasks: RunningTasks, row: int) -> None:
        """Expect the end of the first running task from this row on. The later ones are expected
        when it is over."""
        while row < len(tasks.task) and not self.is_running(tasks, row):
            row += 1
        if row < len(tasks.task):
            self.events.expect_end(tasks, row)

    def is_running(self, tasks: RunningTasks, row: int) -> bool:
        """Return whether the device still has this task."""
        return self.running.get(tasks.device[row], (None, 0))[0] is tasks

    def has(self, device: int, task: str) -> bool:
        """Return whether the device is at this task."""
        tasks, row = self.running.get(device, (None, 0))
        return tasks is not None and tasks.task[row] == task

    def lose(self, device: int, cause: str) -> None:
        """End a device's task without a report, if it has one. The engine is not told."""
        if device not in self.running:
            return
        tasks, row = self.running.pop(device)
        now, task, costs = self.events.now, tasks.task[row], self.coordinator.costs
        self.coordinator.training.drop(tasks, row, now)
        self._end_uploads([task])
        costs.causes[cause] += 1
        costs.wasted += now - tasks.began[row]
        self.write([{"time": now, "event": "lost", "device": device, "task": task, "cause": cause}])

    def end(self, device: int, task: str, cause: str) -> None:
        """End a task as the engine says, if the device still has it: it is too late, or not needed
        any more."""
        if self.has(device, task):
            self.lose(device, cause)

    def waits_to_upload(self, tasks: RunningTasks, row: int) -> bool:
        """Return whether the device has trained, and must ask for its turn to upload."""
        return self.uploads is not None and tasks.task[row] in self.uploads.expected

    def upload(self, tasks: RunningTasks, row: int) -> None:
        """Let the device upload, when it is its turn."""
        assert self.uploads is not None
        self._expect_uploads(self.uploads.ask(tasks.task[row], (tasks, row)))

    def _expect_uploads(self, begun: Iterable[tuple[float, tuple[RunningTasks, int]]]) -> None:
        """Expect the ends of uploads that begin now: their seconds, and their tasks."""
        for seconds, (tasks, row) in begun:
            self.expect_alone(tasks, row, self.events.now + seconds)

    def _end_uploads(self, ids: Iterable[str]) -> None:
        """Let other devices upload instead of those whose tasks are over."""
        if self.uploads is not None:
            for task in ids:
                self._expect_uploads(self.uploads.end(task))

    def give_up(self, tasks: RunningTasks, row: int, carry_out: CarryOut) -> None:
        """Let a device that is still connected say that it cannot do its task."""
        cause = tasks.cause[row]
        self.lose(tasks.device[row], cause)
        engine = self.coordinator.engine
        carry_out(engine.end(tasks.name[row], tasks.task[row], f"{FAILED}{cause}", self.events.now))

    def report(self, event: Event, until: float, carry_out: CarryOut) -> None:
        """Let the devices report whose reports arrive before anything else can happen, at ``until``
        at the latest."""
        runs, next_is_expected = self._due(event, until)
        tasks, row, end = runs[0]
        if len(runs) > 1:
            tasks = RunningTasks.gather(
                [(held, at) for held, begin, end in runs for at in range(begin, end)]
            )
            row, end = 0, len(tasks.task)
        coordinator, refused = self.coordinator, None
        while row < end and refused is None:
            training = coordinator.training
            found = training.results_for(tasks.task[row : self._end_of_kind(tasks, row, end)])
            last = row + len(found)
            reports, refused = coordinator.receive(tasks, slice(row, last), found)
            good = len(reports)
            if coordinator.kept is not None:
                made = slice(row, row + good + (refused is not None))
                coordinator.kept.finished(tasks.device[made], tasks.task[made], found)
            rows = slice(row, row + good)
            commands = self._accept(tasks, rows, found.select(range(good)), reports)
            row += good
            if refused is not None:
                self.events.now = max(self.events.now, tasks.ends[row])
                training.put_back(
                    tasks.task[row + 1 : last], found.select(range(good + 1, len(found)))
                )
                coordinator.costs.up += int(self.bytes_of([tasks.device[row]]).up[0])
                self.lose(tasks.device[row], refused)
                commands = coordinator.engine.end(
                    tasks.name[row], tasks.task[row], refused, self.events.now
                )
            del found, reports  # their memory must be free when the next round begins
            carry_out(commands)
        if not next_is_expected:
            held, begin, end = runs.pop()
            self.expect_next(held, end if refused is None else begin)
        for held, begin, end in runs if refused is not None else ():
            for at in range(begin, end):  # other things may happen before these reports arrive
                self.expect_alone(held, at, held.ends[at], held.serial[at])

    def _end_of_kind(self, tasks: RunningTasks, row: int, end: int) -> int:
        """Return the row after the last of those that are of the same model as ``row``, and of the
        same region."""
        coordinator, devices = self.coordinator, tasks.device[row:end]
        if coordinator.plan.regions is not None:
            kinds: Sequence[Any] = [coordinator.region_of(device) for device in devices]
        elif coordinator.family.is_family:
            kinds = coordinator.members_of(devices)
        else:
            return end
        same = (at for at, kind in enumerate(kinds) if kind != kinds[0])
        return row + next(same, end - row)

    def _bundle_of(self, device: int) -> int:
        """Return the number of the bundle that the device trains."""
        numbers_of = self.coordinator.bundles_of
        return 0 if numbers_of is None else numbers_of([device])[0]

    def _accept(
        self, tasks: RunningTasks, rows: slice, found: TrainedDevices, reports: ReportColumns
    ) -> list[Command]:
        times = tasks.ends[rows]
        if not times:
            return []
        if times[0] < self.events.now:
            times = [max(self.events.now, time) for time in times]
        self.events.now = times[-1]
        coordinator, devices, ids = self.coordinator, tasks.device[rows], tasks.task[rows]
        if self.named is None:
            coordinator.costs.up += len(times) * self.bytes[self._bundle_of(devices[0])].up
        else:
            coordinator.costs.up += int(self.named.up(devices).sum())
        coordinator.accept(tasks, rows, reports, times)
        if coordinator.kept is not None:
            coordinator.kept.accepted(devices, found)
        self.write(
            list(map(AcceptedLine, times, repeat("accepted"), devices, ids, found.steps.tolist()))
        )
        for device in devices:
            del self.running[device]
        self._end_uploads(ids)
        selection.learn(coordinator.engine, tasks, rows, found, times)
        return coordinator.engine.count_reports(tasks.name[rows], ids, self.events.now)

    def _due(self, event: Event, until: float) -> tuple[list[tuple[RunningTasks, int, int]], bool]:
        """Return the reports that arrive before anything else can happen: tasks, the first row and
        the row after the last one there. The first is the event's. Returns also whether what comes
        after the last ones is expected already, as it is for the others.

        Only devices that train already are counted: which others begin to train depends on who has
        reported by then."""
        tasks, row = event.tasks, event.row
        assert tasks is not None
        training, heap, room = (
            self.coordinator.training,
            self.events.heap,
            self.coordinator.engine.reports_together(),
        )
        if tasks.task[row] not in training.begun:
            training.begin_with(tasks.task[row], self.coordinator.room_ahead())
        end = self._end_of_run(tasks, row, until, room)
        runs, left = [(tasks, row, end)], min(room, MOST_GATHERED) - (end - row)
        while left > 0:
            self.expect_next(tasks, end)
            tasks, row = (
                (heap[0].tasks, heap[0].row) if heap and heap[0].time <= until else (None, 0)
            )
            if (
                tasks is None
                or tasks.task[row] not in training.begun
                or self.waits_to_upload(tasks, row)
            ):
                return runs, True
            if tasks.device[row] in self.connections.away:
                return runs, True
            self.events.discard()
            end = self._end_of_run(tasks, row, until, left)
            runs.append((tasks, row, end))
            left -= end - row
        return runs, False

    def _end_of_run(self, tasks: RunningTasks, row: int, until: float, room: int) -> int:
        """Return the row after the last of up to ``room`` reports that arrive one after the other,
        from this row on."""
        begin, begun, heap = row + 1, self.coordinator.training.begun, self.events.heap
        while (
            heap and (held := heap[0].tasks) is not None and not self.is_running(held, heap[0].row)
        ):
            self.expect_next(held, self.events.discard().row)  # its task has ended otherwise
        end = bisect_right(tasks.ends, until, begin, min(row + room, len(tasks.task)))
        if heap:
            end = bisect_left(tasks.ends, heap[0].time, begin, end)
        ids, devices = tasks.task[begin:end], tasks.device[begin:end]
        away = self.connections.away
        if all(map(begun.__contains__, ids)) and away.keys().isdisjoint(devices):
            return end
        rows = zip(count(begin), ids, devices, strict=False)
        return next(row for row, task, device in rows if task not in begun or device in away)


def turn_of(task: str) -> int:
    """Return a number for a task's round and, where a device has several turns in it, for its
    turn."""
    round, _, slot = task.removeprefix("s-").partition("-")
    return int(round) + (int(slot.partition(".")[2] or 1) - 1 << 32)
