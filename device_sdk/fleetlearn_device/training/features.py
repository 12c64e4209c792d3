"""A device's features: what the frozen part of a model makes of each example, computed once and
kept.

They are kept in memory, as long as the process lives. A process that begins computes them again,
which takes less than one epoch of training does without them: no reason to write them to the disk,
which others need more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

import numpy as np
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.manifest import FEATURES, FROZEN, Input, Manifest
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import Batch, check_batch
from fleetlearn_device.runtimes.providers import PROVIDERS, borrow
from fleetlearn_device.runtimes.sessions import make_session, run
from fleetlearn_device.training.data import ArrayData

TOGETHER = 32
"""Most examples whose features are computed together: bounds memory."""
MIB = 2**20

Columns = Mapping[str, NDArray[Any]]
"""Name -> array whose first axis is the examples'."""


class FeatureCache:
    """The features of a device's first examples: of as many as ``limit`` bytes hold, computed in
    order."""

    def __init__(self, bundle: Bundle, threads: int, limit: int, provider: str = "cpu") -> None:
        self.bundle = bundle
        """Any bundle with the same ``graphs_of``."""
        self.kept = 0
        """Examples whose features are here: those from 0 to ``kept`` - 1."""
        self.examples = 0
        """Examples of the data."""
        self._threads, self._limit, self._provider = threads, limit, provider
        self._rows = bundle.manifest.computed_features
        self._data = b""
        self._arrays: dict[str, NDArray[Any]] = {}
        self._session: Any = None

    def __str__(self) -> str:
        size = self.kept * self._bytes_per_example / MIB
        return f"features of {self.kept} of {self.examples} examples are kept, {size:.3g} MiB"

    @property
    def _bytes_per_example(self) -> int:
        return sum(prod(array.shape) * np.dtype(array.dtype).itemsize for array in self._rows)

    def of(self, data: ArrayData) -> FeatureData:
        """Return the features as data to train on. Forgets them if the data are not the same as
        before.

        Raises DataError where the data do not fit the bundle.
        """
        manifest = self.bundle.manifest
        fitting = data.fit(manifest.batch)
        columns = dict(zip((array.name for array in manifest.batch), fitting.columns, strict=True))
        content = _digest(columns)
        if content != self._data:
            # Of all examples, also those that are held out of the training.
            total = len(fitting.columns[0])
            count = min(total, self._limit // self._bytes_per_example)
            self._arrays = {
                array.name: np.empty((count, *array.shape), array.dtype) for array in self._rows
            }
            self._data, self.kept, self.examples = content, 0, total
        return FeatureData(self, fitting, columns, manifest)

    def fill(
        self,
        columns: Columns,
        batch_size: int,
        enough: Callable[[], bool],
        on_batch: Callable[[], None],
    ) -> None:
        """Compute what is not kept yet, until there is no room or ``enough`` returns True.

        batch_size: of the training; no more examples are computed together. Raises StepError,
        MemoryError.
        """
        room = len(next(iter(self._arrays.values())))
        size = min(batch_size or TOGETHER, TOGETHER)
        while self.kept < room and not enough():
            part = slice(self.kept, min(self.kept + size, room))
            for name, values in self._compute(columns, part).items():
                self._arrays[name][part] = values
            self.kept = part.stop
            on_batch()
        if self.kept == self.examples:
            self._session = None  # all that it could compute is here

    def features(self, columns: Columns, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the features of these examples. Those that are not kept are computed together.

        Raises StepError, MemoryError.
        """
        in_memory = rows < self.kept
        if in_memory.all():
            return {name: array[rows] for name, array in self._arrays.items()}
        found = {}
        for name, values in self._compute(columns, rows[~in_memory]).items():
            found[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
            found[name][~in_memory] = values
            found[name][in_memory] = self._arrays[name][rows[in_memory]]
        return found

    def _compute(
        self, columns: Columns, rows: slice | NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        names = [array.name for array in self._rows]
        if self._session is None:
            inputs, outputs = ([f"batch.{name}" for name in group] for group in (columns, names))
            self._session = make_session(
                self.bundle, FEATURES, self._threads, inputs, outputs, self._provider
            )
        # Columns that lie on the disk have their own dtypes.
        part = check_batch(
            [column[rows] for column in columns.values()], self.bundle.manifest.batch
        )
        arrays = dict(zip(columns, part, strict=True))
        binding = self._session.io_binding()
        for name in names:
            binding.bind_output(f"batch.{name}")
        feed = {f"batch.{name}": borrow(array) for name, array in arrays.items()}
        wait = PROVIDERS[self._provider].memory is not None
        run(self._session, binding, FEATURES, tuple(arrays.values()), feed, wait)
        return dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))


class FeatureData:
    """``Data`` of features, and of the arrays of the batch that the rest of the model reads beside
    them."""

    def __init__(
        self, cache: FeatureCache, source: ArrayData, columns: Columns, manifest: Manifest
    ) -> None:
        self.source, self.source_inputs = source, manifest.batch
        """The data that these features are computed from."""
        self.examples = source.examples
        self._cache, self._columns = cache, columns
        self._names = [row.name for row in manifest.with_features_as_batch().batch]

    def fit(self, inputs: Sequence[Input]) -> FeatureData:
        return self

    def fingerprint(self) -> int:
        """Return the fingerprint of the source's data."""
        return self.source.fingerprint()

    def compute(
        self, batch_size: int, enough: Callable[[], bool], on_batch: Callable[[], None]
    ) -> None:
        """Compute and keep features before they are needed; see ``FeatureCache.fill``."""
        self._cache.fill(self._columns, batch_size, enough, on_batch)

    def batches(
        self, batch_size: int, seed: int | None, epoch: int = 0, skip: int = 0
    ) -> Iterator[Batch]:
        """Yield one pass, in the order in which the source's batches would come, without its first
        ``skip``. Raises StepError, MemoryError."""
        numbers = np.arange(len(self.source.columns[0]))
        for rows in islice(self.source.rows(batch_size, seed, epoch), skip, None):
            features = self._cache.features(self._columns, numbers[rows])
            yield tuple(
                features[name] if name in features else self._columns[name][rows]
                for name in self._names
            )


def graphs_of(bundle: Bundle) -> tuple[str, ...]:
    """Return what decides the features of an example: the hashes of features.onnx and of its
    constants."""
    files = bundle.manifest.files
    return tuple(files[path].sha256 for path in (FEATURES, FROZEN) if path in files)


def _digest(columns: Columns) -> bytes:
    found = hashlib.blake2b()
    for array in columns.values():
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.digest()
