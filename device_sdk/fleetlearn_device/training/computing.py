"""Carries out a task of a computation: sums over the device's rows, batch by batch, without a
runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.computations.function_settings import FunctionSums
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.private_sums import clip_sums
from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.encodings import INT64, MASKED64
from fleetlearn_protocol.formats.whole import sums_to_bytes
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import SUMS, Report, Task
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.computations.functions import bound
from fleetlearn_device.computations.registry import BATCH, sum_up
from fleetlearn_device.own_code import NO_FUNCTIONS, FunctionError, OwnFunctions
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.data import one_pass
from fleetlearn_device.training.task_data import TaskData
from fleetlearn_device.training.train import FunctionFailedError, OutOfTimeError, StoppedError


class ComputedSums(NamedTuple):
    """What a task's computation found."""

    report: Report
    """Without its part."""
    sums: Sums
    """int64, shape (S,)."""

    def plain(self) -> tuple[Report, memoryview]:
        """Return the report of the sums as they are, and the bytes of its part."""
        content = sums_to_bytes(self.sums)
        part = INT64.part(SUMS, content)
        return msgspec.structs.replace(self.report, parts=(part,)), content


def check_computation(
    task: Task, manifest: Manifest, functions: OwnFunctions = NO_FUNCTIONS
) -> None:
    """Raise UnsupportedError unless the bundle has the task's computation, its sums alone are asked
    for, and its function, if it has one, is among those that the owner allows."""
    algorithm, parts = task.algorithm, task.parts
    there = "graphs" if manifest.computation is msgspec.UNSET else kind_of(manifest.computation)
    if there != algorithm or algorithm not in KINDS:
        raise UnsupportedError(
            f"the task asks for the computation {algorithm}, and bundle {manifest.name} has "
            f"{there}. Coordinator and device may be of different versions: update both"
        )
    encoding = INT64.name if task.secure is None else MASKED64.name
    if parts != {SUMS: encoding}:
        raise UnsupportedError(
            f"a computation was asked for the parts {', '.join(parts)}; its only part is {SUMS}, "
            f"as {encoding}"
        )
    if task.clip is not None and KINDS[algorithm].groups is None:
        raise UnsupportedError(
            f"the task asks for clipped sums of the computation {algorithm}, which this device "
            "cannot clip. Coordinator and device may be of different versions: update both"
        )
    if isinstance(manifest.computation, FunctionSums):
        try:
            bound(manifest.computation, functions)
        except FunctionError as error:
            raise UnsupportedError(str(error)) from None


def compute(
    task: Task,
    manifest: Manifest,
    state: Vector,
    data: TaskData,
    *,
    end: float,
    should_stop: Callable[[], bool],
    on_batch: Callable[[int], None],
    functions: OwnFunctions = NO_FUNCTIONS,
) -> ComputedSums:
    """Return the sums over all of the device's rows, those that are held out of trainings too; as
    private_sums.py writes them where the task has a clip norm.

    end: of the time that there is (``time.monotonic``). on_batch: called after each batch with
    their number. functions: those that the owner allows. Raises DataError (rows that cannot be
    added up), FunctionFailedError, StoppedError, OutOfTimeError.
    """
    began, counted = time.monotonic(), RowCount()
    batches = counted.rows_of(manifest, data)

    def watched() -> Iterator[Columns]:
        for columns in batches:
            if should_stop():
                raise StoppedError
            if time.monotonic() > end:
                raise OutOfTimeError(
                    f"the computation did not pass over the rows in {end - began:.3g} s"
                )
            yield columns
            counted.batches += 1
            on_batch(counted.batches)

    assert manifest.computation is not msgspec.UNSET
    try:
        sums: Sums = sum_up(state, watched(), manifest.computation, functions)
    except FunctionError as error:
        raise FunctionFailedError(str(error)) from error.__cause__
    except ValueError as error:
        raise DataError(str(error)) from None
    clipped: bool | None = None
    if task.clip is not None:
        groups = KINDS[task.algorithm].groups
        assert groups is not None, "check_computation has seen to that"
        sums, clipped = clip_sums(sums, groups(manifest.computation, state), task.clip)
    report = Report(
        task=task.task,
        round=task.round,
        parts=(),
        examples=counted.rows,
        steps=counted.batches,
        epochs=1.0,
        complete=True,
        loss=0.0,
        seconds=time.monotonic() - began,
        clipped=clipped,
    )
    return ComputedSums(report, sums)


class RowCount:
    """How many rows and batches there were so far."""

    def __init__(self) -> None:
        self.rows = self.batches = 0

    def rows_of(self, manifest: Manifest, data: TaskData) -> Iterator[Columns]:
        """Yield the batches of one pass over the rows."""
        inputs = manifest.batch
        names = [row.name for row in inputs]
        for part in (data.training, data.held_out):
            if part is None:
                continue
            for arrays in one_pass(part, part.batches(BATCH, None), inputs):
                self.rows += len(arrays[0])
                # A user's own batches may be of any size.
                for start in range(0, len(arrays[0]), BATCH):
                    cut = [np.asarray(array[start : start + BATCH]) for array in arrays]
                    yield dict(zip(names, cut, strict=True))
