"""What a training back end is, and the back end ``bundle``.

A back end really trains the devices, with the graphs of the bundle.

It does exactly the steps that a device would do, in the same order. Training cannot change what happens in a round,
except through devices that diverge. So devices are trained in batches, by any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from itertools import count as count_up
from math import fsum
from typing import NamedTuple, Protocol

import numpy as np
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_device.runtimes.providers import ProviderName
from fleetlearn_device.runtimes.runtime import open_runtime
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.kept_state import kept_state_size, load_model
from fleetlearn_device.training.train import DivergedError, evaluate_data, train
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, check_finite
from numpy.typing import NDArray

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.training.kept_rows import NO_ROW, RowReader
from fleetlearn_simulator.training.trained_devices import (
    KEPT_STATE,
    PendingResults,
    ResultReader,
    TrainedDevice,
    TrainedDevices,
    from_rows,
)

NO_VECTORS: Mapping[str, Vector] = {}


class RoundInputs(NamedTuple):
    """What the tasks of a round begin from. Workers are sent it again only if it is another object than before."""

    model: Vector
    """float32, shape (P,)."""
    vectors: Mapping[str, Vector] = NO_VECTORS
    """Vectors beside the model by name, such as SCAFFOLD's ``control``: float32, shape (P,)."""
    hyper: Mapping[str, float] | None = None
    """Hyper-parameters by name. None: the plan's."""


class Job(NamedTuple):
    """The training of one device in a round, or the evaluation of a model on its data."""

    device: int
    seed: int = 0
    """The seed of the device's task. An evaluation has none."""
    steps: int | None = None
    """Steps that the device does. None: all steps of its epochs."""
    kept: int = NO_ROW
    """The row with the device's kept state."""


def jobs_from_columns(
    devices: Sequence[int], seeds: Sequence[int], steps: Sequence[int | None], kept: Sequence[int]
) -> list[Job]:
    """Make one job of each row. This takes less than half the time of calling ``Job`` for each."""
    return list(map(partial(tuple.__new__, Job), zip(devices, seeds, steps, kept, strict=True)))


class Backend(Protocol):
    """Trains devices, from what their round's tasks are given."""

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        """Train and wait. Returns the results in the jobs' order."""

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        """Begin to train, in other processes if there are any. The results are read later, each once."""

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        """Return the sums of the model's loss and metrics over the own data of each job's device, with the device's
        personal parameters. None: the loss there is not finite."""

    def close(self) -> None: ...


class LocalSettings(NamedTuple):
    """The plan's [local], with the bundle's defaults: what all devices of a round do."""

    hyper: dict[str, float]
    epochs: int
    batch_size: int


def local_settings(plan: Plan, bundle: Bundle) -> LocalSettings:
    """Raises PlanError if the plan and the bundle do not fit together."""
    plan.check_against(bundle.manifest)
    return LocalSettings(plan.hyper(bundle.manifest), plan.local.epochs, plan.local.batch_size)


def steps_of(task: LocalSettings, examples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of steps that devices with these numbers of examples do."""
    if not task.batch_size:
        return np.full_like(examples, task.epochs)
    return task.epochs * -(-examples // task.batch_size)


class PerDevice:
    """The back end ``bundle``: the device's own runtime and training loop on graphs/train.onnx, device after device."""

    def __init__(
        self,
        bundle: Bundle,
        task: LocalSettings,
        source: Source,
        provider: ProviderName = "cpu",
        kept_states: RowReader | None = None,
    ) -> None:
        """``kept_states``: where the rows of jobs are, if jobs have any."""
        self.bundle, self.task, self.source, self.manifest = bundle, task, source, bundle.manifest
        self.runtime = open_runtime(bundle, kind="onnx", provider=provider)
        self.kept_states, self.kept_size = kept_states, kept_state_size(bundle.manifest)

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        rows, more = [self._train(inputs, job) for job in jobs], {KEPT_STATE: self.kept_size} if self.kept_size else {}
        return from_rows(rows, len(inputs.model), self.manifest.metrics, more)

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        # There is no other process: a device is trained when its result is read, and never if it is not.
        return PendingResults(lambda pending, index: pending.put([index], self.train(inputs, [jobs[index]]))).read

    def kept_state(self, job: Job) -> Vector | None:
        """Return what the job's device has kept; None: nothing yet."""
        if job.kept == NO_ROW:
            return None
        assert self.kept_states is not None
        return self.kept_states.read(job.kept)

    def _train(self, inputs: RoundInputs, job: Job) -> TrainedDevice:
        data = as_data(self.source.arrays(job.device))
        done = 0

        def count(steps: int, loss: float) -> None:
            nonlocal done
            done = steps

        load_model(self.runtime, self.bundle, inputs.model, self.kept_state(job))
        try:
            outcome = train(
                self.runtime,
                data,
                hyper=self.task.hyper if inputs.hyper is None else inputs.hyper,
                epochs=self.task.epochs,
                batch_size=self.task.batch_size,
                seed=job.seed,
                # A clock that counts steps: then a budget of n seconds ends the training after n steps. The loop reads
                # the clock twice before the first step, and once after each.
                time_budget=None if job.steps is None else float(job.steps),
                clock=partial(next, chain((0.0,), count_up(0.0))),
                on_step=count,
            )
        except DivergedError:
            return TrainedDevice(np.zeros_like(inputs.model), {}, data.examples, done, 0, False, np.nan, 0.0, True)
        return TrainedDevice(
            outcome.update,
            dict(outcome.metrics),
            outcome.examples,
            outcome.steps,
            outcome.seen,
            outcome.complete,
            outcome.loss,
            check_finite(outcome.update),
            vectors={KEPT_STATE: outcome.kept_state},
        )

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        self.runtime.load(inputs.model)
        return [self._evaluate(inputs.model, job) for job in jobs]

    def _evaluate(self, model: Vector, job: Job) -> Evaluation | None:
        if self.kept_size:
            load_model(self.runtime, self.bundle, model, self.kept_state(job))
        try:
            return evaluate_data(self.runtime, self.source.arrays(job.device))
        except DivergedError:
            return None

    def close(self) -> None:
        """Does nothing: only memory is held."""


def means(parts: Sequence[Evaluation]) -> dict[str, float]:
    """Return the means over all examples. fsum is exact: the means do not depend on how the devices were divided."""
    examples = sum(part.examples for part in parts)
    rows = [{"loss": part.loss_sum, **part.metric_sums} for part in parts]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: fsum(row[name] for row in rows) / examples for name in names}
