"""A device's own data as batches: arrays in memory, a file of them, or whatever the user iterates
over."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from functools import partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np
from fleetlearn_protocol.manifest import Input, Manifest
from fleetlearn_protocol.npz import read_npz
from fleetlearn_protocol.paths import in_home
from numpy.typing import NDArray

from fleetlearn_device.data.frames import is_loader, loader_examples
from fleetlearn_device.data.preprocessing import prepare
from fleetlearn_device.runtimes.checks import Arrays, Batch, DataError, check_batch, check_ranges
from fleetlearn_device.training.shuffling import permutation

CHECKED_TOGETHER = 4096
"""Examples of arrays on the disk that are checked together: bounds memory."""

COMPARED = 64
"""Examples that tell whether data are the same as before."""

log = logging.getLogger("fleetlearn.device")


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
        self.names: tuple[str, ...] | None = tuple(columns) if isinstance(arrays, Mapping) else None
        """The arrays' names, where they were given by name."""
        self.columns: Arrays = tuple(columns.values())
        """The arrays, in the order in which they were given."""
        self.examples: int = next(iter(columns.values())).shape[0]
        self._chosen: NDArray[np.int64] | None = None
        """The places of the data's examples in the arrays. None: all, in order."""
        self._mark = 0
        """Changes the fingerprint."""
        self._fits: Sequence[Input] | None = None
        """What the arrays were checked against."""

    def fit(self, inputs: Sequence[Input]) -> ArrayData:
        """Return the data in the manifest's order and dtypes; arrays that lie on the disk keep
        theirs, and are converted batch by batch. Raises DataError."""
        if self._fits == inputs:
            return self
        arrays = self._checked_in_parts(inputs)
        if arrays is None:
            arrays = check_batch(self._arrays, inputs)
            check_ranges(arrays, inputs)
        fitting = (
            ArrayData(arrays) if self._chosen is None else ArrayData(arrays).choose(self._chosen)
        )
        fitting._fits, fitting._mark = inputs, self._mark
        return fitting

    def choose(self, places: NDArray[np.int64]) -> ArrayData:
        """Return the data of the examples at these places alone, int64, shape (n,). The arrays are
        not copied."""
        chosen = copy(self)
        chosen._chosen, chosen.examples = places, len(places)
        return chosen

    def with_arrays(self, arrays: Sequence[NDArray[Any]], mark: int) -> ArrayData:
        """Return the same examples with other values: arrays like the checked ones, in their order.
        ``mark`` is a part of the fingerprint."""
        other = copy(self)
        other._arrays = other.columns = tuple(arrays)
        other.names, other._mark, other._fits = None, mark, None
        return other

    def fingerprint(self) -> int:
        """Return a number that changes where the places of the data have other examples than
        before: a CRC-32 of up to ``COMPARED`` examples, the first and the last among them, so that
        no whole file is read."""
        places = np.linspace(0, self.examples - 1, min(self.examples, COMPARED)).astype(np.int64)
        found = crc32(str(self.examples).encode(), self._mark)
        for place in places if self._chosen is None else self._chosen[places]:
            for array in self.columns:
                found = crc32(array[place].tobytes(), found)
        return found

    def _checked_in_parts(self, inputs: Sequence[Input]) -> Arrays | None:
        """Return the arrays in the manifest's order, as they are. None: they may be converted
        whole, since nothing of it would read a whole file into memory."""
        if isinstance(self._arrays, Mapping):
            if set(self._arrays) != {input_.name for input_ in inputs}:
                return None
            columns = tuple(np.asarray(self._arrays[input_.name]) for input_ in inputs)
        else:
            columns = self.columns
        pairs = [*zip(columns, inputs, strict=False)]
        fit = [array.ndim and array.shape[1:] == row.shape for array, row in pairs]
        if len(columns) != len(inputs) or not all(fit):
            return None  # check_batch says what is wrong
        if not any(_lies_on_disk(array) and _would_be_copied(array, row) for array, row in pairs):
            return None
        for start in range(0, len(columns[0]), CHECKED_TOGETHER):
            part = tuple(array[start : start + CHECKED_TOGETHER] for array in columns)
            check_ranges(check_batch(part, inputs), inputs, start=start)
        return columns

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
        if self._chosen is not None:
            order = self._chosen if order is None else self._chosen[order]
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


