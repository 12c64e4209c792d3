"""What devices with a corruption send in the place of what they trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.messages import BUFFERS
from fleetlearn_protocol.vector import Vector, gather, scatter
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.fleet.running_tasks import RunningTask, RunningTasks
from fleetlearn_simulator.training.trained_devices import ResultReader, TrainedDevices, read_all

SPOILT_AFTER_TRAINING = frozenset({"scaled", "flipped", "garbage"})
"""Corruptions that change an update after training."""
LITTLE = "little"
"""The corruption that takes the updates of all devices that have it."""


def as_spoilt(
    seed: int, present: Vector, places: Sequence[slice], reader: ResultReader, tasks: RunningTasks
) -> ResultReader:
    """Return a reader of the same results, with what devices with a corruption send. ``seed``: of
    the simulation. ``present``: the model that training began from. ``places``: of its elements
    that devices report as values."""
    buffers = _Buffers(places, gather(present, places))
    if LITTLE in tasks.corrupt:
        reader = _Conspiracy(buffers, reader, tasks).read
    if not SPOILT_AFTER_TRAINING.isdisjoint(tasks.corrupt):
        reader = partial(_read_and_spoil, seed, buffers, reader, tasks)
    return reader


class _Buffers(NamedTuple):
    """The buffers of devices that send something else than they trained: spoilt as the rest is, in
    how far they moved."""

    places: Sequence[slice]
    present: Vector
    """Their values in the model that training began from."""

    def moves(self, found: TrainedDevices, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return copies of these rows' updates, with the buffers' moves in their places: shape (n,
        P)."""
        updates = found.updates[rows]
        if self.places:
            scatter(updates, self.places, found.vectors[BUFFERS][rows] - self.present)
        return updates

    def put(self, found: TrainedDevices, rows: Sequence[int], moves: NDArray[np.float32]) -> None:
        """Let these rows have such updates, and the values that the buffers' moves lead to."""
        if self.places:
            found.vectors[BUFFERS][rows] = self.present + gather(moves, self.places)
            scatter(moves, self.places, 0.0)
        found.updates[rows] = moves
        found.largest[rows] = np.abs(moves).max(axis=1)


class _Conspiracy:
    """Devices that send, in place of their updates, the mean of these minus ``factor`` standard
    deviations."""

    def __init__(self, buffers: _Buffers, reader: ResultReader, tasks: RunningTasks) -> None:
        self._buffers, self._reader, self._tasks = buffers, reader, tasks
        self._found: TrainedDevices | None = None

    def read(self, indices: Sequence[int]) -> TrainedDevices:
        if self._found is None:
            self._found = read_all(self._reader, len(self._tasks.task)).copy()
            corrupt = np.array([kind == LITTLE for kind in self._tasks.corrupt])
            rows = np.flatnonzero(corrupt & ~self._found.diverged).tolist()
            if rows:
                updates = self._buffers.moves(self._found, rows).astype(np.float64)
                factors = np.array(self._tasks.factor)[rows, None]
                made = updates.mean(axis=0) - factors * updates.std(axis=0)
                self._buffers.put(self._found, rows, made.astype(np.float32))
        return self._found.select(indices)


def _read_and_spoil(
    seed: int, buffers: _Buffers, reader: ResultReader, tasks: RunningTasks, indices: Sequence[int]
) -> TrainedDevices:
    """Read results, and spoil the updates of devices that do so."""
    found = reader(indices)
    for row, index in enumerate(indices[: len(found)]):
        if tasks.corrupt[index] in SPOILT_AFTER_TRAINING and not found.diverged[row]:
            with np.errstate(over="ignore"):  # the coordinator refuses what overflows
                update = spoilt(seed, tasks.row(index), buffers.moves(found, [row])[0])
                buffers.put(found, [row], update[None])
    return found


def spoilt(seed: int, task: RunningTask, update: Vector) -> Vector:
    """Return the update that a device with a corruption sends."""
    factor = np.float32(task.factor)
    match task.corrupt:
        case "scaled":
            return factor * update
        case "flipped":
            return -factor * update
        case "garbage":
            noise = keyed_random.generator(seed, "garbage", task.device, task.round)
            length = float(np.linalg.norm(update)) * float(factor)
            made = noise.standard_normal(update.size, np.float32)
            return made * np.float32(length / max(float(np.linalg.norm(made)), 1e-30))
    raise ValueError(f"corruption {task.corrupt!r} is not known")
