"""The back end ``vectorized``: graphs/train_many.onnx, many devices and several steps in a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_device.runtimes.checks import check_hyper
from fleetlearn_device.runtimes.providers import ProviderName
from fleetlearn_device.runtimes.sessions import make_session
from fleetlearn_device.training.shuffling import permutations
from fleetlearn_device.training.train import LARGEST, SEEDS
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import TRAIN, TRAIN_MANY
from fleetlearn_protocol.messages import BUFFERS
from fleetlearn_protocol.vector import Vector, scatter, views
from numpy.typing import NDArray

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.training.backend import (
    Job,
    LocalSettings,
    PerDevice,
    RoundInputs,
    steps_of,
)
from fleetlearn_simulator.training.fit_for_many import check_many
from fleetlearn_simulator.training.kept_rows import NOTHING_KEPT, KeptRows, RowReader
from fleetlearn_simulator.training.step_rates import factors_of
from fleetlearn_simulator.training.tied_rules import RULES, TiedRule
from fleetlearn_simulator.training.trained_devices import (
    KEPT_STATE,
    TIED,
    PendingResults,
    ResultReader,
    TrainedDevices,
    read_all,
)

RATE = "hyper.lr"
NO_STEP_LIMIT = 2**62
"""More steps than any device does."""


class Workloads(NamedTuple):
    """How much each of n jobs has to do: int64, shape (n,)."""

    examples: NDArray[np.int64]
    batch: NDArray[np.int64]
    """Examples in a whole batch."""
    steps: NDArray[np.int64]


def workloads_of(task: LocalSettings, source: Source, jobs: Sequence[Job]) -> Workloads:
    examples = source.examples(np.array([job.device for job in jobs], np.int64))
    steps, given = steps_of(task, examples), [job.steps for job in jobs]
    if given.count(None) < len(given):
        steps = np.minimum(steps, [NO_STEP_LIMIT if most is None else most for most in given])
    return Workloads(examples, np.minimum(task.batch_size or examples, examples), steps)


def divide_into_blocks(loads: Workloads, most: int) -> Iterator[list[int]]:
    """Return the blocks as lists of indices: at most ``most`` jobs each, whose batches have the
    same size and which have about equally much to do.

    The blocks do not depend on the number of processes: the last bits of a device's results may
    depend on its position in its block, which decides where in an array the processor's vector
    instructions end.
    """
    groups = [np.arange(len(loads.batch))]
    if any((column != column[:1]).any() for column in loads):
        order = np.lexsort((-loads.examples, -loads.steps, loads.batch))
        groups = np.split(order, np.flatnonzero(np.diff(loads.batch[order])) + 1)
    for group in groups:
        indices = group.tolist()
        for start in range(0, len(indices), most):
            yield indices[start : start + most]


class Vectorized(PerDevice):
    """The back end ``vectorized``: graphs/train_many.onnx, which does the steps of a block of
    devices in one call.

    In a call, each device of a block does up to ``many.steps`` steps on whole batches of an epoch.
    The epoch's last, smaller batch is done apart: device after device with graphs/train.onnx, or in
    a call of its own if all devices have equally many examples and are more than a call has steps.
    """

    def __init__(
        self,
        bundle: Bundle,
        task: LocalSettings,
        source: Source,
        provider: ProviderName = "cpu",
        kept: KeptRows[RowReader] = NOTHING_KEPT,
    ) -> None:
        super().__init__(bundle, task, source, provider, kept)
        check_many(bundle, task.batch_size, task.algorithm, by_step=task.schedule is not None)
        many = bundle.manifest.many
        assert many is not None
        self.many = many
        self.carried = [
            *(f"param.{row.name}" for row in self.manifest.parameters),
            *(f"state.{slot.name}" for slot in self.manifest.state),
        ]
        """The outputs of a call that are inputs of the next."""
        self.kept_rows = [
            *(
                (f"param.{row.name}", prod(row.shape))
                for row in self.manifest.parameters
                if row.personal
            ),
            *(
                (f"state.{slot.name}", prod(slot.shape))
                for slot in self.manifest.state
                if slot.kept
            ),
        ]
        """The parts of the kept state, in order (``fleetlearn_device.training.kept_state``): the
        input that begins with it, and its elements."""
        if "previous" in self.manifest.references:
            self.kept_rows += [
                (f"previous.{parameter.name}", prod(parameter.shape))
                for parameter in self.manifest.travelling
            ]
        self.measured = ["loss", *(f"metric.{name}" for name in self.manifest.metrics)]
        self.names = [*(f"next.{name}" for name in self.carried), *self.measured]
        self.fixed = [
            f"{name}.{parameter.name}"
            for name in self.manifest.references
            for parameter in self.manifest.travelling
        ]
        self.fixed += [f"hyper.{hyper.name}" for hyper in self.manifest.hyper]
        inputs = [
            *self.carried,
            *self.fixed,
            *(f"batch.{array.name}" for array in self.manifest.batch),
        ]
        inputs += ["seed"] if self.manifest.random else []
        self.session = make_session(bundle, TRAIN_MANY, 1, [*inputs, "steps"], self.names, provider)
        self.single = make_session(bundle, TRAIN, 1, inputs, self.names, provider)
        self.state, self.personal = bundle.state(), bundle.parameters()[self.manifest.size :]
        self.hyper = check_hyper(task.hyper, self.manifest.hyper)

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        return read_all(self.begin(inputs, jobs), len(jobs))

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        loads = workloads_of(self.task, self.source, jobs)
        blocks = list(divide_into_blocks(loads, self.many.devices))

        def produce(pending: PendingResults, index: int) -> None:
            (indices,) = (block for block in blocks if index in block)
            mine = Workloads(*(column[indices] for column in loads))
            pending.put(indices, self._block(inputs, [jobs[row] for row in indices], mine))

        return PendingResults(produce).read

    def _block(self, inputs: RoundInputs, jobs: Sequence[Job], loads: Workloads) -> TrainedDevices:
        """Train jobs whose batches have the same size."""
        batch = int(loads.batch[0])
        if self.many.batch not in (None, batch):
            # the graph's batches are larger than these devices' data
            return super().train(inputs, jobs)
        block = Block(self, inputs, jobs, loads)
        equal = int(loads.examples.min()) == int(loads.examples.max())
        whole, rest = np.divmod(block.examples, batch)
        # Epochs that have no last, smaller batch may follow each other in one call.
        together = self.task.epochs if equal and not rest[0] else 1
        for epoch in range(0, self.task.epochs, together):
            orders = [
                permutations(block.examples, block.seeds, at)
                for at in range(epoch, epoch + together)
            ]
            order = np.concatenate(orders, axis=1)
            now = np.minimum(block.left, whole * together)
            for start in range(0, int(now.max()), self.many.steps):
                rows = order[
                    :, start * batch : min(start + self.many.steps, int(now.max())) * batch
                ]
                block.call(
                    rows.reshape(len(rows), -1, batch), np.clip(now - start, 0, self.many.steps)
                )
            due = (block.left > 0) & (rest > 0)
            if equal and due.sum() > self.many.steps and self.many.batch is None:
                block.call(order[:, None, whole[0] * batch :], due.astype(np.int64))
            else:
                for lane in np.flatnonzero(due).tolist():
                    block.step(lane, order[lane, whole[lane] * batch : block.examples[lane]])
            if not block.left.any():
                break
        return block.results()


class Block:
    """Devices that are trained together, each in its own lane. Free lanes do no steps."""

    def __init__(
        self, backend: Vectorized, inputs: RoundInputs, jobs: Sequence[Job], loads: Workloads
    ) -> None:
        self.backend, self.inputs, self.model, self.jobs = backend, inputs, inputs.model, jobs
        self.begin = self.model
        """What each job begins with: (jobs, P), or (P,) where all begin with one model."""
        if inputs.models is not None:
            self.begin = np.stack([inputs.begin(job) for job in jobs])
        self.manifest, lanes = backend.manifest, backend.many.devices
        free = lanes - len(jobs)
        if free:  # they are as the last device, and do no steps
            loads = Workloads(*(np.append(column, column[-1:].repeat(free)) for column in loads))
            loads.steps[len(jobs) :] = 0
        self.examples, self.left = loads.examples, loads.steps.copy()
        """``left``: steps that each lane still has to do."""
        self.devices = [job.device for job in jobs] + [jobs[0].device] * free
        self.done, self.seen = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        """Steps done and examples seen, of each lane."""
        self.sums = np.zeros((len(backend.measured), lanes))
        """Sums of the loss and the metrics over the examples seen."""
        self.worst = np.zeros(lanes)
        """The largest magnitude of any step's loss."""
        self.seeds = np.array([job.seed for job in jobs] + [0] * free, np.int64)
        hyper = inputs.hyper
        self.hyper = backend.hyper if hyper is None else check_hyper(hyper, self.manifest.hyper)
        self.factors: NDArray[np.float64] | None = None
        """What each step of each lane multiplies the learning rate by, (lanes, steps). None: the
        graph takes one learning rate for all."""
        if backend.many.lr_by_step is True:
            whole = steps_of(backend.task, self.examples)
            self.factors = factors_of(backend.schedule(inputs), whole, int(self.left.max()))
        self.rule = RULES.get(backend.task.algorithm)
        """How the steps are corrected, and what becomes of the tied vector, if the algorithm has
        one."""
        self.own = self._own_vectors()
        """The tied vector of each job's device, (jobs, P)."""
        self.feed = self._feed()

    def _feed(self) -> dict[str, NDArray[Any]]:
        lanes = len(self.seeds)
        feed: dict[str, NDArray[Any]] = {}
        local = (
            np.concatenate([self.model, self.backend.personal])
            if self.backend.personal.size
            else self.model
        )
        for kind, vector, table in (
            ("param", local, self.manifest.parameters),
            ("state", self.backend.state, self.manifest.state),
        ):
            for name, array in views(vector, table).items():
                feed[f"{kind}.{name}"] = np.broadcast_to(array, (lanes, *array.shape)).copy()
        for reference in self.manifest.references:
            for name, array in views(self.model, self.manifest.travelling).items():
                given = (
                    array if reference == "anchor" else np.zeros((lanes, *array.shape), np.float32)
                )
                if reference == "previous":
                    given = np.broadcast_to(array, (lanes, *array.shape)).copy()
                feed[f"{reference}.{name}"] = given
        if self.begin.ndim == 2:
            for parameter in self.manifest.travelling:
                part = slice(parameter.offset, parameter.offset + prod(parameter.shape))
                lanes_of = feed[f"param.{parameter.name}"][: len(self.jobs)]
                lanes_of[...] = self.begin[:, part].reshape(lanes_of.shape)
        for lane, job in enumerate(self.jobs if self.backend.kept_rows else ()):
            kept_state = self.backend.kept_state(job)
            if kept_state is not None:
                self._feed_kept(feed, lane, kept_state)
        feed |= {f"hyper.{name}": np.array(value, np.float32) for name, value in self.hyper.items()}
        if self.rule is not None:
            correction = self._without_buffers(self.rule.correction(self.own, self.inputs.vectors))
            for parameter in self.manifest.travelling:
                part = slice(parameter.offset, parameter.offset + prod(parameter.shape))
                feed[f"correction.{parameter.name}"][: len(self.jobs)] = correction[
                    :, part
                ].reshape(-1, *parameter.shape)
        return feed

    def _feed_kept(self, feed: Mapping[str, NDArray[Any]], lane: int, kept_state: Vector) -> None:
        """Let a lane begin with what its device has kept."""
        begin = 0
        for name, count in self.backend.kept_rows:
            lane_of = feed[name][lane : lane + 1]  # a view, also of a scalar
            lane_of[...] = kept_state[begin : begin + count].reshape(lane_of.shape)
            begin += count

    def _own_vectors(self) -> NDArray[np.float32]:
        own = np.zeros((len(self.jobs) if self.rule else 0, len(self.model)), np.float32)
        for lane, job in enumerate(self.jobs if self.rule else ()):
            for vector in self.backend.tied(job).values():
                own[lane] = vector
        return own

    def _tied_vectors(
        self, rule: TiedRule, updates: NDArray[np.float32]
    ) -> dict[str, NDArray[np.float32]]:
        """Return the tied vectors after the training, and the parts that are reported of them."""
        times = np.maximum(self.done, 1).astype(np.float64)
        if self.factors is not None:
            times = np.cumsum(self.factors, axis=1)[np.arange(len(times)), times.astype(int) - 1]
        times = times[: len(self.jobs), None]
        change = self._without_buffers(rule.change(self.inputs.vectors, updates, times, self.hyper))
        parts = {
            part: change for part in self.backend.more if part not in (KEPT_STATE, TIED, BUFFERS)
        }
        return {**parts, TIED: self.own + change}

    def _without_buffers(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Set the elements of the manifest's buffers, which take no gradient, to 0. Returns
        ``vectors``."""
        scatter(vectors, self.manifest.buffers, 0.0)
        return vectors

    def _kept_states(self) -> NDArray[np.float32]:
        """Return what the devices keep now, (jobs, kept_size)."""
        count = len(self.jobs)
        names = [name.replace("previous.", "param.", 1) for name, _ in self.backend.kept_rows]
        return np.concatenate(
            [self.feed[name][:count].reshape(count, -1) for name in names], axis=1
        )

    def call(self, rows: NDArray[np.int64], steps: NDArray[np.int64]) -> None:
        """Do ``steps`` (lanes,) in each lane, on the examples at ``rows`` (lanes, steps in the
        call, batch)."""
        missing = self.backend.many.steps - rows.shape[1]
        if missing:
            # The graph takes a fixed number of steps. What these rows hold is computed and counts
            # nowhere.
            rows = np.concatenate([rows, np.repeat(rows[:, :1], missing, axis=1)], axis=1)
        feed = self.feed | {"steps": steps}
        for input_, array in zip(
            self.manifest.batch, self.backend.source.examples_at(self.devices, rows), strict=True
        ):
            feed[f"batch.{input_.name}"] = array
        if self.factors is not None:
            # The steps of this call; the last one's factor where a lane has fewer left.
            at = self.done[:, None] + np.arange(self.backend.many.steps)
            feed[RATE] = self._rates(np.arange(len(at))[:, None], at)
        if self.manifest.random:
            # As `train` draws: step k from seed + k.
            feed["seed"] = (self.seeds + self.done) % SEEDS
        outputs = self.backend.session.run(self.backend.names, feed)
        self.feed |= zip(self.backend.carried, outputs, strict=False)
        values = np.array(outputs[len(self.backend.carried) :], np.float64)
        self.worst = np.maximum(self.worst, np.abs(values[0]).max(axis=1))
        values *= rows.shape[2]
        # Added one after the other, as a device does it. Steps that were not done are 0.
        values[:, :, 0] += self.sums
        self.sums = np.cumsum(values, axis=2)[:, :, -1]
        self.left -= steps
        self.done += steps
        self.seen += steps * rows.shape[2]

    def _rates(self, lanes: Any, steps: Any) -> NDArray[np.float32]:
        """Return the learning rates of these steps of these lanes."""
        assert self.factors is not None
        last = self.factors.shape[1] - 1
        factors = self.factors[lanes, np.minimum(steps, last)]
        return np.asarray(self.hyper["lr"] * factors, np.float32)

    def step(self, lane: int, rows: NDArray[np.int64]) -> None:
        """Do the next step of one lane, on the examples at ``rows`` (batch,)."""
        carried = self.backend.carried
        # the "..." makes arrays of scalars too
        feed = {name: self.feed[name][lane, ...] for name in carried}
        for name in self.backend.fixed:
            shared = name.startswith(("anchor.", "hyper."))
            feed[name] = self.feed[name] if shared else self.feed[name][lane, ...]
        if self.factors is not None:
            feed[RATE] = self._rates(lane, self.done[lane])
        arrays = self.backend.source.arrays(self.devices[lane])
        for input_, array in zip(self.manifest.batch, arrays, strict=True):
            feed[f"batch.{input_.name}"] = array[rows]
        if self.manifest.random:
            feed["seed"] = np.array((self.seeds[lane] + self.done[lane]) % SEEDS)
        outputs = self.backend.single.run(self.backend.names, feed)
        for name, value in zip(carried, outputs, strict=False):
            self.feed[name][lane] = value
        for number, value in enumerate(outputs[len(carried) :]):
            self.sums[number, lane] += float(value) * len(rows)
        self.worst[lane] = np.maximum(self.worst[lane], abs(float(outputs[len(carried)])))
        self.left[lane] -= 1
        self.done[lane] += 1
        self.seen[lane] += len(rows)

    def results(self) -> TrainedDevices:
        count = len(self.jobs)
        updates = np.empty((count, len(self.model)), np.float32)
        for row in self.manifest.travelling:
            part = slice(row.offset, row.offset + prod(row.shape))
            tensor = self.feed[f"param.{row.name}"][:count].reshape(count, -1)
            np.subtract(tensor, self.begin[..., part], out=updates[:, part])
        vectors: dict[str, NDArray[np.float32]] = {}
        if self.manifest.buffers:
            rows = [parameter for parameter in self.manifest.travelling if parameter.buffer]
            vectors[BUFFERS] = np.concatenate(
                [self.feed[f"param.{row.name}"][:count].reshape(count, -1) for row in rows], axis=1
            )
            self._without_buffers(updates)
        # Floats without their signs are in the order of their bits: NaN and infinity are above all
        # others.
        largest = (
            (updates.view(np.int32) & np.int32(2**31 - 1))
            .max(axis=1)
            .view(np.float32)
            .astype(np.float64)
        )
        finite = np.isfinite(largest)
        if self.backend.kept_rows:
            vectors[KEPT_STATE] = self._kept_states()
        if self.rule is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
                vectors |= self._tied_vectors(self.rule, updates)
        for made in vectors.values():
            finite &= np.isfinite(made).all(axis=1)
        seen = self.seen[:count]
        loss, *metrics = self.sums[:, :count] / seen
        return TrainedDevices(
            updates,
            dict(zip(self.manifest.metrics, metrics, strict=True)),
            examples=self.examples[:count],
            steps=self.done[:count],
            seen=seen,
            complete=(self.done == steps_of(self.backend.task, self.examples))[:count],
            loss=loss,
            largest=largest,
            diverged=~(finite & (self.worst[:count] <= LARGEST)),
            vectors=vectors,
        )
