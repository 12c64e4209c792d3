"""A party's data: the arrays of its bottom, the labels if it has them, and the hashes of its rows'
ids. And those of a device with rows of its own, which have no ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.errors import Code, ProtocolError, in_words
from fleetlearn_protocol.manifest import Input, Manifest
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.preprocessing import Preprocessing
from fleetlearn_protocol.vertical.alignment import (
    MOST_ROWS,
    RowHashes,
    digest_of,
    hash_rows,
    read_membership,
)
from fleetlearn_protocol.vertical.messages import CommonRows
from numpy.typing import NDArray

from fleetlearn_device.data.assembling import assembled, matching, typed, with_declared
from fleetlearn_device.data.preprocessing import prepared_rows
from fleetlearn_device.data.raw import Choices, RawRows, RawSource
from fleetlearn_device.data.sources import open_source
from fleetlearn_device.runtimes.checks import DataError, check_batch, check_ranges, find_nonfinite

log = logging.getLogger("fleetlearn.device")


class PartyTable(NamedTuple):
    """The rows of a party, sorted by the hashes of their ids."""

    hashes: RowHashes
    """Rising, shape (n,)."""
    arrays: tuple[NDArray[Any], ...]
    """Those of the bottom's batch, in its order, without the gradient."""
    source: RawSource
    others: RawRows
    """The arrays that are neither ids nor the bottom's, as they were read, unsorted."""
    order: NDArray[np.int64]
    """Place in ``hashes`` -> the row of the data."""

    def common(self, message: CommonRows, content: bytes) -> NDArray[np.int64]:
        """Return the places of the common rows in ``hashes``, in their common order. Raises
        ProtocolError unless the common hashes have the digest that the message says."""
        chosen = np.flatnonzero(read_membership(content, len(self.hashes)))
        found = digest_of(self.hashes[chosen])
        if len(chosen) != message.rows or found != message.digest:
            raise ProtocolError(
                Code.WRONG_HASH,
                f"the coordinator says that {message.rows} rows with the digest {message.digest} "
                f"are common; of this party's rows they are {len(chosen)} with the digest {found}",
            )
        return chosen.astype(np.int64)

    def targets(self, wanted: Sequence[Input]) -> list[NDArray[Any]]:
        """Return the labels of all rows, sorted as ``hashes``, in the dtypes that are wanted.
        Raises DataError."""
        return _targets(self.source, self.others, wanted, self.order)


