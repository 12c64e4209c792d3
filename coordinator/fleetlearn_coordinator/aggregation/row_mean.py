"""The mean of updates of sub-models: of each sparse table the rows that a device trained alone.

A row of no device is no part of the sum, and its row of the model stays as it is. The sum has the
rows of this round's devices alone: an update costs time by its own rows, and a saved state is as
large as the rows that came. Both sums are exact (exact_mean.py), so the result is the same in
whatever order updates come.

What a row's mean is divided by is a choice (``aggregation.rows``). ``all``: the weight of all
updates, as Federated Averaging divides, for which a row that a device does not have counts as
unchanged. The result is then, bit by bit, that of whole updates with zeros in these rows.
``touched``: the weight of the updates that have the row. Gu et al., "Federated Submodel
Optimization for Hot and Cold Data Features" (2022), arXiv 2109.07704, show that the first moves
rows of few devices too slowly, by the share of the devices that have them, and correct each
parameter by that share over the whole population (their FedSubAvg). Here the share is that of the
round's own updates, so that nobody has to count how many devices of the population have a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.sparse_rows import RowLayout, Rows, check_rows, select, touched_rows
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import exact_mean, exact_merge
from fleetlearn_coordinator.aggregation.aggregators import Aggregator, Column, Tensors
from fleetlearn_coordinator.aggregation.exact_mean import Sum
from fleetlearn_coordinator.aggregation.updates import (
    NO_VALUES,
    ArrayUpdate,
    ChangedRows,
    Result,
    RowsUpdate,
    Update,
    Values,
)

NAME = "mean of rows"
LEAST_ROWS = 64
"""Rows for which room is made first; the room doubles whenever it is full."""


@dataclass(slots=True, eq=False)
class RowSums:
    """The aggregator's state."""

    layout: RowLayout
    dense: Sum
    """Of the elements outside of the tables."""
    tables: Sum
    """Of rows, one after the other in the order of ``rows``, each of all tables together. It has
    room for more."""
    slots: NDArray[np.int32]
    """Row of the tables -> its place in ``rows`` + 1; 0: no update has it. Shape (N,)."""
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(LEAST_ROWS, np.int64))
    """The rows that updates have, in the order in which they came; then room for more."""
    weights: NDArray[np.int64] = field(default_factory=lambda: np.zeros(LEAST_ROWS, np.int64))
    """The sum of the weights of the updates that have each of these rows."""
    count: int = 0
    """How many rows there are."""

    @property
    def size(self) -> int:
        """P, the elements of the model."""
        return self.layout.size

    def places_of(self, rows: Rows) -> NDArray[np.int64]:
        """Return the places of rows, (R,). Room is made for those that are new."""
        places = self.slots[rows].astype(np.int64) - 1
        new = np.flatnonzero(places < 0)
        if len(new):
            end = self.count + len(new)
            self._make_room(end)
            places[new] = np.arange(self.count, end)
            self.rows[self.count : end] = rows[new]
            self.slots[rows[new]] = places[new] + 1
            self.count = end
        return places

    def _make_room(self, wanted: int) -> None:
        room = len(self.rows)
        if wanted <= room:
            return
        more = max(2 * room, wanted) - room
        width = self.layout.row_elements
        self.rows = np.concatenate([self.rows, np.empty(more, np.int64)])
        self.weights = np.concatenate([self.weights, np.zeros(more, np.int64)])
        self.tables.size += more * width
        self.tables.bins = {
            exponent: np.concatenate([held, np.zeros(more * width)])
            for exponent, held in self.tables.bins.items()
        }


def row_mean(layout: RowLayout, *, touched: bool) -> Aggregator[RowSums]:
    """Return the aggregator for a model whose tables lie so. ``touched``: whether a row's sum is
    divided by the weight of the updates that have the row."""
    return Aggregator(
        name=NAME,
        init=lambda size: _empty(layout),
        check=exact_mean.check,
        passes_check=exact_mean.passes_check,
        add=_add,
        add_many=_add_many,
        merge=_merge,
        result=partial(_result, touched),
        to_tensors=_to_tensors,
        from_tensors=partial(_from_tensors, layout),
        keeps_updates=False,
    )


def _empty(layout: RowLayout) -> RowSums:
    dense = layout.elements(0)
    tables = Sum(LEAST_ROWS * layout.row_elements)
    return RowSums(layout, Sum(dense), tables, np.zeros(layout.rows, np.int32))


def _add(
    sums: RowSums,
    update: Update,
    weight: int,
    largest: float,
    factor: float = 1.0,
    values: Values = NO_VALUES,
) -> None:
    layout = sums.layout
    parts = [part.copy() for part in update]
    elements = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if isinstance(update, RowsUpdate):
        rows = update.rows
        check_rows(rows, layout)
    else:  # of a device that trained whole tables
        if len(elements) != layout.size:
            text = f"an update of {len(elements)} elements was given; expected {layout.size}"
            raise ValueError(text)
        rows = touched_rows(elements, layout)
        elements = select(elements, layout, rows)
    expected = layout.elements(len(rows))
    if len(elements) != expected:
        text = f"an update of {len(elements)} elements and {len(rows)} rows; expected {expected}"
        raise ValueError(text)
    if sums.dense.count >= exact_mean.MAX_UPDATES:
        text = f"the round has {sums.dense.count} updates, and its sum can hold no more"
        raise ProtocolError(Code.OUT_OF_RANGE, text)
    exact_mean.check(largest, weight)
    dense, tables = _apart(elements, layout, len(rows))
    exact_mean.add(sums.dense, dense, weight, largest, factor)
    places = sums.places_of(rows)
    sums.weights[places] += weight
    width = layout.row_elements
    here = (places[:, None] * width + np.arange(width)).reshape(-1)
    exact_mean.add_at(sums.tables, here, tables.reshape(-1), weight, largest, factor)


