"""Aggregators: how the updates of a round become one vector, for the server optimizer.

Each is a set of functions over a state of its own, which updates are added to as they arrive:
``init(size) -> state``, ``add(state, update, weight, largest, factor, values)``,
``result(state, present) -> Result``. The state can be written and read as named tensors.
``Aggregator`` has all that one must provide (the simulator adds many updates at a time);
``Plan.aggregator`` chooses one.

``mean`` is the mean weighted by the devices' examples, as in Federated Averaging: McMahan et al.,
"Communication-Efficient Learning of Deep Networks from Decentralized Data" (2016), arXiv
1602.05629, Algorithm 1. The others, in robust/, bound what hostile devices can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from fleetlearn_protocol.vector import Vector, gather
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import exact_mean, exact_merge, mean_with_buffers
from fleetlearn_coordinator.aggregation.exact_mean import Sum
from fleetlearn_coordinator.aggregation.robust import kept_updates
from fleetlearn_coordinator.aggregation.robust.kept_updates import KeptUpdates
from fleetlearn_coordinator.aggregation.robust.rules import DEFAULTS, RULES, Bounds
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Result, Update, Values

S = TypeVar("S")
"""The aggregator's state: the updates added so far, in whatever form the aggregator needs."""
Tensors = Mapping[str, NDArray[np.generic]]
Column = NDArray[np.float64]


class Aggregator(NamedTuple, Generic[S]):
    """A way to combine the updates of a round. P is the number of the model's elements, n a number
    of updates."""

    name: str
    init: Callable[[int], S]
    """P -> the state without reports."""
    check: Callable[[float, int], None]
    """Largest magnitude of an update's elements, weight -> None. Raises ProtocolError (not-finite,
    out-of-range) if the update must be refused."""
    passes_check: Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.bool_]]
    """Largest magnitudes (n,), weights (n,) -> which updates ``check`` lets pass (n,)."""
    add: Callable[[S, Update, int, float, float, Values], None]
    """Adds to the state, in place, an update of P elements, its weight, its largest magnitude, the
    factor that its elements are multiplied by (staleness, clipping, weighing/), above 0 and at most
    1, and the values of its buffers. With ``keeps_updates`` the update is read again later. Raises
    ProtocolError as ``check`` does, and leaves the state as it was."""
    add_many: Callable[
        [S, Sequence[NDArray[np.float32]], NDArray[np.int64], Column, Column | None, Values], None
    ]
    """Adds n updates that have passed ``check``: in parts of shape (rows, P), weights (n,), largest
    magnitudes (n,), factors (n,) or None (all are 1), and the values of their buffers. The parts'
    memory may be used for something else afterwards."""
    merge: Callable[[S, S], None]
    """Adds to the first state, in place, the updates of the second, which is not used afterwards:
    the result is the same, to the last bit, as if they had been added one by one. Raises
    ProtocolError (out-of-range), ValueError where it cannot be done: the first is then as it was.
    Not called with ``keeps_updates``."""
    result: Callable[[S, Vector], Result]
    """The state, the buffers' values in the present model (B,) -> what becomes of the model. The
    same bits in whatever order the updates were added. Raises ValueError if there are none."""
    to_tensors: Callable[[S], dict[str, NDArray[np.generic]]]
    """The state -> flat tensors by name, which may share its memory."""
    from_tensors: Callable[[Tensors], S]
    """Undoes ``to_tensors``, to the last bit, in new memory. Raises ValueError if the tensors are
    of no state."""
    keeps_updates: bool
    """Whether ``result`` needs each update itself. If so, the coordinator keeps all updates on disk
    until the round ends; else it writes the state from time to time, and removes the updates that
    are in it."""


def _add(
    total: Sum,
    update: Update,
    weight: int,
    largest: float,
    factor: float = 1.0,
    values: Values = NO_VALUES,
) -> None:
    exact_mean.add(total, update, weight, largest, factor)


def _add_many(
    total: Sum,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: Column,
    factors: Column | None = None,
    values: Values = NO_VALUES,
) -> None:
    exact_mean.add_many(total, parts, weights, largest, factors)


def _mean(total: Sum, present: Vector = NO_VALUES.present) -> Result:
    return Result(exact_mean.mean(total), np.zeros(0))


MEAN = Aggregator(
    name="mean",
    init=exact_mean.init,
    check=exact_mean.check,
    passes_check=exact_mean.passes_check,
    add=_add,
    add_many=_add_many,
    merge=exact_merge.merge,
    result=_mean,
    to_tensors=exact_mean.to_tensors,
    from_tensors=exact_mean.from_tensors,
    keeps_updates=False,
)


def _mean_of(bounds: Bounds, buffers: Sequence[slice]) -> Aggregator[Any]:
    return MEAN._replace(**mean_with_buffers.functions(buffers)) if buffers else MEAN


def kept_aggregator(
    name: str, combine: Callable[[KeptUpdates], Column], buffers: Sequence[slice]
) -> Aggregator[KeptUpdates]:
    """Return an aggregator that keeps a round's updates. ``combine``: the updates, in an order of
    their own -> what the server optimizer moves the model by, shape (P,)."""

    def result(kept: KeptUpdates, present: Vector = NO_VALUES.present) -> Result:
        if not len(kept):
            raise ValueError(f"the {name} of no updates was asked for; add one first")
        # In the buffers' places the updates have their values' distances from the present ones: the
        # rule finds the next value as it finds the others, from the same devices.
        delta = combine(kept.in_order().bounded())
        return Result(delta, present + gather(delta, buffers))

    return Aggregator(
        name=name,
        init=partial(KeptUpdates, places=tuple(buffers)),
        check=exact_mean.check,
        passes_check=exact_mean.passes_check,
        add=kept_updates.add,
        add_many=kept_updates.add_many,
        merge=_refuse_to_merge,
        result=result,
        to_tensors=lambda kept: {},
        from_tensors=_refuse_tensors,
        keeps_updates=True,
    )


def _robust(name: str, bounds: Bounds, buffers: Sequence[slice]) -> Aggregator[KeptUpdates]:
    return kept_aggregator(name, lambda kept: RULES[name].result(kept, bounds), buffers)


def _refuse_to_merge(kept: KeptUpdates, other: KeptUpdates) -> None:
    raise ValueError("updates that are kept have no sum, and so no partial one")


def _refuse_tensors(tensors: Tensors) -> KeptUpdates:
    raise ValueError(
        "the open round's updates were added up by another aggregator, and are not there any more"
    )


AGGREGATORS: Mapping[str, Callable[[Bounds, Sequence[slice]], Aggregator[Any]]] = {
    MEAN.name: _mean_of,
    **{name: partial(_robust, name) for name in RULES},
}


def make(name: str, bounds: Bounds = DEFAULTS, buffers: Sequence[slice] = ()) -> Aggregator[Any]:
    """Return the aggregator called ``name``. ``bounds`` are for the robust ones. ``buffers``: the
    places of the model's elements that are no trained parameters. Raises ValueError on an unknown
    name."""
    if name not in AGGREGATORS:
        raise ValueError(f"there is no aggregator {name!r}; there are {', '.join(AGGREGATORS)}")
    return AGGREGATORS[name](bounds, buffers)
