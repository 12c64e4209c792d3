"""The data of one task: as they are when it begins, prepared as the bundle says, and without the
share that is held out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import floor
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.manifest import Input, Manifest
from fleetlearn_protocol.preprocessing import Preprocessing
from fleetlearn_protocol.splitmix64 import mix
from numpy.typing import NDArray

from fleetlearn_device.data.preprocessing import (
    prepare,
    prepared_rows,
    refuse_absent_columns,
)
from fleetlearn_device.data.raw import RawRows
from fleetlearn_device.runtimes.checks import Batch, DataError
from fleetlearn_device.training.data import ArrayData, BatchData, Data
from fleetlearn_device.training.source_data import FittedSource, SourceData

BLOCK = 16
"""Windows overlap, so streams are divided by blocks of this many windows' lengths."""


class TaskData(NamedTuple):
    """What a task works with."""

    training: Data
    held_out: Data | None = None
    """The examples that are only measured on. None: models are measured on those of the
    training."""
    rows: tuple[int, int] | None = None
    """The numbers of the first and the last row of all examples. None: rows have no numbers."""

    @property
    def measured(self) -> Data:
        """The data that models are measured on."""
        return self.training if self.held_out is None else self.held_out


class TaskDataMaker:
    """Makes the data of each task from what the user gave.

    hold_out: The share of the examples that is kept out of the training, from 0 (none) to less than
    1. Raises DataError where the data cannot be divided.
    """

    def __init__(self, data: Data, hold_out: float = 0.0) -> None:
        if not 0 <= hold_out < 1:
            raise ValueError(
                f"hold_out is {hold_out}; expected a share from 0 (nothing) to less than 1"
            )
        if hold_out and not isinstance(data, ArrayData | SourceData):
            raise DataError(
                f"hold_out={hold_out} was given with a {type(data).__name__}, whose examples have "
                "no places of their own; expected arrays, or data at a path"
            )
        self._data, self._hold_out = data, hold_out
        self._made: tuple[object, TaskData] | None = None

    def of(self, manifest: Manifest, rows: tuple[int, int] | None = None) -> TaskData:
        """Return the data as they are now. ``rows``: as ``TaskData.rows`` said earlier; only the
        examples that are made of these rows are returned. Raises DataError."""
        data = self._data
        told = None if manifest.preprocessing is msgspec.UNSET else manifest.preprocessing
        if isinstance(data, SourceData):
            fitted = data.fit_to(manifest.batch, told)
        elif isinstance(data, ArrayData):
            if self._made is not None and self._made[0] == (manifest.batch, told):
                return self._made[1]
            fitted = _fitted_arrays(data, manifest.batch, told)
        elif isinstance(data, BatchData) and told is not None:
            return TaskData(_PreparedBatches(data, manifest))
        else:
            return TaskData(data)
        if rows is not None:
            return self._made_of(fitted, told, rows)
        made = self._made_of(fitted, told, (int(fitted.first.min()), int(fitted.last.max())))
        self._made = (manifest.batch, told), made
        return made

    def _made_of(
        self, fitted: FittedSource, told: Preprocessing | None, rows: tuple[int, int]
    ) -> TaskData:
        there = np.flatnonzero((fitted.first >= rows[0]) & (fitted.last <= rows[1]))
        data = fitted.data if len(there) == len(fitted.first) else fitted.data.choose(there)
        if not self._hold_out:
            return TaskData(data, None, rows)
        first, last = fitted.first[there], fitted.last[there]
        held, trained = hold_out(first, last, self._hold_out, _block(told))
        if not len(held):
            return TaskData(data, None, rows)
        return TaskData(fitted.data.choose(there[trained]), fitted.data.choose(there[held]), rows)


def hold_out(
    first: NDArray[np.uint64], last: NDArray[np.uint64], share: float, block: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of the examples that are held out, and of those that are trained on.

    first, last: numbers that the first and the last row of each example keep for ever, shape (n,).
    block: rows that are held out or trained on together. An example that lies in both kinds of
    blocks is left out of both. A row's number alone decides, so that data may grow. Of two or more
    examples at least one is on each side.
    """
    begin, end = (mix(rows // np.uint64(block) + np.uint64(1)) for rows in (first, last))
    limit = np.uint64(min(floor(share * 2**64), 2**64 - 1))
    held, trained = (begin < limit) & (end < limit), (begin >= limit) & (end >= limit)
    if len(first) > 1:
        if not held.any():
            held[begin.argmin()] = True
            trained &= (first > last[begin.argmin()]) | (last < first[begin.argmin()])
        if not trained.any():
            trained[begin.argmax()] = True
            held &= (first > last[begin.argmax()]) | (last < first[begin.argmax()])
    return np.flatnonzero(held), np.flatnonzero(trained)


def _block(told: Preprocessing | None) -> int:
    return 1 if told is None or told.windows is msgspec.UNSET else BLOCK * told.windows.length


def _fitted_arrays(
    data: ArrayData, inputs: Sequence[Input], told: Preprocessing | None
) -> FittedSource:
    if told is None:
        rows = np.arange(data.examples, dtype=np.uint64)
        return FittedSource(data.fit(inputs), rows, rows)
    if data.names is None:
        raise DataError(
            "arrays without names were given, and the bundle's preprocessing makes its batch of "
            f"arrays by name; expected a dict with {', '.join(told.raw)}"
        )
    raw = RawRows(dict(zip(data.names, data.columns, strict=True)))
    refuse_absent_columns(raw, told, "the data")
    made = prepared_rows(raw, told, inputs, "the data")
    fitted = ArrayData(made.arrays).fit(inputs)
    return FittedSource(fitted, made.first.astype(np.uint64), made.last.astype(np.uint64))


class _PreparedBatches:
    """The user's own batches of raw arrays, prepared as they come."""

    def __init__(self, data: BatchData, manifest: Manifest) -> None:
        told = manifest.preprocessing
        assert told is not msgspec.UNSET
        if told.windows is not msgspec.UNSET or told.resample is not msgspec.UNSET:
            raise DataError(
                "batches were given, and the bundle's preprocessing makes windows of a stream; "
                "expected the stream: arrays by name, or data at a path"
            )
        self._data, self._manifest = data, manifest

    @property
    def examples(self) -> int:
        return self._data.examples

    def fit(self, inputs: Sequence[Input]) -> Data:
        return self

    def batches(self, batch_size: int, seed: int | None, epoch: int = 0) -> Iterator[Batch]:
        for batch in self._data.batches(batch_size, seed, epoch):
            if not isinstance(batch, Mapping):
                raise DataError(
                    f"a batch is a {type(batch).__name__}; the bundle's preprocessing expects a "
                    "dict of arrays by name"
                )
            arrays: dict[str, Any] = {name: np.asarray(array) for name, array in batch.items()}
            yield prepare(arrays, self._manifest)