def _apart(
    elements: Vector, layout: RowLayout, rows: int
) -> tuple[list[Vector], NDArray[np.float32]]:
    """Return the elements outside of the tables, in parts, and the rows of all tables together,
    shape (R, row_elements)."""
    dense, tables, begin = list[Vector](), list[Vector](), 0
    for start, stop, width in layout.segments:
        end = begin + (rows * width if width else stop - start)
        if width:
            tables.append(elements[begin:end].reshape(rows, width))
        else:
            dense.append(elements[begin:end])
        begin = end
    return dense, np.concatenate(tables, axis=1)


def _together(dense: NDArray[Any], tables: NDArray[Any], layout: RowLayout) -> NDArray[Any]:
    """Undo ``_apart``."""
    parts, begin, column = list[NDArray[Any]](), 0, 0
    for start, stop, width in layout.segments:
        if width:
            parts.append(tables[:, column : column + width].reshape(-1))
            column += width
        else:
            parts.append(dense[begin : begin + stop - start])
            begin += stop - start
    return np.concatenate(parts)


def _add_many(
    sums: RowSums,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: Column,
    factors: Column | None = None,
    values: Values = NO_VALUES,
) -> None:
    updates: Iterator[Vector] = (row for part in parts for row in part)
    own = np.ones(len(weights)) if factors is None else factors
    columns = updates, weights.tolist(), largest.tolist(), own.tolist()
    for update, weight, most, factor in zip(*columns, strict=True):
        _add(sums, ArrayUpdate(update), weight, most, factor)


def _merge(sums: RowSums, other: RowSums) -> None:
    if other.layout != sums.layout:
        raise ValueError("sums of models with other tables cannot be merged")
    exact_merge.merge(sums.dense, other.dense)
    places = sums.places_of(other.rows[: other.count])
    sums.weights[places] += other.weights[: other.count]
    width = sums.layout.row_elements
    moved = Sum(sums.tables.size, whole=dict(other.tables.whole))
    moved.weight, moved.count = other.tables.weight, other.tables.count
    for exponent, held in other.tables.bins.items():
        into = moved.bin_of(exponent).reshape(-1, width)
        into[places] = held[: other.count * width].reshape(-1, width)
    exact_merge.merge(sums.tables, moved)


def _result(touched: bool, sums: RowSums, present: Vector = NO_VALUES.present) -> Result:
    if not sums.dense.count:
        raise ValueError("the mean of no updates was asked for; add one first")
    order = np.argsort(sums.rows[: sums.count])
    width = sums.layout.row_elements
    tables = exact_mean.add_up(sums.tables)[: sums.count * width].reshape(-1, width)[order]
    if touched:
        tables /= sums.weights[order, None]
    else:
        tables /= sums.dense.weight
    dense = exact_mean.mean(sums.dense)
    changed = ChangedRows(sums.layout, sums.rows[order])
    return Result(_together(dense, tables, sums.layout), np.zeros(0), changed)


def _to_tensors(sums: RowSums) -> dict[str, NDArray[np.generic]]:
    return {
        "rows": sums.rows[: sums.count],
        "rows.weights": sums.weights[: sums.count],
        **{f"dense.{name}": each for name, each in exact_mean.to_tensors(sums.dense).items()},
        **{f"tables.{name}": each for name, each in exact_mean.to_tensors(sums.tables).items()},
    }


def _from_tensors(layout: RowLayout, tensors: Tensors) -> RowSums:
    found, weights = tensors.get("rows"), tensors.get("rows.weights")
    if found is None or weights is None or found.dtype != np.int64 or weights.dtype != np.int64:
        text = f"the saved state has {', '.join(tensors) or 'nothing'}: it is no sum of rows"
        raise ValueError(text)
    rows = np.asarray(found, np.int64)
    sums = _empty(layout)
    if rows.shape != weights.shape or not ((rows >= 0) & (rows < layout.rows)).all():
        raise ValueError("the saved state has rows that the tables do not have: it is damaged")
    if len(np.unique(rows)) < len(rows):
        raise ValueError("the saved state has a row twice: it is damaged")
    places = sums.places_of(rows)
    sums.weights[places] = weights
    sums.dense = exact_mean.from_tensors(_below(tensors, "dense."))
    tables = exact_mean.from_tensors(_below(tensors, "tables."))
    room = tables.size // layout.row_elements
    if sums.dense.size != layout.elements(0) or room * layout.row_elements != tables.size:
        raise ValueError("the saved state is of a model with other tables")
    if room < len(rows):
        raise ValueError("the saved state lacks sums of rows: it is damaged")
    sums.tables = tables
    sums.rows = np.concatenate([rows, np.empty(room - len(rows), np.int64)])
    sums.weights = np.concatenate(
        [np.asarray(weights, np.int64), np.zeros(room - len(rows), np.int64)]
    )
    return sums


def _below(tensors: Tensors, prefix: str) -> dict[str, NDArray[np.generic]]:
    return {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }
