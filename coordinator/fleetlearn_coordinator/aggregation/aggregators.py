"""Aggregators: how the updates of a round become one vector, for the server optimizer.

Each is a set of functions over a state of its own, which updates are added to as they arrive: ``init(size) -> state``,
``add(state, parts, weight, largest, factor)``, ``result(state) -> vector``. The state can be written and read as named
tensors. ``Aggregator`` has all that one must provide (the simulator adds many updates at a time); ``Plan.aggregator``
chooses one.

``mean`` is the mean weighted by the devices' examples, as in Federated Averaging: McMahan et al.,
"Communication-Efficient Learning of Deep Networks from Decentralized Data" (2016), arXiv 1602.05629, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import exact_mean

S = TypeVar("S")
"""The aggregator's state: the updates added so far, in whatever form the aggregator needs."""
Tensors = Mapping[str, NDArray[np.generic]]


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
    add: Callable[[S, Iterable[Vector], int, float, float], None]
    """Adds to the state, in place, an update in parts (flat float32, P elements together), its weight, its largest
    magnitude, and the factor by which staleness makes it smaller (above 0, at most 1: fresh). Raises ProtocolError as
    ``check`` does, and leaves the state as it was."""
    add_many: Callable[
        [S, Sequence[NDArray[np.float32]], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64] | None], None
    ]
    """Adds n updates that have passed ``check``: in parts of shape (rows, P), weights (n,), largest magnitudes (n,),
    factors (n,) or None (all are 1)."""
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


AGGREGATORS: Mapping[str, Aggregator[Any]] = {
    "mean": Aggregator(
        name="mean",
        init=exact_mean.init,
        check=exact_mean.check,
        passes_check=exact_mean.passes_check,
        add=exact_mean.add,
        add_many=exact_mean.add_many,
        result=exact_mean.mean,
        to_tensors=exact_mean.to_tensors,
        from_tensors=exact_mean.from_tensors,
        keeps_updates=False,
    ),
}


def make(name: str) -> Aggregator[Any]:
    """Return the aggregator called ``name``. Raises ValueError on an unknown name."""
    if name not in AGGREGATORS:
        raise ValueError(f"there is no aggregator {name!r}; there are {', '.join(AGGREGATORS)}")
    return AGGREGATORS[name]
