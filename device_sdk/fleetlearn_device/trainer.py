"""Carries out a task's training in a thread of its own, from the files in the state directory to a report."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.messages import Report, Task, decode_from_device, encode
from fleetlearn_protocol.vector import Vector, checksum, from_bytes

from fleetlearn_device.data import Data
from fleetlearn_device.runtime import Kind, Runtime, open_runtime
from fleetlearn_device.state import State
from fleetlearn_device.train import train


class Trained(NamedTuple):
    report: Report
    update: Vector
    """float32, shape (P,): the parameters after training minus the round's model."""


class Trainer:
    """One device's training. ``steps`` may be read, and ``halt`` set, from another thread."""

    def __init__(self, state: State, data: Data, kind: Kind, threads: int) -> None:
        self.steps = 0
        self.halt = threading.Event()
        """Set it, and a training under way ends before its next step; ``train`` clears it."""
        self._state, self._data, self._kind, self._threads = state, data, kind, threads
        self._opened: tuple[str, Runtime] | None = None

    def train(self, task: Task, seconds: float) -> Trained:
        """Train for at most ``seconds``, opening the bundle included.

        Raises what ``open_runtime`` and ``train`` raise, ProtocolError on a model that is not finite or does not fit.
        """
        end = time.monotonic() + seconds
        self.steps = 0
        model = from_bytes(self._state.model(task.model).read_bytes())
        runtime = self._open(task, model)
        outcome = train(
            runtime,
            self._data,
            hyper=task.hyper,
            epochs=task.epochs,
            batch_size=task.batch_size,
            seed=task.seed,
            time_budget=end - time.monotonic(),
            evaluate=task.evaluate,
            should_stop=self.halt.is_set,
            on_step=self._count,
        )
        report = Report(
            task=task.task,
            round=task.round,
            crc32=checksum(outcome.update),
            size=outcome.update.nbytes,
            examples=outcome.examples,
            steps=outcome.steps,
            epochs=outcome.epochs,
            complete=outcome.complete,
            loss=outcome.loss,
            metrics=outcome.metrics,
            seconds=outcome.seconds,
            encoding=task.encoding,
            evaluation=outcome.evaluation,
        )
        decode_from_device(encode(report))  # refuses here what the coordinator would refuse
        return Trained(report, outcome.update)

    def _open(self, task: Task, model: Vector) -> Runtime:
        """The task's runtime with the round's model in it: the last one, if it was of the same bundle."""
        if self._opened is not None and self._opened[0] == task.bundle:
            self._opened[1].load(model)
            return self._opened[1]
        self._opened = None  # two models at a time may be more than the memory holds
        try:
            runtime = open_runtime(self._state.bundle(task.bundle), self._kind, self._threads, model=model)
        except BundleError:
            self._state.forget_bundle(task.bundle)
            raise
        self._opened = task.bundle, runtime
        return runtime

    def _count(self, steps: int, loss: float) -> None:
        self.steps = steps
