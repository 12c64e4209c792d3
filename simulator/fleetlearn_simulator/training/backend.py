"""What a training back end is, and the back end ``bundle``.

A back end really trains the devices, with the graphs of the bundle.

It does exactly the steps that a device would do, in the same order. Training cannot change what
happens in a round, except through devices that diverge. So devices are trained in batches, by any
number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import fsum
from typing import NamedTuple, Protocol

import numpy as np
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import ProviderName
from fleetlearn_device.training.algorithms import ALGORITHMS, run_algorithm
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.kept_state import kept_state_size, load_model
from fleetlearn_device.training.own_algorithm import checked
from fleetlearn_device.training.train import DivergedError, TrainingError, evaluate_data
from fleetlearn_device.training.work import Inputs, TaskSettings
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.algorithms import EXCHANGES, LOCAL_ALGORITHM
from fleetlearn_protocol.extensions import find
from fleetlearn_protocol.messages import BUFFERS, PLAIN, UPDATE, Evaluation, StepSchedule
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.local_passes import passes_of
from fleetlearn_simulator.training.kept_rows import (
    NO_ROW,
    NOTHING_KEPT,
    KeptRows,
    RowReader,
    row_sizes,
)
from fleetlearn_simulator.training.trained_devices import (
    KEPT_STATE,
    NO_VECTORS,
    TIED,
    PendingResults,
    ResultReader,
    TrainedDevice,
    TrainedDevices,
    from_rows,
)

KEY = "local.algorithm"


class RoundInputs(NamedTuple):
    """What the tasks of a round begin from. Workers are sent it again only if it is another object
    than before."""

    model: Vector
    """float32, shape (P,)."""
    vectors: Mapping[str, Vector] = NO_VECTORS
    """Vectors beside the model by name, such as SCAFFOLD's ``control``: float32, shape (P,)."""
    hyper: Mapping[str, float] | None = None
    """Hyper-parameters by name. None: the plan's."""
    models: RowReader | None = None
    """Where the models of peers and of clusters are: a job begins with the row that has its
    device's number. None: all jobs begin with ``model``."""
    schedule: StepSchedule | None = None
    """How the learning rate changes from step to step. None: as the plan says for each round."""

    def begin(self, job: Job) -> Vector:
        """Return the model that a job begins with: float32, shape (P,)."""
        return self.model if self.models is None else self.models.read(job.device)


class Job(NamedTuple):
    """The training of one device in a round, or the evaluation of a model on its data."""

    device: int
    seed: int = 0
    """The seed of the device's task. An evaluation has none."""
    steps: int | None = None
    """Steps that the device does. None: all steps of its epochs."""
    kept: int = NO_ROW
    """The row with the device's kept state."""
    tied: int = NO_ROW
    """The row with the tied vectors that the task goes on from."""


def jobs_from_columns(
    devices: Sequence[int],
    seeds: Sequence[int],
    steps: Sequence[int | None],
    kept: Sequence[int],
    tied: Sequence[int],
) -> list[Job]:
    """Make one job of each row. This takes less than half the time of calling ``Job`` for each."""
    return list(
        map(partial(tuple.__new__, Job), zip(devices, seeds, steps, kept, tied, strict=True))
    )


class Backend(Protocol):
    """Trains devices, from what their round's tasks are given."""

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        """Train and wait. Returns the results in the jobs' order."""

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        """Begin to train, in other processes if there are any. The results are read later, each
        once."""

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        """Return the sums of the model's loss and metrics over the own data of each job's device,
        with the device's personal parameters. None: the loss there is not finite."""

    def evaluate_personal(
        self, inputs: RoundInputs, jobs: Sequence[Job]
    ) -> list[Evaluation | None]:
        """Return the same of each device's personal model (Ditto's, pFedMe's, APFL's), which
        before its first task is the round's."""

    def close(self) -> None: ...