def _lies_on_disk(array: NDArray[Any]) -> bool:
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap):
            return True
        base = getattr(base, "base", None)
    return False


def _would_be_copied(array: NDArray[Any], row: Input) -> bool:
    flags = array.flags
    return array.dtype != row.dtype or not (flags.c_contiguous and flags.aligned)


class BatchData:
    """The user's own batches: each pass iterates over ``source``, which decides sizes and order
    itself.

    ``source`` yields batches: tuples of arrays in the manifest's order, or dicts by its names.
    numpy converts them, so the tensors of a PyTorch DataLoader are fine. ``examples`` says how many
    examples a pass yields, or is a function that says so, for data that grow.
    """

    def __init__(self, source: Iterable[Batch], examples: int | Callable[[], int]) -> None:
        if not isinstance(source, Iterable) or isinstance(source, Iterator):
            raise DataError(
                f"a {type(source).__name__} was given; training passes over the data several "
                "times, so expected arrays, or an object whose __iter__ starts a new pass (a list, "
                "a DataLoader), not an iterator"
            )
        self._source, self._examples = source, examples
        self._inputs: Sequence[Input] | None = None
        if not callable(examples) and self.examples < 1:
            raise DataError(
                f"examples={examples}; expected how many examples a pass yields, at least 1"
            )

    @property
    def examples(self) -> int:
        """How many examples a pass yields now."""
        return self._examples() if callable(self._examples) else self._examples

    @property
    def batches_of_pass(self) -> int | None:
        """How many batches a pass yields now. None: the source does not say."""
        if not isinstance(self._source, Sized):
            return None
        try:
            return len(self._source)
        except TypeError:  # a DataLoader of a stream
            return None

    def fit(self, inputs: Sequence[Input]) -> BatchData:
        """Return the same batches; each is checked when ``source`` yields it."""
        fitting = copy(self)
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


def one_pass(
    data: Data, batches: Iterable[Batch], inputs: Sequence[Input], *, seen: int = 0, epoch: int = 0
) -> Iterator[Arrays]:
    """Yield the ``batches`` of a pass over the data, checked, up to ``data.examples`` examples:
    data may grow in the meantime, and some iterables never end.

    seen: Examples of the pass before these batches. Raises DataError.
    """
    for batch in batches:
        left = data.examples - seen
        if left <= 0:
            if epoch == 0:  # not in each epoch
                log.warning(
                    "a pass over the data has more than their %d examples: those beyond are left "
                    "out. Where the data grow, examples= may be a function: "
                    "examples=lambda: len(data)",
                    data.examples,
                )
            return
        arrays = check_batch(batch, inputs)
        if len(arrays[0]) > left:
            arrays = tuple(array[:left] for array in arrays)
        seen += len(arrays[0])
        yield arrays


def steps_of_pass(data: Data, batch_size: int) -> int:
    """Return how many batches a pass will have. Raises DataError where the user's own batches do
    not say so."""
    if not isinstance(data, BatchData):
        return -(-data.examples // batch_size) if batch_size else 1
    if (count := data.batches_of_pass) is None:
        raise DataError(
            "the learning rate follows the share of the task's steps that is done, and the data "
            "do not say how many batches a pass has. Expected arrays, batches that have a length "
            "(__len__), or local.step_schedule.steps in the plan"
        )
    return count


def as_data(
    source: Data | Batch | Iterable[Batch], examples: int | Callable[[], int] | None = None
) -> Data:
    """Return ``source`` as Data: arrays (a tuple, list or dict of them), or the user's own batches
    with ``examples``; a PyTorch DataLoader knows them itself.

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
    if examples is None and is_loader(source):
        examples = partial(loader_examples, source)
    if examples is None:
        raise DataError(
            f"a {type(source).__name__} was given without examples=; say how many examples one "
            "pass over it yields"
        )
    return BatchData(source, examples)  # type: ignore[arg-type]


def load_npz(
    path: str | os.PathLike[str], manifest: Manifest | None = None
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a NumPy .npz file by name; where a bundle's manifest is given, prepared
    as the bundle says and checked against its batch.

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
        fitting: Arrays = check_batch(prepare(arrays, manifest), manifest.batch)
        check_ranges(fitting, manifest.batch)
        return dict(zip((array.name for array in manifest.batch), fitting, strict=True))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
