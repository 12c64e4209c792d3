"""A peer's own training between two exchanges: a bundle's steps over the device's data."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.splitmix64 import mix
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.peers.book import PeerTraining
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.kept_state import (
    collect_kept_state,
    kept_state_size,
    load_model,
)
from fleetlearn_device.training.task_data import TaskData
from fleetlearn_device.training.train import evaluate_data, train


class LocalResult(NamedTuple):
    """What a training made."""

    model: Vector
    """Shape (P,)."""
    kept: Vector
    """What stays on the device, shape (kept_state_size,)."""
    steps: int
    loss: float
    """Mean over the examples of all steps."""


class LocalTraining:
    """Trains models on one device's data. ``row``: the peer's row of W."""

    def __init__(
        self, bundle: Bundle, runtime: Runtime, data: TaskData, how: PeerTraining, row: int
    ) -> None:
        self.bundle, self.runtime, self.data, self.how, self.row = bundle, runtime, data, how, row
        self.halt = threading.Event()
        """Set: training ends before its next batch (StoppedError)."""

    @property
    def examples(self) -> int:
        """How many examples the device trains on."""
        return self.data.training.examples

    @property
    def kept_size(self) -> int:
        """Elements of what stays on the device."""
        return kept_state_size(self.runtime.manifest)

    def seed(self, number: int) -> int:
        """Return the seed of a training, 0 to 2^53 - 1: another one for each peer and training."""
        state = mix(np.array([self.how.seed], np.uint64)) + np.uint64((self.row << 32) + number)
        return int(mix(state)[0]) >> 11

    def first(self) -> tuple[Vector, Vector]:
        """Return the bundle's model, float32, shape (P,), and what stays on the device before the
        first training, shape (kept_size,). Raises BundleError."""
        model = self.bundle.parameters()[: self.runtime.manifest.size]
        load_model(self.runtime, self.bundle, model, None)
        return model, collect_kept_state(self.runtime)

    def train(self, model: Vector, kept: Vector, number: int) -> LocalResult:
        """Train from a model, float32, shape (P,), and ``kept``, shape (kept_size,). Raises
        TrainingError, DataError, ValueError, StepError, MemoryError."""
        runtime, how, done = self.runtime, self.how, 0

        def count(steps: int, loss: float) -> None:
            nonlocal done
            done = steps

        load_model(runtime, self.bundle, model, kept)
        result = train(
            runtime,
            self.data.training,
            hyper=how.hyper,
            epochs=how.epochs,
            batch_size=how.batch_size,
            seed=self.seed(number),
            should_stop=self.halt.is_set,
            should_finish=lambda: 0 < how.local_steps <= done,
            on_step=count,
        )
        trained = runtime.parameters.copy()
        return LocalResult(trained, result.kept_state, result.steps, result.loss)

    def measure(self, model: Vector, kept: Vector) -> Evaluation:
        """Return the sums of a model over the examples that are held out, or over all."""
        load_model(self.runtime, self.bundle, model, kept)
        return evaluate_data(self.runtime, self.data.measured, should_stop=self.halt.is_set)
