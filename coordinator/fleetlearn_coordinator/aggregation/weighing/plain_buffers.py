"""The mean of updates whose trained parameters have a factor of their own, and whose buffers have none.

Two exact sums: one of all elements, with the factor, and a small one of the buffers' elements, without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.exact_mean import Sum
from fleetlearn_coordinator.aggregation.updates import ALIGNMENT, Update

PREFIX = "buffers."
"""Names of the small sum's tensors begin with this."""


@dataclass(slots=True)
class Sums:
    """A round's updates, added up."""

    whole: Sum
    """Of all elements. What it has of the buffers is not used."""
    buffers: Sum
    """Of the buffers' elements, one after the other."""


def init(buffers: Sequence[slice], size: int) -> Sums:
    """Return the sums of no updates, for a model of ``size`` elements."""
    return Sums(exact_mean.init(size), exact_mean.init(sum(place.stop - place.start for place in buffers)))


def add(
    buffers: Sequence[slice],
    sums: Sums,
    update: Update,
    weight: int,
    largest: float,
    factor: float = 1.0,
    trained_factor: float = 1.0,
) -> None:
    """Add an update. Raises ProtocolError as ``exact_mean.add`` does, and leaves the sums as they were."""
    exact_mean.add(sums.whole, update, weight, largest, factor * trained_factor)
    exact_mean.add(sums.buffers, [_elements(update, place) for place in buffers], weight, largest, factor)


def _elements(update: Update, place: slice) -> Vector:
    """Return a copy of some elements: an update is read from a multiple of ALIGNMENT on."""
    start = place.start // ALIGNMENT * ALIGNMENT
    return update.read(start, place.stop)[place.start - start :].copy()


def add_many(
    buffers: Sequence[slice],
    sums: Sums,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: NDArray[np.float64],
    factors: NDArray[np.float64] | None = None,
    trained_factors: NDArray[np.float64] | None = None,
) -> None:
    """Add updates, as ``exact_mean.add_many`` does."""
    exact_mean.add_many(sums.whole, parts, weights, largest, product(factors, trained_factors))
    columns = np.concatenate([np.arange(place.start, place.stop) for place in buffers])
    exact_mean.add_many(sums.buffers, [part[:, columns] for part in parts], weights, largest, factors)


def product(factors: NDArray[np.float64] | None, others: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """Return the products of two columns of factors. None stands for a column of ones."""
    if factors is None or others is None:
        return others if factors is None else factors
    return factors * others


def mean(buffers: Sequence[slice], sums: Sums) -> NDArray[np.float64]:
    """Return the mean, float64, shape (P,). Raises ValueError if there are no updates."""
    result, plain, begin = exact_mean.mean(sums.whole), exact_mean.mean(sums.buffers), 0
    for place in buffers:
        end = begin + place.stop - place.start
        result[place] = plain[begin:end]
        begin = end
    return result


def to_tensors(sums: Sums) -> dict[str, NDArray[np.generic]]:
    """Return both sums as named flat arrays, which share their memory."""
    small = {PREFIX + name: tensor for name, tensor in exact_mean.to_tensors(sums.buffers).items()}
    return exact_mean.to_tensors(sums.whole) | small


def from_tensors(tensors: Mapping[str, NDArray[np.generic]]) -> Sums:
    """Return the sums that ``to_tensors`` gave, in memory of their own. Raises ValueError if they are of no sums."""
    small = {name.removeprefix(PREFIX): each for name, each in tensors.items() if name.startswith(PREFIX)}
    rest = {name: each for name, each in tensors.items() if not name.startswith(PREFIX)}
    return Sums(exact_mean.from_tensors(rest), exact_mean.from_tensors(small))


def functions(buffers: Sequence[slice]) -> dict[str, Any]:
    """Return the fields of ``Aggregator`` that depend on where the buffers are."""
    return {
        "init": partial(init, buffers),
        "add": partial(add, buffers),
        "add_many": partial(add_many, buffers),
        "result": partial(mean, buffers),
        "to_tensors": to_tensors,
        "from_tensors": from_tensors,
    }
