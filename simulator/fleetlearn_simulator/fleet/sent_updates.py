"""What the coordinator gets of the updates that simulated devices send: encoded there, decoded here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from fleetlearn_device.training.sent_parts import encode_parts
from fleetlearn_device.training.train import DivergedError
from fleetlearn_protocol.encodings import FLOAT32, RESIDUAL, Encoding
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.fleet.device_rows import DeviceRows
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.training.kept_rows import NO_ROW
from fleetlearn_simulator.training.trained_devices import ResultReader, TrainedDevices


def as_sent(
    encoding: Encoding, residuals: DeviceRows | None, reader: ResultReader, tasks: RunningTasks
) -> ResultReader:
    """Return a reader of the same results, with the updates as the coordinator gets them. ``residuals``: what the
    encoding left out of the devices' updates that counted; new residuals are among the results' vectors."""
    if encoding == FLOAT32:
        return reader
    rows = [NO_ROW] * len(tasks.device) if residuals is None else residuals.of(tasks.device)
    return partial(_read, encoding, residuals, rows, reader, tasks)


def _read(
    encoding: Encoding,
    residuals: DeviceRows | None,
    rows: Sequence[int],
    reader: ResultReader,
    tasks: RunningTasks,
    indices: Sequence[int],
) -> TrainedDevices:
    found = reader(indices)
    size = found.updates.shape[1]
    if residuals is not None:
        found.vectors[RESIDUAL] = np.zeros_like(found.updates)
    for row, index in enumerate(indices[: len(found)]):
        if found.diverged[row]:
            continue
        tied = dict[str, Vector]()
        if residuals is not None and rows[index] != NO_ROW:
            tied[RESIDUAL] = residuals.file.read(rows[index])
        try:
            sent = encode_parts({UPDATE: encoding.name}, {UPDATE: found.updates[row]}, tasks.seed[index], tied)
        except DivergedError:  # the encoding cannot hold it
            found.diverged[row] = True
            continue
        found.updates[row] = encoding.decode(sent.contents[UPDATE], size)
        found.largest[row] = encoding.check(sent.contents[UPDATE], size)
        if residuals is not None:
            found.vectors[RESIDUAL][row] = sent.tied[RESIDUAL]
    return found
