"""The updates of a round, kept where they are until the round ends, and read block by block.

So the memory that a robust aggregator takes is some devices times one block, however large the
model is. What is computed depends on the set of updates alone: they are put in one order first, by
their contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import checksum
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.updates import (
    ALIGNMENT,
    NO_VALUES,
    ArrayUpdate,
    Update,
    Values,
)

BLOCK_BYTES = 2**25
"""Bytes of float64 that are read from all updates at a time."""
MAX_KEPT = 4096
"""Most updates of a round. Each is an open file in the server; distances between all take time and
memory that grow with the square."""


MOST_OF_MEDIAN = 1e6
"""How many times the median a buffer's move may be, and the length of an update where distances are
computed. More than honest devices differ, and with 16 digits no loss."""


class KeptUpdate(NamedTuple):
    update: Update
    weight: int
    factor: float
    """What staleness and clipping leave of the update, above 0 and at most 1."""
    moves: NDArray[np.float64]
    """How far its buffers' values, as far as they count, are from the present model's: shape
    (B,)."""


@dataclass(slots=True)
class KeptUpdates:
    """The updates of a round, each of ``size`` elements, with buffers in ``places``."""

    size: int
    places: tuple[slice, ...] = ()
    updates: list[KeptUpdate] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.updates)

    def weights(self) -> NDArray[np.float64]:
        """Return the updates' weights, shape (n,)."""
        return np.array([row.weight for row in self.updates], np.float64)

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Yield each block's place in the model, and the updates' elements there times their
        factors, shape (n, b). In the buffers' places they are the moves of these.

        Every block but the last has as many elements."""
        rows = BLOCK_BYTES // (8 * max(1, len(self)))
        step = max(ALIGNMENT, rows // ALIGNMENT * ALIGNMENT)
        for start in range(0, self.size, step):
            place = slice(start, min(start + step, self.size))
            elements = np.empty((len(self), place.stop - start))
            for row, kept in zip(elements, self.updates, strict=True):
                np.multiply(
                    kept.update.read(start, place.stop), kept.factor, out=row, dtype=np.float64
                )
                self._put_moves(row, start, kept.moves)
            yield place, elements

    def _put_moves(
        self, block: NDArray[np.float64], start: int, moves: NDArray[np.float64]
    ) -> None:
        """Write the moves of buffers into a block that begins at this element of the model."""
        stop, begin = start + len(block), 0
        for place in self.places:
            first, last = max(place.start, start), min(place.stop, stop)
            if first < last:
                block[first - start : last - start] = moves[
                    begin + first - place.start : begin + last - place.start
                ]
            begin += place.stop - place.start

    def select(self, rows: Sequence[int]) -> KeptUpdates:
        """Return these updates alone."""
        return KeptUpdates(self.size, self.places, [self.updates[row] for row in rows])

    def bounded(self) -> KeptUpdates:
        """Return the updates with no buffer's move longer than MOST_OF_MEDIAN times the median of
        its moves. Values may be any float32: beside 1e30 the inner products of others would be lost
        in rounding."""
        if not self.places:
            return self
        moves = np.stack([kept.moves for kept in self.updates])
        most = MOST_OF_MEDIAN * np.median(np.abs(moves), axis=0)
        rows = zip(self.updates, np.clip(moves, -most, most), strict=True)
        return KeptUpdates(self.size, self.places, [kept._replace(moves=row) for kept, row in rows])

    def in_order(self) -> KeptUpdates:
        """Return the updates in an order that does not depend on the order in which they came."""
        return KeptUpdates(self.size, self.places, sorted(self.updates, key=_key))


def _key(kept: KeptUpdate) -> tuple[int, int, float]:
    """Different updates have the same key with a chance of one in 2^32. Only rounding would depend
    on their order."""
    found = 0
    for part in kept.update:
        found = checksum(np.ascontiguousarray(part, "<f4"), found)
    return checksum(kept.moves.data, found), kept.weight, kept.factor


def add(
    kept: KeptUpdates,
    update: Update,
    weight: int,
    largest: float,
    factor: float = 1.0,
    values: Values = NO_VALUES,
) -> None:
    """Keep one more update, and a copy of its buffers' moves.

    Raises ProtocolError (not-finite, out-of-range) as ``exact_mean.check`` does, and if there are
    MAX_KEPT already; nothing is kept then."""
    if len(kept) >= MAX_KEPT:
        raise ProtocolError(
            Code.OUT_OF_RANGE, f"the round has {len(kept)} updates, and can keep no more"
        )
    exact_mean.check(largest, weight)
    moves = values.factors[0] * np.subtract(values.rows[0], values.present, dtype=np.float64)
    kept.updates.append(KeptUpdate(update, weight, factor, moves))


def add_many(
    kept: KeptUpdates,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: NDArray[np.float64],
    factors: NDArray[np.float64] | None = None,
    values: Values = NO_VALUES,
) -> None:
    """Keep copies of n updates: arrays of shape (rows, P), n rows together, weights, largest
    magnitudes and factors of shape (n,); factors None: all are 1; and the values of their buffers.
    Raises ProtocolError as ``add`` does."""
    given = np.ones(len(weights)) if factors is None else factors
    updates = (row for part in parts for row in part)
    columns = weights.tolist(), largest.tolist(), given.tolist()
    for row, (update, weight, most, factor) in enumerate(zip(updates, *columns, strict=True)):
        add(
            kept,
            ArrayUpdate(update.copy()),
            weight,
            most,
            factor,
            values.select(row) if kept.places else NO_VALUES,
        )
