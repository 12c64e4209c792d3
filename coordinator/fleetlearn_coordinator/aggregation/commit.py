"""How accepted updates become the next model. The server and the simulator call the same functions.

Nothing here reads or writes anything but its arguments, and only their new values are returned:
``next_model`` may run in another thread while nobody adds to the aggregator's state.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from fleetlearn_protocol.sparse_rows import put_back, select
from fleetlearn_protocol.vector import Vector, gather, scatter
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.exact_mean import multiplier
from fleetlearn_coordinator.aggregation.optimizers import Optimizer, State, change_norm
from fleetlearn_coordinator.aggregation.updates import ChangedRows, Result

S = TypeVar("S")


def weights_of(examples: NDArray[np.int64], max_weight: int) -> NDArray[np.int64]:
    """Return the weights of n updates in the mean, (n,): their devices' examples, up to the plan's
    limit."""
    return np.minimum(examples, max_weight)


class TaskBase(NamedTuple):
    """The model that the task of a round's only update began from, for a server that mixes models
    as FedAsync does."""

    model: Vector
    """float32, shape (P,)."""
    factor: float
    """What its staleness leaves of the update."""
    rate: float
    """The server's learning rate, alpha: how far buffers move towards the device's values."""


class NextModel(NamedTuple):
    """What a committed round made."""

    model: Vector
    """float32, shape (P,)."""
    optimizer_state: State
    change: float
    """The L2 norm of the model's change."""


def next_model(
    aggregator: Aggregator[S],
    aggregate: S,
    optimizer: Optimizer,
    optimizer_state: State,
    model: Vector,
    base: TaskBase | None = None,
    share: float = 1.0,
    scale: float = 1.0,
    released: NDArray[np.float64] | None = None,
) -> NextModel:
    """Return the next model, made from the round's updates. ``model`` and ``optimizer_state`` stay
    as they are.

    ``aggregate`` is the aggregator's state with the round's updates. Raises ValueError if it has
    none, FleetError (not-finite) if the model would not stay finite. ``share``: of all devices,
    those that took part.

    With ``base`` the model x moves towards the device's model x_i, not by its update. With the
    optimizer sgd of rate alpha that is x + alpha * s(tau) * (x_i - x): Xie, Koyejo and Gupta,
    "Asynchronous Federated Optimization" (2019), arXiv 1903.03934, Algorithm 1, where alpha_t =
    alpha * s(tau) is the mixing rate.

    ``scale`` (``Weighing.scale``) multiplies the mean of the trained parameters.

    ``released``: the noisy mean of a private round, (P,), which takes the place of the
    aggregator's.

    Buffers take the values that the aggregator found, whatever the optimizer and the scale are.
    With ``base`` they too are mixed: x + alpha * s(tau) * (v - x), where v is the device's value.
    """
    present = gather(model, optimizer.buffers)
    delta, buffers, changed = (
        aggregator.result(aggregate, present) if released is None else Result(released, present)
    )
    if changed is not None:
        delta *= scale
        return _with_changed_rows(optimizer, optimizer_state, model, delta, changed, share)
    delta *= scale
    if base is not None:  # x_i - x = update + (model that the task began from - x)
        delta += multiplier(1, base.factor) * np.subtract(base.model, model, dtype=np.float64)
        # s(tau) is in the aggregator's values
        buffers = (1 - base.rate) * present + base.rate * buffers
    optimizer_state, after = optimizer.apply(optimizer_state, delta, model, share)
    scatter(after, optimizer.buffers, buffers)
    return NextModel(after, optimizer_state, change_norm(model, after))


def _with_changed_rows(
    optimizer: Optimizer,
    optimizer_state: State,
    model: Vector,
    delta: NDArray[np.float64],
    changed: ChangedRows,
    share: float,
) -> NextModel:
    """Return the next model, in which the optimizer moves the selected elements alone: in rows of
    no update, its state stays as it is too (as PyTorch's SparseAdam does it)."""
    layout, rows = changed
    before = select(model, layout, rows)
    own = {slot: select(values, layout, rows) for slot, values in optimizer_state.items()}
    own, moved = optimizer.apply(own, delta, before, share)
    after = model.copy()
    put_back(after, layout, rows, moved)
    next_state = {slot: values.copy() for slot, values in optimizer_state.items()}
    for slot, values in own.items():
        put_back(next_state[slot], layout, rows, values)
    return NextModel(after, next_state, change_norm(before, moved))
