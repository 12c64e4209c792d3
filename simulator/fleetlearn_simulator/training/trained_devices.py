"""What the training of many devices gave, as columns. A round may have too many devices for one
object each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, repeat, takewhile
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

KEPT_STATE, TIED = "kept_state", "tied"
"""Names of what the device keeps, among the vectors that training makes beside the update: its kept
state, and its tied vectors one after the other."""
NO_VECTORS: Mapping[str, Vector] = {}
NO_MORE: Mapping[str, int] = {}


class TrainedDevice(NamedTuple):
    """What the training of one device gave."""

    update: Vector
    """The model after training minus the model before it: float32, shape (P,). Any values if
    training diverged."""
    metrics: dict[str, float]
    """Means over the examples seen. Metrics that are not numbers are left out."""
    examples: int
    """Examples that the device has."""
    steps: int
    seen: int
    """Examples seen in all steps. An example that is used twice counts twice."""
    complete: bool
    """Whether the device did all steps of its task."""
    loss: float
    """The mean loss over the examples seen."""
    largest: float
    """The greatest magnitude in the update."""
    diverged: bool = False
    vectors: Mapping[str, Vector] = NO_VECTORS
    """What training made beside the update, by name. Nothing if training diverged."""


LARGE_UPDATE = 32768
"""Updates with at least this many elements are not copied to lie beside others: they are handed on
where they are."""
COLUMNS: dict[str, Any] = {
    "examples": np.int64,
    "steps": np.int64,
    "seen": np.int64,
    "complete": np.bool_,
    "loss": np.float64,
    "largest": np.float64,
    "diverged": np.bool_,
}
"""The columns with one number for each device, and their dtypes."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedDevices:
    """What the training of n devices gave: the fields of ``TrainedDevice`` as columns with n
    rows."""

    updates: NDArray[np.float32]
    """Shape (n, P)."""
    metrics: dict[str, NDArray[np.float64]]
    """NaN where a device does not have the metric."""
    examples: NDArray[np.int64]
    steps: NDArray[np.int64]
    seen: NDArray[np.int64]
    complete: NDArray[np.bool_]
    loss: NDArray[np.float64]
    largest: NDArray[np.float64]
    diverged: NDArray[np.bool_]
    vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """What training made beside the updates, by name: shape (n, elements)."""

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, rows: Sequence[int]) -> TrainedDevices:
        """Return a copy with only these rows. Return self if they are all rows, in order."""
        return (
            self
            if list(rows) == list(range(len(self)))
            else _map(lambda column: column[rows], [self])
        )

    def copy(self) -> TrainedDevices:
        """Return a copy in new memory."""
        return _map(np.copy, [self])

    def table(self) -> NDArray[np.float64]:
        """Return all columns of numbers as the rows of one array. ``from_table`` reads it."""
        # float64 holds the counts exactly: none of them reaches 2^53.
        return np.array(
            [*(getattr(self, name) for name in COLUMNS), *self.metrics.values()], np.float64
        )


ResultReader = Callable[[Sequence[int]], TrainedDevices]
"""Called with the indices of some jobs. Waits until the first of them is trained. Returns the
results of that one and of the jobs that follow it, as far as they are trained by then. Each result
can be read only once."""


def from_rows(
    rows: Sequence[TrainedDevice],
    size: int,
    names: Iterable[str],
    more: Mapping[str, int] = NO_MORE,
) -> TrainedDevices:
    """Make columns of rows. ``size``: elements of an update. ``names``: the metrics. ``more``: name
    of each other vector -> its elements; it is zeros in rows that lack it."""
    zeros = {name: np.zeros(elements, np.float32) for name, elements in more.items()}
    updates = [row.update.reshape(1, size) for row in rows]
    return TrainedDevices(
        updates[0]
        if len(rows) == 1
        else np.concatenate([np.empty((0, size), np.float32), *updates]),
        {
            name: np.array([row.metrics.get(name, np.nan) for row in rows], np.float64)
            for name in names
        },
        vectors={
            name: np.array([row.vectors.get(name, none) for row in rows], np.float32).reshape(
                len(rows), none.size
            )
            for name, none in zeros.items()
        },
        **{
            name: np.array([getattr(row, name) for row in rows], kind)
            for name, kind in COLUMNS.items()
        },
    )


