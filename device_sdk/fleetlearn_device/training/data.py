"""A device's own data as batches: arrays in memory, a file of them, or whatever the user iterates
over."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
from fleetlearn_protocol.manifest import Input, Manifest
from fleetlearn_protocol.npz import read_npz
from fleetlearn_protocol.paths import in_home
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import Arrays, Batch, DataError, check_batch, check_ranges
from fleetlearn_device.training.shuffling import permutation


@runtime_checkable
class Data(Protocol):
    """What training reads: the number of examples, and passes over them."""

    @property
    def examples(self) -> int:
        """n_k: the device's examples, and so its weight in the mean."""

    def fit(self, inputs: Sequence[Input]) -> Data:
        """Return the data in the manifest's order and dtypes. Raises DataError where they do not
        fit."""

    def batches(self, batch_size: int, seed: int | None, epoch: int = 0) -> Iterator[Batch]:
        """Yield the batches of one pass. Seed None: in the order of the data."""


class ArrayData:
    """Arrays in the manifest's order, or by the manifest's names. The first axis of each counts the
    examples."""

    def __init__(self, arrays: Batch) -> None:
        rows = arrays.items() if isinstance(arrays, Mapping) else enumerate(arrays)
        columns = {str(name): np.asarray(array) for name, array in rows}
        lengths = {name: array.shape[0] if array.ndim else None for name, array in columns.items()}
        if not lengths or len(set(lengths.values())) > 1 or not all(lengths.values()):
            raise DataError(
                f"arrays with these numbers of examples were given: {lengths}; expected at least "
                "one array, all with the same number of examples along their first axes, at least 1"
            )
        self._arrays: Batch = columns if isinstance(arrays, Mapping) else tuple(columns.values())
        self.columns: Arrays = tuple(columns.values())
        """The arrays, in the order in which they were given."""
        self.examples: int = next(iter(columns.values())).shape[0]

    def fit(self, inputs: Sequence[Input]) -> ArrayData:
        arrays = check_batch(self._arrays, inputs)
        check_ranges(arrays, inputs)
        return ArrayData(arrays)

    def rows(
        self, batch_size: int, seed: int | None, epoch: int = 0
    ) -> Iterator[slice | NDArray[np.int64]]:
        """Yield which examples are in each batch of a pass. The arguments are as for
        ``batches``."""
        if batch_size < 0:
            raise ValueError(
                f"batch_size is {batch_size}; expected at least 1, or 0 for all examples in one "
                "batch"
            )
        size = batch_size or self.examples
        order = None if seed is None else permutation(self.examples, seed, epoch)
        for start in range(0, self.examples, size):
            yield slice(start, start + size) if order is None else order[start : start + size]

    def batches(
        self, batch_size: int, seed: int | None, epoch: int = 0, skip: int = 0
    ) -> Iterator[Batch]:
        """Yield one pass, in the order of (seed, epoch), without its first ``skip`` batches. The
        last batch may be smaller; batch_size 0: one batch."""
        for part in islice(self.rows(batch_size, seed, epoch), skip, None):
            if isinstance(self._arrays, Mapping):
                yield {name: np.asarray(array)[part] for name, array in self._arrays.items()}
            else:
                yield tuple(np.asarray(array)[part] for array in self._arrays)


class BatchData:
    """The user's own batches: each pass iterates over ``source``, which decides sizes and order
    itself.

    ``source`` yields batches: tuples of arrays in the manifest's order, or dicts by its names.
    numpy converts them, so the tensors of a PyTorch DataLoader are fine. A pass yields at most
    ``examples`` examples.
    """

    def __init__(self, source: Iterable[Batch], examples: int) -> None:
        if not isinstance(source, Iterable) or isinstance(source, Iterator):
            raise DataError(
                f"a {type(source).__name__} was given; training passes over the data several "
                "times, so expected arrays, or an object whose __iter__ starts a new pass (a list, "
                "a DataLoader), not an iterator"
            )
        if examples < 1:
            raise DataError(
                f"examples={examples}; expected how many examples a pass yields, at least 1"
            )
        self._source, self.examples = source, examples
        self._inputs: Sequence[Input] | None = None

    def fit(self, inputs: Sequence[Input]) -> BatchData:
        """Return the same batches; each is checked when ``source`` yields it."""
        fitting = BatchData(self._source, self.examples)
        fitting._inputs = inputs
        return fitting

    def batches(self, batch_size: int, seed: int | None, epoch: int = 0) -> Iterator[Batch]:
        """Yield one pass over ``source``. The arguments change nothing."""
        if self._inputs is None:
            yield from self._source
            return
        for number, batch in enumerate(self._source):
            arrays = check_batch(batch, self._inputs)
            check_ranges(arrays, self._inputs, f" of batch {number} of a pass")
            yield arrays


def as_data(source: Data | Batch | Iterable[Batch], examples: int | None = None) -> Data:
    """Return ``source`` as Data: arrays (a tuple, list or dict of them), or the user's own batches
    with ``examples``.

    Raises DataError.
    """
    if isinstance(source, Data):
        return source
    if isinstance(source, Mapping) or (
        isinstance(source, tuple | list) and all(hasattr(item, "__array__") for item in source)
    ):
        data = ArrayData(source)
        if examples not in (None, data.examples):
            raise DataError(f"examples={examples} was given; the arrays have {data.examples}")
        return data
    if isinstance(source, np.ndarray):
        raise DataError(
            f"an array of shape {source.shape} was given; expected a tuple of arrays, such as (x, "
            "y)"
        )
    if examples is None:
        raise DataError(
            f"a {type(source).__name__} was given without examples=; say how many examples one "
            "pass over it yields"
        )
    return BatchData(source, examples)  # type: ignore[arg-type]


def load_npz(
    path: str | os.PathLike[str], manifest: Manifest | None = None
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a NumPy .npz file by name, checked against the bundle's batch where it
    is given.

    Raises DataError: no such file, not an .npz, pickled objects in it, missing or surplus arrays,
    lengths that differ, wrong dtype or shape, integers that name no class.
    """
    try:
        path = in_home(path)
        arrays = read_npz(path)
    except ValueError as error:  # an NpzError, too
        raise DataError(str(error)) from None
    try:
        if manifest is None:
            ArrayData(arrays)
            return arrays
        fitting: Arrays = check_batch(arrays, manifest.batch)
        check_ranges(fitting, manifest.batch)
        return dict(zip((array.name for array in manifest.batch), fitting, strict=True))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
