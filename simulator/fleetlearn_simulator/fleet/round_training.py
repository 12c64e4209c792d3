"""The training of the devices that have tasks, each from the model of the round in which its task
was given.

Training begins as soon as it is known which devices will report: many devices together, in other
processes meanwhile. It can begin so early because it changes nothing in a round, except through
devices that diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count, islice, repeat
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.encodings import Encoding
from fleetlearn_protocol.messages import StepSchedule
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator.fleet.kept_by_devices import KeptByDevices, rows_of
from fleetlearn_simulator.fleet.named_rows import NamedRows
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.fleet.sent_updates import (
    NOT_TIED,
    DeviceNoise,
    TiedToUpdate,
    as_sent,
    rows_as_sent,
)
from fleetlearn_simulator.fleet.spoilt_updates import as_spoilt
from fleetlearn_simulator.training.backend import Backend, RoundInputs, jobs_from_columns
from fleetlearn_simulator.training.trained_devices import (
    LARGE_UPDATE,
    NO_VECTORS,
    ResultReader,
    TrainedDevices,
    concatenate,
)

MAX_BYTES_AHEAD = 2**28
"""Bytes of updates that may be trained before their reports are due."""
MOST_GATHERED = 256
"""Most results of tasks that were begun apart which are waited for together."""


class GivenInRound(NamedTuple):
    """What the tasks of one round train from."""

    inputs: Sequence[RoundInputs]
    """For each of the run's bundles."""
    stale: Sequence[RoundInputs]
    """The same with the models before the round's. Devices with the corruption ``stale`` train from
    them."""
    clip: float | None = None
    """The L2 norm to which devices clip their updates. None: they send them as they are."""


NumbersOf = Callable[[Sequence[int]], Sequence[int]]
"""Devices -> the number of the bundle that each trains."""


