"""Aggregators: how the updates of a round become one vector, for the server optimizer.

Each is a set of functions over a state of its own, which updates are added to as they arrive: ``init(size) -> state``,
``add(state, update, weight, largest, factor, trained_factor)``, ``result(state) -> vector``. The state can be written
and read as named tensors. ``Aggregator`` has all that one must provide (the simulator adds many updates at a time);
``Plan.aggregator`` chooses one.

``mean`` is the mean weighted by the devices' examples, as in Federated Averaging: McMahan et al.,
"Communication-Efficient Learning of Deep Networks from Decentralized Data" (2016), arXiv 1602.05629, Algorithm 1. The
others, in robust/, bound what hostile devices can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.exact_mean import Sum
from fleetlearn_coordinator.aggregation.robust import kept_updates
from fleetlearn_coordinator.aggregation.robust.kept_updates import KeptUpdates
from fleetlearn_coordinator.aggregation.robust.rules import DEFAULTS, RULES, Bounds
from fleetlearn_coordinator.aggregation.updates import Update
from fleetlearn_coordinator.aggregation.weighing import plain_buffers

S = TypeVar("S")
"""The aggregator's state: the updates added so far, in whatever form the aggregator needs."""
Tensors = Mapping[str, NDArray[np.generic]]
Column = NDArray[np.float64]


class Aggregator(NamedTuple, Generic[S]):
    """A way to combine the updates of a round. P is the number of the model's elements, n a number of updates."""

    name: str
    init: Callable[[int], S]
    """P -> the state without updates."""
    check: Callable[[float, int], None]
    """Largest magnitude of an update's elements, weight -> None. Raises ProtocolError (not-finite, out-of-range) if
    the update must be refused."""
    passes_check: Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.bool_]]
    """Largest magnitudes (n,), weights (n,) -> which updates ``check`` lets pass (n,)."""
    add: Callable[[S, Update, int, float, float, float], None]
    """Adds to the state, in place, an update of P elements, its weight, its largest magnitude, the factor that all of
    its elements are multiplied by (staleness, clipping), and the one for its trained parameters besides (weighing/);
    both are above 0 and at most 1. With ``keeps_updates`` the update is read again later. Raises ProtocolError as
    ``check`` does, and leaves the state as it was."""
    add_many: Callable[
        [S, Sequence[NDArray[np.float32]], NDArray[np.int64], Column, Column | None, Column | None], None
    ]
    """Adds n updates that have passed ``check``: in parts of shape (rows, P), weights (n,), largest magnitudes (n,),
    and both factors (n,) or None (all are 1). The parts' memory may be used for something else afterwards."""
    result: Callable[[S], NDArray[np.float64]]
    """The state -> what the server optimizer moves the model by, float64, shape (P,). The same bits in whatever order
    the updates were added. Raises ValueError if there are none."""
    to_tensors: Callable[[S], dict[str, NDArray[np.generic]]]
    """The state -> flat tensors by name, which may share its memory. P alone decides their names, dtypes and sizes."""
    from_tensors: Callable[[Tensors], S]
    """Undoes ``to_tensors``, to the last bit, in new memory. Raises ValueError if the tensors are of no state."""
    keeps_updates: bool
    """Whether ``result`` needs each update itself. If so, the coordinator keeps all updates on disk until the round
    ends; else it writes the state from time to time, and removes the updates that are in it."""


def _add(
    total: Sum, update: Update, weight: int, largest: float, factor: float = 1.0, trained_factor: float = 1.0
) -> None:
    exact_mean.add(total, update, weight, largest, factor * trained_factor)


def _add_many(
    total: Sum,
    parts: Sequence[NDArray[np.float32]],
    weights: NDArray[np.int64],
    largest: Column,
    factors: Column | None = None,
    trained_factors: Column | None = None,
) -> None:
    exact_mean.add_many(total, parts, weights, largest, plain_buffers.product(factors, trained_factors))


MEAN = Aggregator(
    name="mean",
    init=exact_mean.init,
    check=exact_mean.check,
    passes_check=exact_mean.passes_check,
    add=_add,
    add_many=_add_many,
    result=exact_mean.mean,
    to_tensors=exact_mean.to_tensors,
    from_tensors=exact_mean.from_tensors,
    keeps_updates=False,
)


def mean_with_plain_buffers(buffers: Sequence[slice]) -> Aggregator[Any]:
    """Return the mean in which the factor of trained parameters leaves these elements alone."""
    return MEAN._replace(**plain_buffers.functions(buffers)) if buffers else MEAN


def _robust(name: str, bounds: Bounds) -> Aggregator[KeptUpdates]:
    def result(kept: KeptUpdates) -> NDArray[np.float64]:
        if not len(kept):
            raise ValueError(f"the {name} of no updates was asked for; add one first")
        return RULES[name].result(kept.in_order(), bounds)

    return Aggregator(
        name=name,
        init=kept_updates.init,
        check=exact_mean.check,
        passes_check=exact_mean.passes_check,
        add=kept_updates.add,
        add_many=kept_updates.add_many,
        result=result,
        to_tensors=lambda kept: {},
        from_tensors=_refuse_tensors,
        keeps_updates=True,
    )


def _refuse_tensors(tensors: Tensors) -> KeptUpdates:
    raise ValueError("the open round's updates were added up by another aggregator, and are not there any more")


AGGREGATORS: Mapping[str, Callable[[Bounds], Aggregator[Any]]] = {
    MEAN.name: lambda bounds: MEAN,
    **{name: partial(_robust, name) for name in RULES},
}


def make(name: str, bounds: Bounds = DEFAULTS) -> Aggregator[Any]:
    """Return the aggregator called ``name``. ``bounds`` are for the robust ones. Raises ValueError on an unknown
    name."""
    if name not in AGGREGATORS:
        raise ValueError(f"there is no aggregator {name!r}; there are {', '.join(AGGREGATORS)}")
    return AGGREGATORS[name](bounds)
