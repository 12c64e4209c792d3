"""Carries out a task's training in a thread of its own, from the files in the state directory to a report."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.encodings import ENCODINGS
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.messages import MODEL, UPDATE, Report, Task, encode
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.import_onnxruntime import ran_out_of_memory
from fleetlearn_device.runtimes.runtime import Kind, Runtime, open_runtime
from fleetlearn_device.storage.state import State
from fleetlearn_device.training.data import Data
from fleetlearn_device.training.kept_state import kept_size, restore
from fleetlearn_device.training.train import TrainingError, train

MAX_STARTS = 3
"""Processes that may end during one task's training, before the device gives the task back."""


class KilledError(TrainingError):
    """The task's training killed the process too often."""

    code = "killed"


class Trained(NamedTuple):
    report: Report
    content: memoryview
    """The bytes of the report's parts, one after the other."""
    bundle: str
    """SHA-256 of its manifest."""
    kept: Vector
    """What the device keeps of its own for its next task of this bundle (kept.py): float32, shape (kept_size,)."""


class Trainer:
    """One device's training. ``steps`` and ``batches`` may be read, and ``halt`` set, from another thread."""

    def __init__(self, state: State, data: Data, kind: Kind, threads: int) -> None:
        self.steps = self.batches = 0
        """Optimizer steps done of the task; and batches, those of the evaluation and one for each step."""
        self.halt = threading.Event()
        """Set it, and a training under way ends before its next step; ``train`` clears it."""
        self._state, self._data, self._kind, self._threads = state, data, kind, threads
        self._opened: tuple[Bundle, Runtime] | None = None

    def train(self, task: Task, seconds: float) -> Trained:
        """Train for at most ``seconds``, opening the bundle included.

        It begins with the round's model and what the device kept from its last task of this bundle, whatever became of
        that task's update. Room for its result is held on the disk before the first step, until the result is saved.
        Raises what ``open_runtime`` and ``train`` raise, ProtocolError on a model that is not finite, KilledError,
        MemoryError, StateError.
        """
        end = time.monotonic() + seconds
        self.steps = self.batches = 0
        starts = self._state.starts(task.task)
        if starts >= MAX_STARTS:
            raise KilledError(
                f"training it killed the process {starts} times, most likely for want of memory; it is not begun again"
            )
        self._state.begin_training(task.task)
        try:
            return self._train(task, end)
        except Exception as error:
            self._state.release()
            if not ran_out_of_memory(error):
                raise
            self._opened = None  # what it holds may be what others lack
            if isinstance(error, MemoryError):
                raise
            raise MemoryError(str(error)) from error
        finally:
            self._state.end_training()

    def _train(self, task: Task, end: float) -> Trained:
        vector, encoding = task.vector(MODEL), ENCODINGS[task.parts[UPDATE]]
        content, received = self._state.vector(vector.sha256).read_bytes(), ENCODINGS[vector.encoding]
        received.check(content)
        model = received.decode(content)
        runtime = self._open(task, model)
        kept = kept_size(runtime.manifest)
        self._state.reserve(encoding.size(runtime.manifest.size), 4 * kept)
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
            on_evaluated=self._count_batch,
        )
        update = encoding.encode(outcome.update)
        report = Report(
            task=task.task,
            round=task.round,
            parts=(encoding.part(UPDATE, update),),
            examples=outcome.examples,
            steps=outcome.steps,
            epochs=outcome.epochs,
            complete=outcome.complete,
            loss=outcome.loss,
            metrics=outcome.metrics,
            seconds=outcome.seconds,
            evaluation=outcome.evaluation,
        )
        encode(report)  # raises here what the coordinator would refuse
        return Trained(report, update, task.bundle, outcome.kept)

    def _open(self, task: Task, model: Vector) -> Runtime:
        """The task's runtime, ready to train: the last one, if it was of the same bundle."""
        try:
            if self._opened is None or self._opened[0].sha256 != task.bundle:
                self._opened = None  # two models at a time may be more than the memory holds
                path = self._state.bundle(task.bundle)
                runtime = open_runtime(path, self._kind, self._threads, model=model)
                bundle = open_bundle(path, files=())
                self._opened = bundle, runtime
                if not kept_size(bundle.manifest):
                    return runtime
            bundle, runtime = self._opened
            restore(runtime, bundle, model, self._state.load_kept(task.bundle, kept_size(bundle.manifest)))
        except BundleError:
            self._opened = None
            self._state.doubt_bundle(task.bundle)
            raise
        return runtime

    def _count(self, steps: int, loss: float) -> None:
        self.steps = steps
        self._count_batch()

    def _count_batch(self) -> None:
        self.batches += 1