class RoundTraining:
    """Devices that are trained in batches, each from its round's model."""

    def __init__(
        self,
        backend: Backend,
        seed: int,
        encoding: Encoding,
        kept: KeptByDevices | None = None,
        buffers: Sequence[Sequence[slice]] = ((),),
        tied_to: TiedToUpdate = NOT_TIED,
        noise: DeviceNoise | None = None,
        numbers_of: NumbersOf | None = None,
    ) -> None:
        """``encoding``: of the updates that devices send. ``kept``: what devices keep from task to
        task, if they keep something. ``buffers``: for each of the run's bundles, the places of the
        model's elements that devices report as values. ``tied_to``: how what devices keep follows
        the updates that they send. ``noise``: what devices add to their clipped updates.
        ``numbers_of``: which bundle devices train; None: the run has one."""
        self.backend, self.seed, self.encoding, self.kept = backend, seed, encoding, kept
        self._numbers_of = numbers_of
        self._buffers, self._tied_to, self._noise = buffers, tied_to, noise
        self.replace: Callable[[Sequence[int], TrainedDevices], None] | None = None
        """Changes the results of these devices in place, before they are clipped and encoded: what
        an audit lets devices send. None: they send what they trained."""
        self.named: NamedRows | None = None
        """Which rows of sparse tables devices send; None: they send whole updates."""
        self.given: dict[int, GivenInRound] = {}
        """Round -> what its tasks train from, of the newest round and of others that are still
        needed."""
        self.begun: dict[str, tuple[ResultReader, int]] = {}
        """Task -> the reader of its result, and its index there."""
        self.untrained: dict[str, tuple[RunningTasks, int]] = {}
        """Task that will report and is not begun -> the tasks it is one of, and its row there."""
        self._finished: list[tuple[RunningTasks, int, tuple[ResultReader, int] | None]] = []
        """Tasks whose training was finished on the device, and which were lost then: the tasks that
        each is one of, its row there, and the reader of its result if it is begun."""
        self.started = False
        """Whether tasks of the newest round have begun."""
        self._most_given = 0
        """With more rounds in ``given`` than this, those that are not needed any more are looked
        for."""

    def begin_round(
        self,
        round: int,
        inputs: Sequence[RoundInputs],
        earlier: Sequence[Vector],
        clip: float | None = None,
    ) -> None:
        """A round opens. No device has a task of an earlier one. ``inputs``: for each of the run's
        bundles. ``earlier``: the models before the round's. ``clip``: of its tasks
        (``GivenInRound``)."""
        self.given, self.begun, self.untrained, self.started = (
            {round: _given(inputs, earlier, clip)},
            {},
            {},
            False,
        )

    def add_round(
        self,
        round: int,
        inputs: Sequence[RoundInputs],
        earlier: Sequence[Vector],
        needed: Callable[[], Collection[int]],
        clip: float | None = None,
    ) -> None:
        """A round opens. ``needed``: returns the earlier rounds whose tasks go on, or count for
        this round."""
        if len(self.given) > self._most_given:
            still = needed()
            self.given = {number: given for number, given in self.given.items() if number in still}
            # seldom: to look at all tasks with each model takes long
            self._most_given = 2 * len(self.given) + 8
        self.given[round] = _given(inputs, earlier, clip)

    def most(self, room: int) -> int:
        """Return how many tasks may begin together if ``room`` more reports may come."""
        size = 4 * self._largest()
        if self.kept is not None:
            size += self.kept.row_bytes
        return max(1, min(room, MAX_BYTES_AHEAD // max(1, size)))

    def _largest(self) -> int:
        """Return the elements of the largest model that devices train."""
        inputs = next(iter(self.given.values())).inputs
        return max(each.model.size for each in inputs)

    def expect(self, tasks: RunningTasks, room: int) -> None:
        """Devices were given these tasks, in the order in which they end. A round's first tasks
        begin to train at once, as many as there is ``room`` for; tasks that are given later train
        together when one of them is due."""
        if self.kept is not None and self.kept.is_owed(tasks.device):
            self.keep_finished()
        due = [row for row, cause in enumerate(tasks.cause) if not cause]
        if not self.started:
            self.started, most = True, self.most(room)
            self._begin(tasks.select(due[:most]))
            due = due[most:]
        self.untrained.update((tasks.task[row], (tasks, row)) for row in due)

    def begin_with(self, task: str, room: int) -> None:
        """Begin to train this task, and others that are due next, as many as there is ``room``
        for."""
        first = self.untrained.pop(task)
        others = sorted(self.untrained.values(), key=lambda hold: hold[0].ends[hold[1]])
        chosen = RunningTasks.gather([first, *islice(others, self.most(room) - 1)])
        for other in chosen.task[1:]:
            del self.untrained[other]
        self._begin(chosen)

    def _begin(self, chosen: RunningTasks) -> None:
        rows_of: dict[int, list[int]] = {}
        for row, round in enumerate(chosen.round):
            rows_of.setdefault(round, []).append(row)
        for round, rows in sorted(rows_of.items()):
            given = self.given[round]
            for number, same in self._by_bundle(chosen.select(rows)):
                if "stale" in same.corrupt:
                    corrupt = [*enumerate(same.corrupt)]
                    fresh = [row for row, kind in corrupt if kind != "stale"]
                    stale = [row for row, kind in corrupt if kind == "stale"]
                    self._begin_from(given.inputs[number], given.clip, same.select(fresh), number)
                    self._begin_from(given.stale[number], given.clip, same.select(stale), number)
                else:
                    self._begin_from(given.inputs[number], given.clip, same, number)

    def _by_bundle(self, chosen: RunningTasks) -> list[tuple[int, RunningTasks]]:
        """Return the numbers of the bundles that these tasks train, and the tasks of each."""
        if self._numbers_of is None:
            return [(0, chosen)]
        rows_of: dict[int, list[int]] = {}
        for row, number in enumerate(self._numbers_of(chosen.device)):
            rows_of.setdefault(number, []).append(row)
        return [(number, chosen.select(rows)) for number, rows in sorted(rows_of.items())]

    def _begin_from(
        self, inputs: RoundInputs, clip: float | None, chosen: RunningTasks, number: int
    ) -> None:
        """Begin tasks of the bundle of this number."""
        if chosen.task:
            states, tied = (None, None) if self.kept is None else (self.kept.states, self.kept.tied)
            rows = rows_of(states, chosen.device), rows_of(tied, chosen.device)
            reader = self.backend.begin(
                inputs, jobs_from_columns(chosen.device, chosen.seed, chosen.steps, *rows)
            )
            reader = as_spoilt(self.seed, inputs.model, self._buffers[number], reader, chosen)
            if self.replace is not None:
                reader = partial(_read_and_replace, self.replace, reader, chosen)
            residuals = None if self.kept is None else self.kept.residuals
            if self.named is not None:
                reader = rows_as_sent(self.encoding, self.named, reader, chosen)
            else:
                reader = as_sent(
                    self.encoding, residuals, reader, chosen, self._tied_to, clip, self._noise
                )
            self.begun.update(zip(chosen.task, zip(repeat(reader), count()), strict=False))

    def results_for(self, tasks: Sequence[str]) -> TrainedDevices:
        """Wait for the first of these tasks, which are of one bundle. Returns what its device
        sends, and what the devices of the tasks after it send, up to the first that is not trained
        yet. Each result can be read only once."""
        begun = [self.begun.pop(task) for task in tasks]
        reader = begun[0][0]
        apart = next(
            (row for row, (other, _) in enumerate(begun) if other is not reader), len(begun)
        )
        if apart < len(begun) <= MOST_GATHERED and self._largest() < LARGE_UPDATE:
            return _read_together(begun)
        # Tasks that were begun apart are read another time.
        found = reader([index for _, index in begun[:apart]])
        self.begun.update(zip(tasks[len(found) :], begun[len(found) :], strict=True))
        return found

    def put_back(self, tasks: Sequence[str], found: TrainedDevices) -> None:
        """Keep results of these tasks, to be read again."""
        self.begun.update(zip(tasks, zip(repeat(found.select), count()), strict=False))

    def drop(self, tasks: RunningTasks, row: int, now: float) -> None:
        """Forget a task: nobody will read its result. Where the device has finished its training by
        now, it keeps what that left it."""
        begun = self.begun.pop(tasks.task[row], None)
        self.untrained.pop(tasks.task[row], None)
        if self.kept is not None and self.kept.lost(tasks.device[row], tasks.task[row], now):
            self._finished.append((tasks, row, begun))

    def snapshot(self, running: RunningTasks) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return what these tasks train from, as tensors and plain values, for ``take_up``. Call it
        when no device owes what its training left it (``keep_finished``)."""
        tensors, hyper = dict[str, NDArray[Any]](), dict[str, Mapping[str, float] | None]()
        clips, schedules = dict[str, float | None](), dict[str, Any]()
        stale = {
            round
            for round, corrupt in zip(running.round, running.corrupt, strict=True)
            if corrupt == "stale"
        }
        for round in sorted({*running.round}):
            given = self.given[round]
            clips[str(round)] = given.clip
            schedules[str(round)] = msgspec.to_builtins(given.inputs[0].schedule)
            for number, inputs in enumerate(given.inputs):
                name = _name(round, number)
                hyper[name], tensors[f"{name}.model"] = inputs.hyper, inputs.model
                for vector, values in inputs.vectors.items():
                    tensors[f"{name}.vector.{vector}"] = values
                if round in stale:
                    tensors[f"{name}.earlier"] = given.stale[number].model
        return tensors, {
            "hyper": hyper,
            "clips": clips,
            "schedules": schedules,
            "begun": [task for task in running.task if task in self.begun],
        }

    def take_up(
        self, tensors: Mapping[str, NDArray[Any]], state: Mapping[str, Any], running: RunningTasks
    ) -> None:
        """Go on with these tasks from what another object's ``snapshot`` returned."""
        self.started = bool(running.task)
        for round in {*running.round}:
            clip = state.get("clips", {}).get(str(round))  # an earlier version had none
            schedule = msgspec.convert(
                state.get("schedules", {}).get(str(round)), StepSchedule | None
            )
            saved = [
                _saved_inputs(tensors, state["hyper"], _name(round, number), schedule)
                for number in range(len(self._buffers))
            ]
            inputs, earlier = zip(*saved, strict=True)
            self.given[round] = _given(inputs, earlier, clip)
        begun = {*state["begun"]}
        rows = [row for row, cause in enumerate(running.cause) if not cause]
        self.untrained = {
            running.task[row]: (running, row) for row in rows if running.task[row] not in begun
        }
        self._begin(running.select([row for row in rows if running.task[row] in begun]))

    def keep_finished(self) -> None:
        """Let the devices keep what their training left that was finished and has not been
        reported."""
        while self._finished:
            most = self.most(len(self._finished))
            finished, self._finished = self._finished[:most], self._finished[most:]
            unbegun = [(tasks, row) for tasks, row, begun in finished if begun is None]
            if unbegun:
                self._begin(RunningTasks.gather(unbegun))
            for tasks, row, begun in finished:
                reader, index = begun or self.begun.pop(tasks.task[row])
                assert self.kept is not None
                self.kept.finished([tasks.device[row]], [tasks.task[row]], reader([index]))


def _given(
    inputs: Sequence[RoundInputs], earlier: Sequence[Vector], clip: float | None
) -> GivenInRound:
    stale = [
        own if before is own.model else own._replace(model=before)
        for own, before in zip(inputs, earlier, strict=True)
    ]
    return GivenInRound(inputs, stale, clip)


def _name(round: int, number: int) -> str:
    """Return under which name a snapshot has what a round's tasks of a bundle train from."""
    return f"{round}/{number}" if number else str(round)


def _saved_inputs(
    tensors: Mapping[str, NDArray[Any]],
    hyper: Mapping[str, Any],
    name: str,
    schedule: StepSchedule | None,
) -> tuple[RoundInputs, Vector]:
    """Return what a snapshot has under this name, and the model before it."""
    model, prefix = tensors[f"{name}.model"], f"{name}.vector."
    vectors = {
        key.removeprefix(prefix): row for key, row in tensors.items() if key.startswith(prefix)
    }
    inputs = RoundInputs(model, vectors or NO_VECTORS, hyper[name], schedule=schedule)
    return inputs, tensors.get(f"{name}.earlier", model)


def _read_together(begun: Sequence[tuple[ResultReader, int]]) -> TrainedDevices:
    """Wait for all of these results, and read them in order."""
    rows_of: dict[int, list[int]] = {}
    for row, (reader, _) in enumerate(begun):
        rows_of.setdefault(id(reader), []).append(row)
    parts, order = list[TrainedDevices](), list[int]()
    for rows in rows_of.values():
        reader = begun[rows[0]][0]
        while rows:
            parts.append(reader([begun[row][1] for row in rows]))
            order += rows[: len(parts[-1])]
            rows = rows[len(parts[-1]) :]
    return concatenate(parts).select(np.argsort(order).tolist())


def _read_and_replace(
    replace: Callable[[Sequence[int], TrainedDevices], None],
    reader: ResultReader,
    tasks: RunningTasks,
    indices: Sequence[int],
) -> TrainedDevices:
    found = reader(indices)
    replace([tasks.device[index] for index in indices[: len(found)]], found)
    return found