def from_table(
    updates: NDArray[np.float32],
    table: NDArray[np.float64],
    names: Sequence[str],
    vectors: dict[str, NDArray[np.float32]],
) -> TrainedDevices:
    """Undo ``TrainedDevices.table``. ``names``: the metrics, in the table's order."""
    columns = {
        name: row.astype(kind) for (name, kind), row in zip(COLUMNS.items(), table, strict=False)
    }
    metrics = dict(zip(names, table[len(COLUMNS) :], strict=True))
    return TrainedDevices(updates, metrics, vectors=vectors, **columns)


NO_DEVICES = from_rows([], 0, [])


def concatenate(parts: Sequence[TrainedDevices]) -> TrainedDevices:
    """Put the rows of at least one part behind each other."""
    return parts[0] if len(parts) == 1 else _map(lambda *columns: np.concatenate(columns), parts)


def _map(function: Callable[..., Any], parts: Sequence[TrainedDevices]) -> TrainedDevices:
    """Make each column by calling the function with this column of all parts."""
    columns = {
        name: function(*(getattr(part, name) for part in parts)) for name in ("updates", *COLUMNS)
    }
    metrics = {name: function(*(part.metrics[name] for part in parts)) for name in parts[0].metrics}
    vectors = {name: function(*(part.vectors[name] for part in parts)) for name in parts[0].vectors}
    return TrainedDevices(metrics=metrics, vectors=vectors, **columns)


def read_all(reader: ResultReader, count: int) -> TrainedDevices:
    """Wait for the results of ``count`` jobs."""
    parts: list[TrainedDevices] = []
    while (done := sum(map(len, parts))) < count:
        parts.append(reader(range(done, count)))
    return concatenate(parts) if parts else NO_DEVICES


_MISSING: tuple[Any, int] = None, 0


class PendingResults:
    """The results of the jobs of one call, by the jobs' indices. Once this object is deleted nobody
    waits for them."""

    def __init__(self, produce: Callable[[PendingResults, int], None]) -> None:
        """``produce``: called while the result of a job is missing, with this object and the job's
        index. It does some work, and puts the results of that work. It is called again if the job's
        result is still missing.
        """
        self.produce = produce
        self.found: dict[int, tuple[Any, int]] = {}
        """Index of a job -> the batch of results that it came with, and its row there. Removed when
        it is read."""

    def put(self, indices: Iterable[int], values: Any) -> None:
        """Add the results of these jobs: TrainedDevices or a list with one row for each. Or an
        exception, which is raised for each job when somebody reads its result."""
        self.found.update(zip(indices, zip(repeat(values), count()), strict=False))

    def value(self, index: int) -> Any:
        """Wait for one job's element of a list. Raises the exception that was put for it."""
        while index not in self.found:
            self.produce(self, index)
        values, row = self.found.pop(index)
        if isinstance(values, BaseException):
            raise values
        return values[row]

    def read(self, indices: Sequence[int]) -> TrainedDevices:
        """Wait for the first job, then return its result and those of the jobs after it, up to the
        first that is missing. A ``ResultReader``. Raises the exception that was put for the first
        job."""
        while indices[0] not in self.found:
            self.produce(self, indices[0])
        if isinstance(self.found[indices[0]][0], BaseException):
            self.value(indices[0])
        first = self.found[indices[0]][0]
        results = [self.found.pop(index, _MISSING) for index in indices]
        if all(values is first for values, _ in results):
            together: TrainedDevices = first.select([row for _, row in results])
            return together
        # Large updates are not copied: only those of the first one's batch are returned with it.
        large = first.updates.shape[1] >= LARGE_UPDATE
        ready = list(
            takewhile(
                lambda row: row[0] is first or (isinstance(row[0], TrainedDevices) and not large),
                results,
            )
        )
        rest = zip(indices[len(ready) :], results[len(ready) :], strict=True)
        self.found.update((index, row) for index, row in rest if row is not _MISSING)
        batches: dict[int, list[int]] = {}
        for number, (batch, _) in enumerate(ready):
            batches.setdefault(id(batch), []).append(number)
        taken = concatenate(
            [ready[rows[0]][0].select([ready[row][1] for row in rows]) for rows in batches.values()]
        )
        return taken.select(np.argsort([*chain.from_iterable(batches.values())]).tolist())
