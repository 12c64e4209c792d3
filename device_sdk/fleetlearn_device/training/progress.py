"""How far a task's training is, so that a later process can go on with it, bit for bit.

A task is trained in one part, or in two (Ditto, FedRep); a part is one call of ``train``. What a
checkpoint holds: the model and the optimizer's state, the place in the data's order (which seeds
and examples follow from), the sums so far, and the results of the parts that are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.runtimes.runtime import Runtime

WRITE_SHARE = 0.02
"""Most of the training's time that writing checkpoints may take."""
FLASH_RATE = 100_000.0
"""Most bytes of checkpoints for each second of training, in the mean: 8.6 GB in a day of it."""
WORTH_KEEPING = 10.0
"""Seconds of training from which on a device that stops keeps its task rather than give it back."""


class DoneSteps(msgspec.Struct):
    """What the steps of a part so far add up to."""

    steps: int = 0
    seen: int = 0
    """Examples in all steps."""
    passes: int = 0
    """Passes before the one of the last step."""
    seen_in_pass: int = 0
    """Examples of the last step's pass."""
    batches_in_pass: int = 0
    loss_sum: float = 0.0
    metric_sums: dict[str, float] = msgspec.field(default_factory=dict)
    factors: float = 0.0
    """Of the schedule of the learning rate."""

    def add(
        self,
        epoch: int,
        examples: int,
        loss: float,
        metrics: Mapping[str, float],
        factor: float = 1.0,
    ) -> None:
        """Count a step of the pass ``epoch``, from 0. ``factor``: of its learning rate."""
        if epoch > self.passes:
            self.passes, self.seen_in_pass, self.batches_in_pass = epoch, 0, 0
        self.steps += 1
        self.factors += factor
        self.seen += examples
        self.seen_in_pass += examples
        self.batches_in_pass += 1
        self.loss_sum += loss * examples
        for name, value in metrics.items():
            self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value * examples

    def examples_of_a_pass(self, passes: int, complete: bool) -> int:
        """Return the mean of the complete passes: a pass of the user's own may vary in length."""
        unfinished = 0 if complete else self.seen_in_pass
        return round((self.seen - unfinished) / passes)


class PartInProgress(msgspec.Struct):
    """A part of the training that has done at least one step."""

    done: DoneSteps
    seconds: float
    """Since the part began, without the time between processes."""
    step_seconds: float
    """The same since its first step began."""
    evaluation: Evaluation | None
    """Of the model before training, where it was asked for."""


class _Content(msgspec.Struct, frozen=True):
    """The numbers of a checkpoint."""

    part: PartInProgress
    results: list[dict[str, Any]]
    """Of the parts that are done: what of each result is no vector."""
    examples: int
    """How many the data are said to have."""
    batches: int
    """What the task's heartbeats count."""
    starts: int
    """How often a process had begun the task's training."""
    fingerprint: int = 0
    """Of the data's examples; 0 where the user makes the batches."""
    rows: tuple[int, int] | None = None
    """The first and the last row of the data; None where rows have no numbers."""
    measured: dict[str, Evaluation] = {}
    """What the algorithm had measured of other models than the one it trains, by its names."""


class Checkpoint(NamedTuple):
    """What a process finds of a training that an earlier one began."""

    part: PartInProgress
    results: list[dict[str, Any]]
    """Of the parts that are done: the fields of each ``TrainingResult``."""
    examples: int
    batches: int
    starts: int
    fingerprint: int
    rows: tuple[int, int] | None
    local: Vector
    """The whole model: float32, shape (local_size,)."""
    state: Vector
    """float32, shape (state_size,)."""
    kept: dict[str, Vector]
    """What the algorithm had measured, by its names."""
    measured: dict[str, Evaluation]
    """The same of other models than the one it trains."""

    @property
    def seconds(self) -> float:
        """Seconds that the training took so far, all parts together."""
        return self.part.seconds + sum(float(result["seconds"]) for result in self.results)


def read_checkpoint(content: bytes, vectors: Mapping[str, Vector]) -> Checkpoint | None:
    """Return a checkpoint as ``Progress`` wrote it; None where the content is of another
    version."""
    try:
        numbers = msgspec.msgpack.decode(content, type=_Content)
        results = []
        for index, row in enumerate(numbers.results):
            own = _named(vectors, f"result.{index}.")
            evaluation = msgspec.convert(row["evaluation"], Evaluation | None)
            results.append({**row, "evaluation": evaluation, **own})
        return Checkpoint(
            numbers.part,
            results,
            numbers.examples,
            numbers.batches,
            numbers.starts,
            numbers.fingerprint,
            numbers.rows,
            vectors["local"],
            vectors["state"],
            _named(vectors, "kept."),
            numbers.measured,
        )
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
        return None


