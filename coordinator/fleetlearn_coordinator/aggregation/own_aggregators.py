"""Aggregators of other packages: a function of the round's updates, or an ``Aggregator``.

A function gets the updates as ``RoundUpdates``, in an order that does not depend on the order in
which they came. They stay in files until the round ends, and are read block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from fleetlearn_protocol.errors import Code, FleetError
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.aggregators import Aggregator, kept_aggregator
from fleetlearn_coordinator.aggregation.own_calls import call_own, real
from fleetlearn_coordinator.aggregation.robust import coordinatewise, distances
from fleetlearn_coordinator.aggregation.robust.kept_updates import KeptUpdates

Floats: TypeAlias = NDArray[np.float64]
WHERE = "aggregation.aggregator"


@dataclass(frozen=True, slots=True)
class RoundUpdates:
    """The n updates of a round, each of P elements: a device's model minus the round's, times what
    staleness and a bound on norms leave of it."""

    _kept: KeptUpdates

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def weights(self) -> Floats:
        """What each update weighs by the plan (round.weighting): float64, shape (n,), above 0."""
        return self._kept.weights()

    def norms(self) -> Floats:
        """Return the L2 norm of each update's trained parameters, as ``max_norm`` measures it:
        float64, shape (n,)."""
        squares = np.zeros(len(self))
        for block, values in self._kept.blocks():
            for place in self._kept.places:  # of the buffers
                first, last = (edge - block.start for edge in (place.start, place.stop))
                values[:, max(0, first) : max(0, last)] = 0.0
            squares += np.square(values).sum(axis=1)
        return np.sqrt(squares)

    def inner_products(self) -> Floats:
        """Return the inner product of each pair of updates: float64, shape (n, n)."""
        return distances.inner_products(self._kept)

    def combination(self, shares: Floats) -> Floats:
        """Return the sum of the updates, each times its share: shape (n,) -> (P,)."""
        given = np.asarray(shares, np.float64)
        if given.shape != (len(self),):
            raise ValueError(
                f"combination() was given shares of shape {given.shape}; expected ({len(self)},), "
                "one for each update"
            )
        return distances.combine(self._kept, given)

    def by_columns(self, rule: Callable[[Floats], Floats]) -> Floats:
        """Return what ``rule`` makes of each element of the model, shape (P,). It is asked about
        blocks of b elements: shape (n, b) -> (b,)."""
        return coordinatewise.by_columns(self._kept, rule)


Combine: TypeAlias = Callable[[RoundUpdates], Floats]
"""The updates of a round -> what the server optimizer moves the model by: shape (P,)."""


def own_aggregator(
    name: str, made: Combine | Aggregator[Any], buffers: Sequence[slice]
) -> Aggregator[Any]:
    """Return the aggregator that another package's function, or its ``Aggregator``, is.

    ``name``: as the plan has it. ``buffers``: the model's elements that are no trained parameters.
    Raises ValueError where the ``Aggregator`` cannot be used.
    """
    if not isinstance(made, Aggregator):
        return kept_aggregator(name, partial(_combined, made), buffers)
    if buffers:
        raise ValueError(
            f"{WHERE} = {name!r} is a whole Aggregator, which adds updates up as they come, and "
            "the bundle's model has buffers (BatchNorm's statistics), of which it knows nothing. "
            "Let the function return one of RoundUpdates, or export the model without buffers"
        )
    return made._replace(name=name)


def _combined(combine: Combine, kept: KeptUpdates) -> Floats:
    """Raises FleetError where the function fails, or returns what is no change of the model."""
    made = call_own(WHERE, lambda: real(combine(RoundUpdates(kept))))
    if made.shape != (kept.size,):
        raise FleetError(
            Code.BAD_MESSAGE,
            f"{WHERE} returned an array of shape {made.shape}; expected ({kept.size},), a number "
            "for each element of the model",
        )
    if not np.isfinite(made).all():
        place = int(np.flatnonzero(~np.isfinite(made))[0])
        raise FleetError(
            Code.NOT_FINITE, f"{WHERE} made element {place} of the mean update {made[place]}"
        )
    return made
