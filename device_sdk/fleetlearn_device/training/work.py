"""What an algorithm is given, what it works with, and what it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.messages import Evaluation, StepSchedule
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.checks import Batch, check_hyper
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.data import Data
from fleetlearn_device.training.kept_state import load_model
from fleetlearn_device.training.progress import Progress
from fleetlearn_device.training.train import TrainingResult, train


class Inputs(NamedTuple):
    """What a task begins with."""

    model: Vector
    """The round's model: float32, shape (P,)."""
    kept_state: Vector | None = None
    """float32, shape (kept_state_size,). None at the device's first task of the bundle."""
    vectors: Mapping[str, Vector] = {}
    """The task's other vectors by name: float32, shape (P,)."""
    tied: Mapping[str, Vector] = {}
    """The tied vectors that the task goes on from, by name: float32, shape (P,). Those that are
    absent are zeros."""
    personal: Vector | None = None
    """What an algorithm with a personal model left: float32, the model's P elements, and behind
    them whatever else the algorithm keeps. None at the first task."""


class TaskSettings(NamedTuple):
    """How the task is done: the arguments of ``train``, and the passes that ``train`` does not
    know."""

    hyper: Mapping[str, float]
    """Of the bundle's step, and those of the algorithm (the protocol's ``EXCHANGES``)."""
    epochs: int
    batch_size: int
    seed: int
    time_budget: float | None = None
    evaluate: bool = False
    held_out: Data | None = None
    counted: int | None = None
    should_stop: Callable[[], bool] = lambda: False
    should_finish: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    on_step: Callable[[int, float], None] | None = None
    on_evaluated: Callable[[], None] = lambda: None
    personal_epochs: int | None = None
    """Passes in which the personal model or parameters are trained by themselves. None: as many as
    ``epochs``."""
    progress: Progress | None = None
    """The task's, which the parts of its training go on from."""
    schedule: StepSchedule | None = None
    """Of the learning rate, in each part of the training from its first step on."""
    own: Callable[[TaskWork], TaskOutcome] | None = None
    """The function that the algorithm ``own`` calls (``own_algorithm.checked``)."""

    def train_arguments(self) -> dict[str, Any]:
        """Return what of the settings ``train`` takes, by its names."""
        arguments = self._asdict()
        for name in ("personal_epochs", "own"):  # of algorithms, not of ``train``
            del arguments[name]
        return arguments


class TaskOutcome(NamedTuple):
    """What a task leaves."""

    result: TrainingResult
    parts: Mapping[str, Vector]
    """What is reported, by name: float32, shape (P,); the part ``buffers``, which ``run_algorithm``
    adds: (B,)."""
    tied: Mapping[str, Vector] = {}
    """The tied vectors after the task, by name: float32, shape (P,)."""
    personal: Vector | None = None
    """The personal model after the task, where the algorithm has one, and what else the algorithm
    keeps: float32, shape (``personal_size``,)."""
    personal_evaluation: Evaluation | None = None
    """Sums of the personal model before the task, on what is held out or on all data, where the
    task evaluates."""


class TaskWork(NamedTuple):
    """All that an algorithm works with."""

    runtime: Runtime
    bundle: Bundle
    data: Data | Batch | Iterable[Batch]
    inputs: Inputs
    settings: TaskSettings
    progress: Progress
    numbers: Mapping[str, float] = {}
    """The hyper-parameters of the algorithm itself. ``settings`` has those of the bundle's step."""

    def load(self, correction: Vector | None = None) -> None:
        """Load the round's model and the kept state. correction: shape (P,), added to each step's
        gradient."""
        load_model(self.runtime, self.bundle, self.inputs.model, self.inputs.kept_state, correction)

    def train(self, **changes: Any) -> TrainingResult:
        """Train the loaded model with the task's settings. changes: arguments of ``train`` that
        differ from these."""
        arguments = self.settings.train_arguments() | {"progress": self.progress} | changes
        return train(self.runtime, self.data, **arguments)

    def tied(self, name: str) -> Vector:
        """Return the tied vector that the task goes on from."""
        found = self.inputs.tied.get(name)
        return np.zeros_like(self.inputs.model) if found is None else found

    @property
    def hyper(self) -> dict[str, float]:
        """All hyper-parameters of the bundle. Raises ValueError."""
        return check_hyper(self.settings.hyper, self.runtime.manifest.hyper)
