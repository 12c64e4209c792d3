"""The devices' training, for real: by the graphs that ship, one device after the other or many in one call.

Both back ends do exactly the steps that a device would do, in the order in which it would do them. Training cannot
change what happens in a round, so it is done in batches, by any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from itertools import count as count_up
from math import fsum, isfinite, prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from fleetlearn_coordinator.plan import Plan
from fleetlearn_device.checks import check_hyper
from fleetlearn_device.data import as_data
from fleetlearn_device.runtime import open_runtime
from fleetlearn_device.runtime_onnx import make_session
from fleetlearn_device.train import SEEDS, DivergedError, evaluate_data, train
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import TRAIN_MANY
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, views
from numpy.typing import NDArray

from fleetlearn_simulator.data import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.orders import permutations


class Job(NamedTuple):
    """A device's work in a round."""

    device: int
    seed: int
    """The task's."""
    steps: int | None
    """How many steps it does; None: all of its epochs'."""


class Result(NamedTuple):
    """What came of a job. ``failed`` is why there is no update, in the protocol's word."""

    update: Vector
    examples: int
    steps: int
    seen: int
    complete: bool
    loss: float
    metrics: dict[str, float]
    largest: float
    """The greatest magnitude in the update."""
    failed: str | None = None


class Backend(Protocol):
    """Trains devices from a round's model."""

    def train(self, model: Vector, jobs: Sequence[Job]) -> list[Result]:
        """The results, in the jobs' order."""

    def begin(self, model: Vector, jobs: Sequence[Job]) -> Callable[[int], Result]:
        """Train meanwhile, where there are other processes. Called with a job's place: its result, once it is there."""

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        """The sums of the model over each of these devices' own data."""

    def close(self) -> None: ...


class Task(NamedTuple):
    """What all devices of a round do: the plan's [local] with the bundle's defaults."""

    hyper: dict[str, float]
    epochs: int
    batch_size: int


def task_of(plan: Plan, bundle: Bundle) -> Task:
    """Raises PlanError where the plan and the bundle do not fit."""
    plan.check_against(bundle.manifest)
    return Task(plan.hyper(bundle.manifest), plan.local.epochs, plan.local.batch_size)


