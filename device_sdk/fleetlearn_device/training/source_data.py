"""Data from a source outside of the process, as they are at the beginning of each task."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.preprocessing import Preprocessing
from numpy.typing import NDArray

from fleetlearn_device.data.assembling import assembled, with_declared
from fleetlearn_device.data.buffer_source import EmptyBufferError
from fleetlearn_device.data.preprocessing import prepared_rows, refuse_absent_columns
from fleetlearn_device.data.raw import Choices, RawRows, RawSource
from fleetlearn_device.runtimes.checks import Batch, DataError
from fleetlearn_device.training.data import ArrayData

log = logging.getLogger("fleetlearn.device")


class FittedSource(NamedTuple):
    """Data in the manifest's order and dtypes."""

    data: ArrayData
    first: NDArray[np.uint64]
    """The number of the first row that each example was made of: it stays the same while the data
    grow. Shape (n,)."""
    last: NDArray[np.uint64]
    """That of the last row."""


class SourceData:
    """``Data`` that are read again where their source has changed: at ``fit``, so before each task.

    Raises DataError where they cannot be read. At a later ``fit`` the device says so in its log
    instead, and goes on with the data as they were: a program may be writing them just then.
    """

    def __init__(self, source: RawSource, choices: Choices) -> None:
        self.source = source
        self._choices = choices
        self._version: Hashable = None
        self._rows: RawRows | None = None
        """What was read and not used yet: after ``fit`` the arrays of the batch are enough."""
        self._fitting: tuple[object, FittedSource] | None = None
        self.examples = 0
        """Examples of the data as they were last read. 0: a live buffer holds none yet."""
        self.look()

    def look(self) -> None:
        """Read the data if there were none yet. Raises DataError."""
        with suppress(EmptyBufferError):
            if not self.examples:
                self.examples = self._load()

    def _load(self) -> int:
        version = self._current_version()
        rows = with_declared(self.source, self.source.load(), self._choices)
        lengths = {name: len(array) if array.ndim else None for name, array in rows.arrays.items()}
        counts = set(lengths.values())
        if not counts or len(counts) > 1 or not all(counts):
            raise DataError(
                f"{self.source.name}: arrays with these numbers of examples were found: {lengths}; "
                "expected at least one array, all with the same number along their first axes, at "
                "least 1"
            )
        self._rows, self._version = rows, version
        return int(next(iter(rows.arrays.values())).shape[0])

    def _current_version(self) -> Hashable:
        try:
            return self.source.version()
        except OSError as error:
            raise DataError(f"{self.source.name} cannot be read: {error}") from None

    def fit(self, inputs: Sequence[Input]) -> ArrayData:
        """Return the data as they are now, in the manifest's order and dtypes. Raises DataError."""
        return self.fit_to(inputs, None).data

    def fit_to(self, inputs: Sequence[Input], told: Preprocessing | None) -> FittedSource:
        """Return the data as they are now, prepared as a bundle says; None: they are the batch's
        arrays. Raises DataError."""
        key = inputs, told
        before = self._fitting[1] if self._fitting and self._fitting[0] == key else None
        try:
            if self._is_old() or (self._rows is None and before is None):
                self._load()
            if self._rows is not None:
                fitting = self._fit(self._rows, inputs, told)
                self._fitting, self._rows = (key, fitting), None
                self.examples = fitting.data.examples
                return fitting
        except EmptyBufferError:
            self._fitting = self._rows = None  # what is left of it is too old
            raise
        except DataError as error:
            self._rows = None
            if before is None:
                raise
            log.warning("the data are used as they were before: %s", error)
        assert before is not None
        return before

    def _is_old(self) -> bool:
        return self._current_version() != self._version

    def _fit(
        self, rows: RawRows, inputs: Sequence[Input], told: Preprocessing | None
    ) -> FittedSource:
        count = len(next(iter(rows.arrays.values())))
        ids = np.arange(count, dtype=np.uint64) if rows.ids is None else rows.ids
        if told is not None:
            refuse_absent_columns(rows, told, self.source.name)
            made = prepared_rows(rows, told, inputs, self.source.name)
            arrays, first, last = made.arrays, ids[made.first], ids[made.last]
        else:
            arrays, first, last = assembled(self.source, rows, inputs, self._choices), ids, ids
        try:
            return FittedSource(ArrayData(arrays).fit(inputs), first, last)
        except DataError as error:
            raise DataError(f"{self.source.name}: {error}") from None

    def batches(self, batch_size: int, seed: int | None, epoch: int = 0) -> Iterator[Batch]:
        """Yield one pass of the data that were last fitted to a bundle."""
        if self._fitting is None:
            raise DataError(f"{self.source.name}: the data are not fitted to a bundle yet")
        return self._fitting[1].data.batches(batch_size, seed, epoch)