class LocalSettings(NamedTuple):
    """The plan's [local], with the bundle's defaults: what all devices of a round do."""

    hyper: dict[str, float]
    epochs: int
    batch_size: int
    algorithm: str = PLAIN
    personal_epochs: int | None = None
    """Passes in which what is the device's own is trained by itself. None: as many as
    ``epochs``."""
    clip: float | None = None
    """The clip norm of devices' sums, where they compute some with differential privacy. None: they
    are not clipped; updates are clipped elsewhere."""
    schedule: StepSchedule | None = None
    """How the learning rate changes from step to step, as for the first round. None: it does
    not."""
    function: str | None = None
    """The own algorithm, by name; None: one of ours."""

    @property
    def passes(self) -> int:
        """How often a device passes over its data."""
        return passes_of(self.algorithm, self.epochs, self.personal_epochs, self.hyper)


def local_settings(plan: Plan, bundle: Bundle) -> LocalSettings:
    """Raises PlanError if the plan and the bundle do not fit together."""
    plan.check_against(bundle.manifest)
    local = plan.local
    return LocalSettings(
        plan.hyper(bundle.manifest),
        local.epochs,
        local.batch_size,
        local.algorithm,
        local.personal_epochs,
        plan.privacy.clip if plan.privacy is not None and plan.algorithm.computes else None,
        plan.steps_of(0),
        local.function,
    )


