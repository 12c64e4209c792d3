"""What the coordinator gets of the updates that simulated devices send: clipped and encoded there,
decoded here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from fleetlearn_device.training.local_noise import add_noise
from fleetlearn_device.training.sent_parts import encode_parts
from fleetlearn_device.training.train import DivergedError, TrainingError
from fleetlearn_protocol.encodings import FLOAT32, RESIDUAL, SLAB, Encoding
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector, scatter

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.clipped_updates import CLIPPED, clip_rows
from fleetlearn_simulator.fleet.device_rows import DeviceRows
from fleetlearn_simulator.fleet.named_rows import NamedRows
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.keyed_random import secret_bytes
from fleetlearn_simulator.training.kept_rows import NO_ROW
from fleetlearn_simulator.training.trained_devices import TIED, ResultReader, TrainedDevices


class TiedToUpdate(NamedTuple):
    """How the algorithm's tied vectors follow the update that the coordinator gets, as
    ``tied_as_sent`` has it."""

    factors: tuple[float, ...] = ()
    """For each tied vector: by which multiple of the update it changes. Empty: none follows the
    update."""
    buffers: Sequence[slice] = ()
    """The places of the model's elements that are no trained parameters."""

    def follow(self, tied: Vector, rounding: Vector) -> None:
        """Let a device's tied vectors, one after the other, follow what the encoding changed in its
        update."""
        scatter(rounding, self.buffers, 0.0)
        for factor, vector in zip(self.factors, tied.reshape(len(self.factors), -1), strict=True):
            vector += np.float32(factor) * rounding


NOT_TIED = TiedToUpdate()


class DeviceNoise(NamedTuple):
    """The noise that devices add themselves, with the mechanism local."""

    deviation: float
    """Standard deviation on each element of a clipped update."""
    seed: int
    """Of the simulation: a device's own noise follows from it, where a real device has the
    operating system's random numbers."""

    def add(self, update: Vector, tasks: RunningTasks, index: int) -> Vector:
        """Return the update of one of these tasks with its device's noise. Raises
        DivergedError."""
        about = tasks.device[index], tasks.seed[index]
        return add_noise(update, self.deviation, secret_bytes(self.seed, "device noise", *about))


def as_sent(
    encoding: Encoding,
    residuals: DeviceRows | None,
    reader: ResultReader,
    tasks: RunningTasks,
    tied_to: TiedToUpdate = NOT_TIED,
    clip: float | None = None,
    noise: DeviceNoise | None = None,
) -> ResultReader:
    """Return a reader of the same results, with the updates as the coordinator gets them.
    ``residuals``: what the encoding left out of the devices' updates that counted; new residuals
    are among the results' vectors. ``tied_to``: how the tied vectors among them follow. ``clip``:
    the L2 norm that no update may have more of; whose had is among the vectors too. ``noise``: what
    devices add then."""
    if encoding == FLOAT32 and clip is None:
        return reader
    rows = [NO_ROW] * len(tasks.device) if residuals is None else residuals.of(tasks.device)
    if noise is not None and clip is not None:
        return partial(_read_noisy, encoding, reader, tasks, clip, noise)
    return partial(_read, encoding, residuals, rows, reader, tasks, tied_to, clip)


def rows_as_sent(
    encoding: Encoding, named: NamedRows, reader: ResultReader, tasks: RunningTasks
) -> ResultReader:
    """The same where devices send the rows of sparse tables that their data name."""
    return reader if encoding == FLOAT32 else partial(_read_rows, encoding, named, reader, tasks)


def _read_rows(
    encoding: Encoding,
    named: NamedRows,
    reader: ResultReader,
    tasks: RunningTasks,
    indices: Sequence[int],
) -> TrainedDevices:
    found = reader(indices)
    for row, index in enumerate(indices[: len(found)]):
        if found.diverged[row]:
            continue
        try:
            update = named.encoded(
                encoding, found.updates[row], tasks.device[index], tasks.seed[index]
            )
        except ProtocolError:  # the encoding cannot hold it
            found.diverged[row] = True
            continue
        found.updates[row] = update
        found.largest[row] = np.abs(update).max(initial=0.0)
    return found


def _read_noisy(
    encoding: Encoding,
    reader: ResultReader,
    tasks: RunningTasks,
    clip: float,
    noise: DeviceNoise,
    indices: Sequence[int],
) -> TrainedDevices:
    """Read what devices send that clip, add their noise, and encode then, as ``encode_parts``
    does. No residual goes with that."""
    found = _read(FLOAT32, None, (), reader, tasks, NOT_TIED, clip, indices)
    for row, index in enumerate(indices[: len(found)]):
        if found.diverged[row]:
            continue
        try:
            noisy = noise.add(found.updates[row], tasks, index)
        except DivergedError:  # far too little noise for such an update
            found.diverged[row] = True
            continue
        if encoding != FLOAT32:
            noisy = encoding.decode(encoding.encode(noisy, tasks.seed[index]), len(noisy))
        found.updates[row] = noisy
        found.largest[row] = np.abs(noisy).max(initial=0.0)
    return found


def _read(
    encoding: Encoding,
    residuals: DeviceRows | None,
    rows: Sequence[int],
    reader: ResultReader,
    tasks: RunningTasks,
    tied_to: TiedToUpdate,
    clip: float | None,
    indices: Sequence[int],
) -> TrainedDevices:
    found = reader(indices)
    size = found.updates.shape[1]
    if clip is not None:
        found.vectors[CLIPPED] = np.zeros((len(found), 1), np.float32)
        if encoding == FLOAT32 and size <= SLAB:  # no device's encoding changes anything
            found.vectors[CLIPPED][:, 0] = clip_rows(found.updates, clip)
            found.largest[:] = np.abs(found.updates).max(axis=1, initial=0.0)
            found.diverged[:] |= ~np.isfinite(found.largest)
            return found
    if residuals is not None:
        found.vectors[RESIDUAL] = np.zeros_like(found.updates)
    for row, index in enumerate(indices[: len(found)]):
        if found.diverged[row]:
            continue
        tied = dict[str, Vector]()
        if residuals is not None and rows[index] != NO_ROW:
            tied[RESIDUAL] = residuals.file.read(rows[index])
        try:
            sent = encode_parts(
                {UPDATE: encoding.name}, {UPDATE: found.updates[row]}, tasks.seed[index], tied, clip
            )
        except DivergedError:  # the encoding cannot hold it
            found.diverged[row] = True
            continue
        except TrainingError as error:
            raise SimulatorError(f"an update cannot be encoded: {error}") from error
        try:
            update = encoding.decode(sent.contents[UPDATE], size)
        except ProtocolError as error:  # of an own encoding, which does not read what it wrote
            raise SimulatorError(f"an update cannot be decoded: {error.text}") from error
        if tied_to.factors:
            tied_to.follow(found.vectors[TIED][row], update - found.updates[row])
        found.updates[row] = update
        if sent.clipped:
            found.vectors[CLIPPED][row] = 1.0
        found.largest[row] = encoding.check(sent.contents[UPDATE], size)
        if residuals is not None:
            found.vectors[RESIDUAL][row] = sent.tied[RESIDUAL]
    return found
