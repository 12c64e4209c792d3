"""The part of a model that a device trains: of sparse tables the rows that its data name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from fleetlearn_protocol.manifest import Input, Manifest
from fleetlearn_protocol.sparse_rows import (
    RowLayout,
    Rows,
    put_back,
    row_layout,
    select,
    sub_manifest,
)
from fleetlearn_protocol.vector import Vector
from msgspec import UNSET
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import Batch, DataError, check_batch
from fleetlearn_device.training.data import ArrayData, Data
from fleetlearn_device.training.task_data import TaskData


class SubModel(NamedTuple):
    """What a device trains of a bundle's model."""

    rows: Rows
    """The rows of the sparse tables that its data name, ascending: int64, shape (R,)."""
    layout: RowLayout
    manifest: Manifest
    """The sub-model's."""
    data: TaskData
    """The device's data, whose integers are places among ``rows``."""

    def of(self, vector: Vector) -> Vector:
        """Return the sub-model's part of a vector like the whole model's."""
        return select(vector, self.layout, self.rows)

    def whole(self, model: Vector, local: Vector) -> Vector:
        """Return the whole model with this device's parameters: float32, shape (local_size,).
        model: the round's, shape (P,). local: the sub-model's, with what is personal."""
        whole, size = model.copy(), self.manifest.size
        put_back(whole, self.layout, self.rows, local[:size])
        return np.concatenate([whole, local[size:]])


def find_sub_model(manifest: Manifest, data: TaskData) -> SubModel:
    """Return what the device trains. manifest: of the whole model, which has sparse tables. data:
    the device's. Raises DataError."""
    layout = row_layout(manifest)
    assert layout is not None
    places = _row_arrays(manifest)
    found = [_rows_of(data.training, places, manifest.batch)]
    if data.held_out is not None:
        found.append(_rows_of(data.held_out, places, manifest.batch))
    rows = np.unique(np.concatenate(found))
    made = sub_manifest(manifest, len(rows))
    numbered = [
        None if each is None else _numbered(each, places, rows, manifest.batch)
        for each in (data.training, data.held_out)
    ]
    training, held_out = numbered
    assert training is not None
    return SubModel(rows, layout, made, data._replace(training=training, held_out=held_out))


def _row_arrays(manifest: Manifest) -> list[int]:
    """Return the places, in the batch, of the arrays that name rows."""
    sparse = manifest.sparse
    names = () if sparse is UNSET else sparse.arrays
    return [place for place, array in enumerate(manifest.batch) if array.name in names]


def _rows_of(data: Data, places: Sequence[int], inputs: Sequence[Input]) -> Rows:
    """Return the rows that the data name: ascending, int64."""
    found = [np.zeros(0, np.int64)]
    fitting = data.fit(inputs)
    for batch in fitting.batches(0 if isinstance(fitting, ArrayData) else 1, None):
        arrays = check_batch(batch, inputs)
        found.append(np.unique(np.concatenate([arrays[place].reshape(-1) for place in places])))
    rows: Rows = np.unique(np.concatenate(found)).astype(np.int64)
    return rows


def _places_among(rows: Rows, array: NDArray[Any], name: str) -> NDArray[Any]:
    """Return each row's place among ``rows``. Raises DataError."""
    places = np.minimum(np.searchsorted(rows, array), len(rows) - 1)
    wrong = rows[places] != array
    if wrong.any():
        raise DataError(
            f"array {name} names row {array[wrong].reshape(-1)[0]}, which no earlier pass over the "
            "data named: the model's row was not fetched. Passes over the data must name the same "
            "rows"
        )
    return places.astype(array.dtype)


def _numbered(data: Data, places: Sequence[int], rows: Rows, inputs: Sequence[Input]) -> Data:
    if not isinstance(data, ArrayData):
        return _NumberedBatches(data, places, rows, inputs)
    fitting = data.fit(inputs)
    # Examples that were not chosen may name other rows.
    arrays = [np.asarray(column) for column in fitting.columns]
    for place in places:
        near = np.minimum(np.searchsorted(rows, arrays[place]), len(rows) - 1)
        arrays[place] = near.astype(arrays[place].dtype)
    return fitting.with_arrays(arrays, crc32(rows.tobytes()))


class _NumberedBatches:
    """The user's own batches, with the rows' places."""

    def __init__(
        self, data: Data, places: Sequence[int], rows: Rows, inputs: Sequence[Input]
    ) -> None:
        self._data, self._places, self._rows, self._inputs = data, places, rows, inputs

    @property
    def examples(self) -> int:
        return self._data.examples

    def fit(self, inputs: Sequence[Input]) -> Data:
        return copy(self)

    def batches(self, batch_size: int, seed: int | None, epoch: int = 0) -> Iterator[Batch]:
        for batch in self._data.fit(self._inputs).batches(batch_size, seed, epoch):
            arrays = list(check_batch(batch, self._inputs))
            for place in self._places:
                name = self._inputs[place].name
                arrays[place] = _places_among(self._rows, arrays[place], name)
            yield tuple(arrays)