def _named(vectors: Mapping[str, Vector], begin: str) -> dict[str, Vector]:
    return {
        name.removeprefix(begin): vector
        for name, vector in vectors.items()
        if name.startswith(begin)
    }


class Progress:
    """One task's training, over all its parts.

    Args:
        found: What an earlier process left. None: nothing.
        write: Saves a checkpoint (its numbers, its vectors), and returns its bytes. None: none are
            saved.
        every: Least seconds of training between two checkpoints.
        examples, starts, fingerprint, rows: As in the checkpoint.
        batches: Says what the task's heartbeats count now.
        keep_when_stopped: Says whether a training that is stopped is to go on later.
        clock: Seconds, rising: measures how long a checkpoint takes.
    """

    def __init__(
        self,
        found: Checkpoint | None = None,
        write: Callable[[bytes, Mapping[str, Vector]], int] | None = None,
        *,
        every: float = 0.0,
        examples: int = 0,
        starts: int = 0,
        fingerprint: int = 0,
        rows: tuple[int, int] | None = None,
        batches: Callable[[], int] = lambda: 0,
        keep_when_stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kept: dict[str, Vector] = {} if found is None else found.kept
        """Name, as the algorithm gives it -> a vector that it needs beside the model that it
        trains."""
        self.measured: dict[str, Evaluation] = {} if found is None else found.measured
        """Name, as the algorithm gives it -> the measurement of another model than the one that it
        trains."""
        self.worth_keeping = found is not None
        """Whether so much is done that a device that stops had better keep the task."""
        self._found, self._write, self._every, self._clock = found, write, every, clock
        self._examples, self._starts, self._batches = examples, starts, batches
        self._fingerprint, self._rows = fingerprint, rows
        self.keep_when_stopped = keep_when_stopped
        self._results: list[dict[str, Any]] = []
        self._trained = 0.0
        """Seconds of training in this process, as far as the last step."""
        self._saved_at = 0.0
        """``_trained`` at the last checkpoint."""
        self._wait = every
        """Seconds of training after which the next checkpoint is due."""

    def begin_part(self, runtime: Runtime) -> PartInProgress | dict[str, Any] | None:
        """Return how far an earlier process came with the next part: its result's fields where it
        was done, None where it had not begun. ``runtime`` is given the model as it was left."""
        found, index = self._found, len(self._results)
        if found is None:
            return None
        runtime.resume(found.local, found.state)
        if index < len(found.results):
            return found.results[index]
        self._found = None
        return found.part

    def end_part(self, result: Mapping[str, Any]) -> None:
        """A part is done. ``result``: its result's fields."""
        self._results.append(dict(result))

    def after_step(
        self, step_seconds: float, part: Callable[[], PartInProgress], runtime: Runtime
    ) -> bool:
        """Save a checkpoint if one is due, and return whether it was. ``step_seconds``: how long
        the step took, by the training's clock. ``part``: how far the part is now."""
        self._trained += step_seconds
        self.worth_keeping = self.worth_keeping or self._trained >= WORTH_KEEPING
        if self._write is None or self._trained - self._saved_at < self._wait:
            return False
        self.save(part(), runtime)
        return True

    def stopped(self, part: PartInProgress, runtime: Runtime) -> None:
        """Training is stopped before its next step: save a checkpoint if the task is to be kept."""
        if self.keep_when_stopped():
            self.save(part, runtime)

    def save(self, part: PartInProgress, runtime: Runtime) -> None:
        """Save a checkpoint now."""
        if self._write is None:
            return
        vectors = {"local": runtime.local, "state": runtime.state}
        vectors |= {f"kept.{name}": vector for name, vector in self.kept.items()}
        results = []
        for index, result in enumerate(self._results):
            arrays = {key: value for key, value in result.items() if isinstance(value, np.ndarray)}
            vectors |= {f"result.{index}.{key}": value for key, value in arrays.items()}
            results.append({key: value for key, value in result.items() if key not in arrays})
        content = _Content(
            part,
            results,
            self._examples,
            self._batches(),
            self._starts,
            self._fingerprint,
            self._rows,
            self.measured,
        )
        began = self._clock()
        size = self._write(msgspec.msgpack.encode(content), vectors)
        took = self._clock() - began
        self._saved_at = self._trained
        self._wait = max(self._every, took / WRITE_SHARE, size / FLASH_RATE)