def steps_of(task: LocalSettings, examples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of steps that devices with these numbers of examples do."""
    if not task.batch_size:
        return np.full_like(examples, task.passes)
    return task.passes * -(-examples // task.batch_size)


class PerDevice:
    """The back end ``bundle``: the device's own runtime and training loop on graphs/train.onnx,
    device after device."""

    def __init__(
        self,
        bundle: Bundle,
        task: LocalSettings,
        source: Source,
        provider: ProviderName = "cpu",
        kept: KeptRows[RowReader] = NOTHING_KEPT,
    ) -> None:
        """``kept``: where the rows of jobs are, if jobs have any."""
        self.bundle, self.task, self.source, self.manifest = bundle, task, source, bundle.manifest
        self.runtime = open_runtime(bundle, kind="onnx", provider=provider)
        self.algorithm, self.kept = ALGORITHMS[task.algorithm], kept
        name = task.function
        self.own = None if name is None else checked(name, find(LOCAL_ALGORITHM, name, KEY))
        self.sizes = sizes = row_sizes(self.manifest, task.algorithm)
        more = {KEPT_STATE: sizes.states, TIED: sizes.tied}
        parts = {*EXCHANGES[task.algorithm].parts, BUFFERS} - {UPDATE}
        more |= {part: self.manifest.elements_of(part) for part in sorted(parts)}
        self.more = {name: size for name, size in more.items() if size}
        """The vectors that training makes beside the update, and their elements."""

    def schedule(self, inputs: RoundInputs) -> StepSchedule | None:
        """Return how the learning rate changes from step to step."""
        return self.task.schedule if inputs.schedule is None else inputs.schedule

    def train(self, inputs: RoundInputs, jobs: Sequence[Job]) -> TrainedDevices:
        rows = [self._train(inputs, job) for job in jobs]
        return from_rows(rows, len(inputs.model), self.manifest.metrics, self.more)

    def begin(self, inputs: RoundInputs, jobs: Sequence[Job]) -> ResultReader:
        # There is no other process: a device is trained when its result is read, and never if it is
        # not.
        return PendingResults(
            lambda pending, index: pending.put([index], self.train(inputs, [jobs[index]]))
        ).read

    def kept_state(self, job: Job) -> Vector | None:
        """Return what the job's device has kept; None: nothing yet."""
        row = _row(self.kept.states, job.kept)
        # In a family's rows there is room for what another bundle leaves.
        return None if row is None else row[: self.sizes.states]

    def tied(self, job: Job) -> dict[str, Vector]:
        """Return the tied vectors that the job's task goes on from, by name; empty: zeros."""
        row, names = _row(self.kept.tied, job.tied), self.algorithm.tied
        return {} if row is None else dict(zip(names, row.reshape(len(names), -1), strict=True))

    def _split(self, row: Vector | None) -> tuple[Vector | None, Vector | None]:
        """Return the kept state and the personal model of a row, each None if there is none."""
        if row is None:
            return None, None
        size = kept_state_size(self.manifest)
        return row[:size] if size else None, row[size:] if size < len(row) else None

    def _train(self, inputs: RoundInputs, job: Job) -> TrainedDevice:
        data = as_data(self.source.arrays(job.device))
        done = 0

        def count(steps: int, loss: float) -> None:
            nonlocal done
            done = steps

        settings = TaskSettings(
            hyper=self.task.hyper if inputs.hyper is None else inputs.hyper,
            epochs=self.task.epochs,
            batch_size=self.task.batch_size,
            seed=job.seed,
            time_budget=None if job.steps is None else float(job.steps),
            # seconds are steps: a budget of n seconds ends the training after n steps
            clock=lambda: float(done),
            on_step=count,
            personal_epochs=self.task.personal_epochs,
            schedule=self.schedule(inputs),
            own=self.own,
        )
        kept_state, personal = self._split(self.kept_state(job))
        begin, tied = inputs.begin(job), self.tied(job)
        inputs_of_job = Inputs(begin, kept_state, inputs.vectors, tied, personal)
        try:
            outcome = run_algorithm(
                self.task.algorithm, self.runtime, self.bundle, data, inputs_of_job, settings
            )
        except DivergedError:
            return TrainedDevice(
                np.zeros_like(inputs.model), {}, data.examples, done, 0, False, np.nan, 0.0, True
            )
        except TrainingError as error:
            if self.own is None:
                raise
            # a rehearsal finds what is wrong with a function
            raise SimulatorError(f"device {job.device}: {error}") from error
        result, vectors = outcome.result, dict(outcome.parts)
        vectors[KEPT_STATE] = result.kept_state
        if outcome.personal is not None:
            vectors[KEPT_STATE] = np.concatenate([result.kept_state, outcome.personal])
        if outcome.tied:
            vectors[TIED] = np.concatenate([outcome.tied[name] for name in self.algorithm.tied])
        return TrainedDevice(
            result.update,
            dict(result.metrics),
            result.examples,
            result.steps,
            result.seen,
            result.complete,
            result.loss,
            result.largest,
            vectors=vectors,
        )

    def evaluate(self, inputs: RoundInputs, jobs: Sequence[Job]) -> list[Evaluation | None]:
        self.runtime.load(inputs.model)
        found = []
        for job in jobs:
            if self.manifest.local_size > self.manifest.size:
                load_model(self.runtime, self.bundle, inputs.begin(job), self.kept_state(job))
            elif inputs.models is not None:
                self.runtime.load(inputs.begin(job))
            found.append(self._evaluate(job))
        return found

    def evaluate_personal(
        self, inputs: RoundInputs, jobs: Sequence[Job]
    ) -> list[Evaluation | None]:
        evaluations = []
        for job in jobs:
            _, personal = self._split(self.kept_state(job))
            measured = self.algorithm.measured
            model = inputs.begin(job)
            own = None if personal is None else measured(personal, model, self.manifest)
            self.runtime.load(model if own is None else own)
            evaluations.append(self._evaluate(job))
        return evaluations

    def _evaluate(self, job: Job) -> Evaluation | None:
        """Evaluate the loaded model on the job's device."""
        try:
            return evaluate_data(self.runtime, self.source.arrays(job.device))
        except DivergedError:
            return None

    def close(self) -> None:
        """Does nothing: only memory is held."""


def _row(reader: RowReader | None, row: int) -> Vector | None:
    """Return a copy of a row. None: there is none."""
    if row == NO_ROW:
        return None
    assert reader is not None
    return reader.read(row)


def means(parts: Sequence[Evaluation]) -> dict[str, float]:
    """Return the means over all examples. fsum is exact: the means do not depend on how the devices
    were divided."""
    examples = sum(part.examples for part in parts)
    rows = [{"loss": part.loss_sum, **part.metric_sums} for part in parts]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: fsum(row[name] for row in rows) / examples for name in names}