class OwnRows(NamedTuple):
    """The rows of a device of a split run, in the order of its data."""

    arrays: tuple[NDArray[Any], ...]
    """Those of the bottom's batch, in its order, without the gradient."""
    source: RawSource
    others: RawRows
    """The arrays that are not the bottom's, as they were read."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.arrays[0])

    def targets(self, wanted: Sequence[Input]) -> list[NDArray[Any]]:
        """Return the labels of all rows, in the dtypes that are wanted. Raises DataError."""
        return _targets(self.source, self.others, wanted, np.arange(self.size))


def _targets(
    source: RawSource, rows: RawRows, wanted: Sequence[Input], order: NDArray[np.int64]
) -> list[NDArray[Any]]:
    if not wanted:
        return []
    absent = [row.name for row in wanted if row.name not in rows.arrays]
    if absent:
        raise DataError(
            f"{source.name}: this device is to give the labels, and there is no column "
            f"{', '.join(absent)} beside ids and features, which it tells nobody; there are "
            f"{', '.join(rows.arrays) or 'none'}"
        )
    log.info(
        "the coordinator is sent the labels of each row: %s", ", ".join(r.name for r in wanted)
    )
    made = [typed(rows.arrays[row.name], row, rows, source.name) for row in wanted]
    return _checked(made, wanted, source.name, order)


def read_own_rows(text: str, manifest: Manifest) -> OwnRows:
    """Read the data of a device of a split run, as ``fleetlearn-device run --data`` takes them.
    Raises DataError."""
    source, choices = open_source(text)
    rows = with_declared(source, source.load(), choices)
    inputs = manifest.data_arrays
    made = assembled(source, _of_bottom(rows, inputs), inputs, choices)
    count = len(made[inputs[0].name])
    if not 0 < count <= MOST_ROWS:
        raise DataError(f"{source.name}: {count} rows; expected 1 to {MOST_ROWS}")
    order = np.arange(count)
    arrays = _checked([made[row.name] for row in inputs], inputs, source.name, order)
    return OwnRows(tuple(arrays), source, _others(rows, choices, manifest))


def _of_bottom(rows: RawRows, inputs: Sequence[Input]) -> RawRows:
    """Return the rows with the arrays of a bottom alone; ids and labels may stand beside them."""
    named = {row.name for row in inputs} & set(rows.arrays)
    return rows._replace(arrays={name: rows.arrays[name] for name in named} or rows.arrays)


def _others(rows: RawRows, choices: Choices, manifest: Manifest, *ids: str) -> RawRows:
    """Return the rows without ids and features. A coordinator names the labels that it wants, and
    could name these, which no run tells it."""
    inputs = {row.name for row in manifest.data_arrays}
    kept = {*ids, *inputs}
    if isinstance(manifest.preprocessing, Preprocessing):
        kept.update(manifest.preprocessing.raw)
    elif not inputs & set(rows.arrays):  # all of them are features, in their order
        kept.update(rows.arrays)
    for name, patterns in choices.columns().items():
        if name in inputs:
            kept.update(matching(patterns, rows.arrays))
    others = {name: array for name, array in rows.arrays.items() if name not in kept}
    return rows._replace(arrays=others)


def read_table(text: str, ids: str, key: bytes, manifest: Manifest) -> PartyTable:
    """Read a party's data. Raises DataError.

    text: as ``fleetlearn-device run --data`` takes it. ids: the column with the rows' ids. key:
    that of the parties.
    """
    source, choices = open_source(text)
    rows = with_declared(source, source.load(), choices)
    if ids not in rows.arrays:
        raise DataError(
            f"{source.name}: there is no column {ids} with the rows' ids; there are "
            f"{', '.join(rows.arrays)}"
        )
    column, inputs = rows.arrays[ids], manifest.data_arrays
    if column.ndim != 1:
        raise DataError(
            f"{source.name}: the column {ids} with the rows' ids has shape {column.shape}; "
            "expected (n,)"
        )
    if isinstance(manifest.preprocessing, Preprocessing):
        prepared = prepared_rows(rows, manifest.preprocessing, inputs, source.name)
        if not np.array_equal(prepared.first, np.arange(len(column))):
            raise DataError(
                f"{source.name}: the bundle's preprocessing makes other rows than the data have, "
                "whose ids nobody knows; make such rows beforehand, with an id for each"
            )
        made = {row.name: prepared.arrays[row.name] for row in inputs}
    else:
        made = assembled(source, _of_bottom(rows, inputs), inputs, choices)
    try:
        hashes = hash_rows(column.tolist(), key)
    except ValueError as error:
        raise DataError(f"{source.name}: {error}") from None
    order = np.argsort(hashes, kind="stable").astype(np.int64)
    arrays = _checked([made[row.name] for row in inputs], inputs, source.name, order)
    others = _others(rows, choices, manifest, ids)
    return PartyTable(hashes[order], tuple(arrays), source, others, order)


def _checked(
    arrays: Sequence[NDArray[Any]], inputs: Sequence[Input], where: str, order: NDArray[np.int64]
) -> list[NDArray[Any]]:
    """Return arrays that fit the bundle, sorted. Raises DataError."""
    try:
        fitting = check_batch(list(arrays), inputs)
        check_ranges(fitting, inputs)
        problem = find_nonfinite(fitting, inputs)
    except DataError as error:
        problem = str(error)
    if problem is not None:
        raise DataError(f"{where}: {problem}")
    return [np.ascontiguousarray(array[order]) for array in fitting]


def read_key(path: str) -> bytes:
    """Return the parties' key from its file. Raises DataError, whose text does not have it."""
    try:
        return in_home(path).read_bytes().strip()
    except (OSError, ValueError) as error:
        raise DataError(f"the parties' key {path} cannot be read: {in_words(error)}") from None
