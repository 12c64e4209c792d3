"""The weighted mean of the updates of a model that has buffers: an exact sum of the updates, and
one of the buffers' values beside it (value_sum.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import exact_mean, exact_merge, value_sum
from fleetlearn_coordinator.aggregation.exact_mean import Sum
from fleetlearn_coordinator.aggregation.updates import Result, Update, Values

VALUES = "buffers"
"""Name of the tensor with the buffers' sum."""


@dataclass(slots=True)
class Sums:
    """A round's reports, added up."""

    updates: Sum
    """What it has of the buffers' elements is not used."""
    values: value_sum.Bins


def init(places: Sequence[slice], size: int) -> Sums:
    """Return the sums of no reports, for a model of ``size`` elements with buffers in these
    places."""
    return Sums(
        exact_mean.init(size), value_sum.init(sum(place.stop - place.start for place in places))
    )


def add(
    sums: Sums, update: Update, weight: int, largest: float, factor: float, values: Values
) -> None:
    """Add a report. Raises ProtocolError as ``exact_mean.add`` does, and leaves the sums as they
    were."""
    exact_mean.add(sums.updates, update, weight, largest, factor)
    times = np.array([exact_mean.multiplier(weight, float(values.factors[0]))])
    value_sum.add(sums.values, values.rows, times)


def add_many(
    sums: Sums,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: NDArray[np.float64],
    factors: NDArray[np.float64] | None,
    values: Values,
) -> None:
    """Add reports, as ``exact_mean.add_many`` does."""
    exact_mean.add_many(sums.updates, parts, weights, largest, factors)
    value_sum.add(sums.values, values.rows, exact_mean.multipliers(weights, values.factors))


def merge(sums: Sums, other: Sums) -> None:
    """Add the reports of ``other`` to ``sums``, as ``exact_merge.merge`` does."""
    exact_merge.merge(sums.updates, other.updates)
    value_sum.merge(sums.values, other.values)


def result(sums: Sums, present: Vector) -> Result:
    """Return the means. Raises ValueError if there are no reports."""
    delta = exact_mean.mean(sums.updates)
    return Result(delta, value_sum.mean(sums.values, sums.updates.weight, present))


def to_tensors(sums: Sums) -> dict[str, NDArray[np.generic]]:
    """Return both sums as named flat arrays, which share their memory."""
    return {**exact_mean.to_tensors(sums.updates), VALUES: sums.values.reshape(-1)}


def from_tensors(tensors: Mapping[str, NDArray[np.generic]]) -> Sums:
    """Return the sums that ``to_tensors`` gave, in memory of their own. Raises ValueError if they
    are of no sums."""
    if VALUES not in tensors:
        raise ValueError(
            "a saved sum of a model with buffers has the sum of their values; this one does not"
        )
    rest = {name: tensor for name, tensor in tensors.items() if name != VALUES}
    return Sums(
        exact_mean.from_tensors(rest),
        tensors[VALUES].astype(np.float64).reshape(len(value_sum.GRIDS), -1),
    )


def functions(places: Sequence[slice]) -> dict[str, Any]:
    """Return the fields of ``Aggregator`` in which this mean differs from that of a model without
    buffers."""
    return {
        "init": partial(init, places),
        "add": add,
        "add_many": add_many,
        "merge": merge,
        "result": result,
        "to_tensors": to_tensors,
        "from_tensors": from_tensors,
    }
