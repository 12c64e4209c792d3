"""The updates of a round, kept where they are until the round ends, and read block by block.

So the memory that a robust aggregator takes is some devices times one block, however large the model is. What is
computed depends on the set of updates alone: they are put in one order first, by their contents.
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
from fleetlearn_coordinator.aggregation.updates import ALIGNMENT, ArrayUpdate, Update

BLOCK_BYTES = 2**25
"""Bytes of float64 that are read from all updates at a time."""
MAX_KEPT = 4096
"""Most updates of a round. Each is an open file in the server; distances between all take time and memory that grow
with the square."""


class KeptUpdate(NamedTuple):
    update: Update
    weight: int
    factor: float
    """What staleness and clipping leave of the update, above 0 and at most 1."""


@dataclass(slots=True)
class KeptUpdates:
    """The updates of a round, each of ``size`` elements."""

    size: int
    updates: list[KeptUpdate] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.updates)

    def weights(self) -> NDArray[np.float64]:
        """Return the updates' weights, shape (n,)."""
        return np.array([row.weight for row in self.updates], np.float64)

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Yield each block's place in the model, and the updates' elements there times their factors, shape (n, b).

        Every block but the last has as many elements."""
        rows = BLOCK_BYTES // (8 * max(1, len(self)))
        step = max(ALIGNMENT, rows // ALIGNMENT * ALIGNMENT)
        for start in range(0, self.size, step):
            place = slice(start, min(start + step, self.size))
            elements = np.empty((len(self), place.stop - start))
            for row, kept in zip(elements, self.updates, strict=True):
                np.multiply(kept.update.read(start, place.stop), kept.factor, out=row, dtype=np.float64)
            yield place, elements

    def in_order(self) -> KeptUpdates:
        """Return the updates in an order that does not depend on the order in which they came."""
        return KeptUpdates(self.size, sorted(self.updates, key=_key))


def _key(kept: KeptUpdate) -> tuple[int, int, float]:
    """Different updates have the same key with a chance of one in 2^32. Only rounding would depend on their order."""
    found = 0
    for part in kept.update:
        found = checksum(np.ascontiguousarray(part, "<f4"), found)
    return found, kept.weight, kept.factor


def init(size: int) -> KeptUpdates:
    """Return no updates, for a model of ``size`` elements."""
    return KeptUpdates(size)


def add(
    kept: KeptUpdates, update: Update, weight: int, largest: float, factor: float = 1.0, trained_factor: float = 1.0
) -> None:
    """Keep one more update. ``trained_factor`` is 1: no plan has a robust aggregator and a rule of weighing.

    Raises ProtocolError (not-finite, out-of-range) as ``exact_mean.check`` does, and if there are MAX_KEPT already;
    nothing is kept then."""
    if len(kept) >= MAX_KEPT:
        raise ProtocolError(Code.OUT_OF_RANGE, f"the round has {len(kept)} updates, and can keep no more")
    exact_mean.check(largest, weight)
    kept.updates.append(KeptUpdate(update, weight, factor * trained_factor))


def add_many(
    kept: KeptUpdates,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: NDArray[np.float64],
    factors: NDArray[np.float64] | None = None,
    trained_factors: NDArray[np.float64] | None = None,
) -> None:
    """Keep copies of n updates: arrays of shape (rows, P), n rows together, and weights, largest magnitudes and factors
    of shape (n,); factors None: all are 1. Raises ProtocolError as ``add`` does."""
    given = np.ones(len(weights)) if factors is None else factors
    rows = (row for part in parts for row in part)
    for row, weight, most, factor in zip(rows, weights.tolist(), largest.tolist(), given.tolist(), strict=True):
        add(kept, ArrayUpdate(row.copy()), weight, most, factor)
