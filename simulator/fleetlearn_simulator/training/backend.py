"""The devices' training, for real: by the graphs that ship, one device after the other or many in one call.

Both back ends do exactly the steps that a device would do, in the order in which it would do them. Training cannot
change what happens in a round, so it is done in batches, by any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from itertools import count as count_up
from math import fsum
from typing import NamedTuple, Protocol

import numpy as np
from fleetlearn_coordinator.plan import Plan
from fleetlearn_device.data import as_data
from fleetlearn_device.runtime import open_runtime
from fleetlearn_device.train import DivergedError, evaluate_data, train
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, check_finite
from numpy.typing import NDArray

from fleetlearn_simulator.data.factory import Source
from fleetlearn_simulator.training.trained_devices import Outcome, Outcomes, Pending, Take, columns_of


class Job(NamedTuple):
    """A device's work in a round."""

    device: int
    seed: int
    """The task's."""
    steps: int | None
    """How many steps it does; None: all of its epochs'."""


class Backend(Protocol):
    """Trains devices from a round's model."""

    def train(self, model: Vector, jobs: Sequence[Job]) -> Outcomes:
        """What comes of them, in the jobs' order."""

    def begin(self, model: Vector, jobs: Sequence[Job]) -> Take:
        """Train meanwhile, where there are other processes."""

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


class PerDevice:
    """The back end ``bundle``: graphs/train.onnx by the device's own runtime and training loop, device after device."""

    def __init__(self, bundle: Bundle, task: Task, source: Source) -> None:
        self.task, self.source, self.manifest = task, source, bundle.manifest
        self.runtime = open_runtime(bundle, kind="onnx")

    def train(self, model: Vector, jobs: Sequence[Job]) -> Outcomes:
        return columns_of([self._train(model, job) for job in jobs], len(model), self.manifest.metrics)

    def begin(self, model: Vector, jobs: Sequence[Job]) -> Take:
        # Nothing goes on meanwhile here: nobody is trained whose report never comes.
        return Pending(lambda pending, place: pending.put([place], self.train(model, [jobs[place]]))).take

    def _train(self, model: Vector, job: Job) -> Outcome:
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
            return Outcome(np.zeros_like(model), {}, data.examples, done, 0, False, np.nan, 0.0, True)
        return Outcome(
            outcome.update,
            dict(outcome.metrics),
            outcome.examples,
            outcome.steps,
            outcome.seen,
            outcome.complete,
            outcome.loss,
            check_finite(outcome.update),
        )

    def evaluate(self, model: Vector, devices: Sequence[int]) -> list[Evaluation]:
        self.runtime.load(model)
        return [evaluate_data(self.runtime, self.source.arrays(device)) for device in devices]

    def close(self) -> None:
        """Nothing is held but memory."""


def means(parts: Sequence[Evaluation]) -> dict[str, float]:
    """Means over the examples of all of them; fsum is exact, so that it does not matter how they were divided."""
    examples = sum(part.examples for part in parts)
    rows = [{"loss": part.loss_sum, **part.metric_sums} for part in parts]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: fsum(row[name] for row in rows) / examples for name in names}