def steps_of(task: Task, examples: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many steps devices with so many examples do."""
    if not task.batch_size:
        return np.full_like(examples, task.epochs)
    return task.epochs * -(-examples // task.batch_size)


def blocks_of(task: Task, source: Source, jobs: Sequence[Job], most: int) -> Iterator[tuple[int, int, list[int]]]:
    """(examples, steps, places in ``jobs``) of jobs that may share a block: at most ``most``, alike in both.

    Whatever the number of processes: a device's last bits may depend on its place in its block, as where in an array
    the processor's vector instructions end.
    """
    sizes = source.examples(np.array([job.device for job in jobs], np.int64))
    wanted = steps_of(task, sizes).tolist()
    limits = [most_ if job.steps is None else min(most_, job.steps) for job, most_ in zip(jobs, wanted, strict=True)]
    alike = list(zip(sizes.tolist(), limits, strict=True))
    for (examples, steps), group in groupby(sorted(range(len(jobs)), key=alike.__getitem__), key=alike.__getitem__):
        places = list(group)
        for start in range(0, len(places), most):
            yield examples, steps, places[start : start + most]


class PerDevice:
    """The back end ``bundle``: graphs/train.onnx by the device's own runtime and training loop, device after device."""

    def __init__(self, bundle: Bundle, task: Task, source: Source) -> None:
        self.task, self.source = task, source
        self.runtime = open_runtime(bundle, kind="onnx")

    def train(self, model: Vector, jobs: Sequence[Job]) -> list[Result]:
        return [self._train(model, job) for job in jobs]

    def begin(self, model: Vector, jobs: Sequence[Job]) -> Callable[[int], Result]:
        return self.train(model, jobs).__getitem__

    def _train(self, model: Vector, job: Job) -> Result:
        data = as_data(self.source.arrays(job.device))
        done = 0

        def count(steps: int, loss: float) -> None:
            nonlocal done
            done = steps

        self.runtime.load(model)
        try:
            outcome = train(
                self.runtime,
                data,
                hyper=self.task.hyper,
                epochs=self.task.epochs,
                batch_size=self.task.batch_size,
                seed=job.seed,
                # A clock that counts steps: a budget of so many seconds ends the training after as many. It is read
                # twice before the first, and after each.
                time_budget=None if job.steps is None else float(job.steps),
                clock=partial(next, chain((0.0,), count_up(0.0))),
                on_step=count,
            )
        except DivergedError:
            return Result(np.empty(0, np.float32), data.examples, done, 0, False, np.nan, {}, 0.0, "failed: diverged")
        return Result(
            outcome.update,
            outcome.examples,
            outcome.steps,
            outcome.seen,
            outcome.complete,
            outcome.loss,
            outcome.metrics,
            float(np.abs(outcome.update).max()),
        )

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        self.runtime.load(model)
        return [evaluate_data(self.runtime, self.source.arrays(device)) for device in devices]

    def close(self) -> None:
        """Nothing is held but memory."""


class Vectorized(PerDevice):
    """The back end ``vectorized``: graphs/train_many.onnx, which does the steps of a block of devices in one call.

    Devices with equally many examples, and equally many steps to do, share blocks. A last, smaller batch of an epoch is
    a call of its own.
    """

    def __init__(self, bundle: Bundle, task: Task, source: Source) -> None:
        super().__init__(bundle, task, source)
        check_many(bundle, task.batch_size)
        many = bundle.manifest.many
        assert many is not None
        self.many, self.manifest = many, bundle.manifest
        self.carried = [
            *(f"param.{row.name}" for row in self.manifest.parameters),
            *(f"state.{row.name}" for row in self.manifest.state),
        ]
        """What one call hands to the next."""
        self.outputs = [*self.carried, "loss", *(f"metric.{name}" for name in self.manifest.metrics)]
        fixed = [f"{name}.{row.name}" for name in self.manifest.references for row in self.manifest.travelling]
        fixed += [f"batch.{row.name}" for row in self.manifest.batch] + [
            f"hyper.{row.name}" for row in self.manifest.hyper
        ]
        fixed += ["steps", *(["seed"] if self.manifest.random else [])]
        self.names = [*(f"next.{name}" for name in self.carried), *self.outputs[len(self.carried) :]]
        """``outputs`` as the graph has them."""
        self.session = make_session(bundle, TRAIN_MANY, 1, [*self.carried, *fixed], self.names)
        self.state = bundle.state()
        self.hyper = check_hyper(task.hyper, self.manifest.hyper)

    def train(self, model: Vector, jobs: Sequence[Job]) -> list[Result]:
        results: list[Result | None] = [None] * len(jobs)
        for examples, steps, places in blocks_of(self.task, self.source, jobs, self.many.devices):
            block = [jobs[place] for place in places]
            if self.many.batch is not None and examples % self.many.batch:
                # Its last batch is too small for the block's graph.
                found = [self._train(model, job) for job in block]
            else:
                found = self._block(model, block, examples, steps)
            for place, result in zip(places, found, strict=True):
                results[place] = result
        return [result for result in results if result is not None]

    def _block(self, model: Vector, jobs: list[Job], examples: int, steps: int) -> list[Result]:
        """Jobs that do the same number of steps on the same number of examples."""
        devices, count = self.many.devices, len(jobs)
        filled = [job.device for job in jobs] + [jobs[0].device] * (devices - count)
        seeds = np.array([job.seed for job in jobs] + [0] * (devices - count), np.int64)
        feed = self._first(model)
        losses: list[NDArray[Any]] = []
        metrics: dict[str, list[NDArray[Any]]] = {name: [] for name in self.manifest.metrics}
        weights: list[int] = []
        done = 0
        for rows in self._calls(examples, steps, seeds):
            # rows: (devices, steps of the call, examples of a step); padded with steps that are not done.
            active = rows.shape[1]
            if active < self.many.steps:
                rows = np.concatenate([rows, np.repeat(rows[:, :1], self.many.steps - active, axis=1)], axis=1)
            for row, array in zip(self.manifest.batch, self.source.take(filled, rows), strict=True):
                feed[f"batch.{row.name}"] = array
            feed["steps"] = np.array([active] * count + [0] * (devices - count), np.int64)
            if self.manifest.random:
                feed["seed"] = (seeds + done) % SEEDS
            found = dict(zip(self.outputs, self.session.run(self.names, feed), strict=True))
            feed |= {name: found[name] for name in self.carried}
            losses.append(found["loss"][:count, :active])
            for name, values in metrics.items():
                values.append(found[f"metric.{name}"][:count, :active])
            weights += [rows.shape[2]] * active
            done += active
        return self._results(model, jobs, examples, feed, losses, metrics, np.array(weights))

    def _first(self, model: Vector) -> dict[str, NDArray[Any]]:
        devices = self.many.devices
        feed: dict[str, NDArray[Any]] = {}
        for kind, vector, table in (
            ("param", model, self.manifest.parameters),
            ("state", self.state, self.manifest.state),
        ):
            for name, array in views(vector, table).items():
                feed[f"{kind}.{name}"] = np.broadcast_to(array, (devices, *array.shape)).copy()
        for reference in self.manifest.references:
            for name, array in views(model, self.manifest.travelling).items():
                given = array if reference == "anchor" else np.zeros((devices, *array.shape), np.float32)
                if reference == "previous":
                    given = np.broadcast_to(array, (devices, *array.shape)).copy()
                feed[f"{reference}.{name}"] = given
        return feed | {f"hyper.{name}": np.array(value, np.float32) for name, value in self.hyper.items()}

    def _calls(self, examples: int, steps: int, seeds: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The examples' places of each call's steps, in the order in which each device takes them."""
        size = self.task.batch_size or examples
        whole, rest = divmod(examples, size)
        waiting: list[NDArray[np.int64]] = []
        for epoch in range(self.task.epochs):
            if steps <= 0:
                break
            order = permutations(examples, seeds, epoch)
            full = min(whole, steps)
            if full:
                waiting.append(order[:, : full * size].reshape(len(seeds), full, size))
            steps -= full
            if rest and steps:
                yield from self._cut(waiting)
                waiting = []
                yield order[:, None, whole * size :]
                steps -= 1
        yield from self._cut(waiting)

    def _cut(self, waiting: list[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
        if waiting:
            rows = np.concatenate(waiting, axis=1)
            for start in range(0, rows.shape[1], self.many.steps):
                yield rows[:, start : start + self.many.steps]

    def _results(
        self,
        model: Vector,
        jobs: list[Job],
        examples: int,
        feed: dict[str, NDArray[Any]],
        losses: list[NDArray[Any]],
        metrics: dict[str, list[NDArray[Any]]],
        weights: NDArray[np.int64],
    ) -> list[Result]:
        count, seen = len(jobs), int(weights.sum())
        tensors = [
            feed[f"param.{row.name}"][:count].reshape(count, prod(row.shape)) for row in self.manifest.parameters
        ]
        updates = np.concatenate(tensors, axis=1)
        updates -= model
        # NaN and infinity in an update come through to its largest element.
        largest = np.maximum(updates.max(axis=1), -updates.min(axis=1)).tolist()
        loss = _mean(losses, weights).tolist()
        columns = [_mean(values, weights).tolist() for values in metrics.values()]
        means = [dict(zip(metrics, row, strict=True)) for row in zip(*columns, strict=True)] or [{}] * count
        complete = len(weights) == int(steps_of(self.task, np.array([examples]))[0])
        return [
            Result(
                update,
                examples,
                len(weights),
                seen,
                complete,
                mean_loss,
                {name: value for name, value in row.items() if isfinite(value)},
                most,
                None if isfinite(most) and isfinite(mean_loss) else "failed: diverged",
            )
            for update, mean_loss, row, most in zip(updates, loss, means, largest, strict=True)
        ]


def _mean(parts: list[NDArray[Any]], weights: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of each device's steps, added up one after the other as the device does: a product of matrices would depend on
    which devices share a block."""
    values = np.concatenate(parts, axis=1).astype(np.float64) * weights
    return np.asarray(np.cumsum(values, axis=1)[:, -1] / weights.sum())


def not_for_many(bundle: Bundle, batch_size: int) -> str | None:
    """Why the bundle cannot train many devices at once, if it cannot."""
    many = bundle.manifest.many
    if many is None:
        return f"bundle {bundle.manifest.name} has no {TRAIN_MANY}"
    if many.batch is not None and many.batch != batch_size:
        return (
            f"{TRAIN_MANY} of bundle {bundle.manifest.name} takes batches of {many.batch}; the plan's local.batch_size "
            f"is {batch_size}"
        )
    return None


def check_many(bundle: Bundle, batch_size: int) -> None:
    """Raise SimulatorError where the bundle cannot train many devices at once."""
    if why := not_for_many(bundle, batch_size):
        raise SimulatorError(f'{why}: export it with many=Many(devices, steps), or choose the back end "bundle"')


BACKENDS: dict[str, type[PerDevice]] = {"bundle": PerDevice, "vectorized": Vectorized}


def means(parts: Sequence[Evaluation]) -> dict[str, float]:
    """Means over the examples of all of them; fsum is exact, so that it does not matter how they were divided."""
    examples = sum(part.examples for part in parts)
    rows = [{"loss": part.loss_sum, **part.metric_sums} for part in parts]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: fsum(row[name] for row in rows) / examples for name in names}
