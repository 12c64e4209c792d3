"""What a round's reports become, part by part: the aggregator's state of each part that devices report.

The part ``update`` counts with its weight and its factor, together with the values of the part ``buffers``. Every other
part, such as SCAFFOLD's ``control``, counts whole, with a weight of 1: it tells by how much something changed that the
device keeps, and the coordinator's sum of these changes must be what the devices have together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.exact_mean import Sum, add_up
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Update, Values

Aggregators = Mapping[str, Aggregator[Any]]
"""Part -> its aggregator; that of ``update`` has ``buffers`` too."""
States = dict[str, Any]
"""Part -> its aggregator's state."""


def init(aggregators: Aggregators, size: int) -> States:
    """Return the states without reports, for a model of ``size`` elements."""
    return {part: aggregator.init(size) for part, aggregator in aggregators.items()}


def check(aggregators: Aggregators, largest: Mapping[str, float], weight: int) -> None:
    """Raise ProtocolError (not-finite, out-of-range) if a report must be refused. ``largest``: part -> the largest
    magnitude of its elements. ``weight``: of the update."""
    for part, aggregator in aggregators.items():
        aggregator.check(largest[part], weight if part == UPDATE else 1)


def add(
    aggregators: Aggregators,
    states: States,
    parts: Mapping[str, Update],
    weight: int,
    largest: Mapping[str, float],
    factor: float,
    values: Values = NO_VALUES,
) -> None:
    """Add a report that has passed ``check`` to the states, in place. ``factor``, ``values``: of the update beside its
    weight, as in ``Aggregator.add``."""
    for part, aggregator in aggregators.items():
        if part == UPDATE:
            aggregator.add(states[part], parts[part], weight, largest[part], factor, values)
        else:
            aggregator.add(states[part], parts[part], 1, largest[part], 1.0, NO_VALUES)


def to_tensors(aggregators: Aggregators, states: States) -> dict[str, NDArray[np.generic]]:
    """Return the states as flat tensors by name, which may share their memory."""
    return {
        _prefix(part) + name: tensor
        for part, aggregator in aggregators.items()
        for name, tensor in aggregator.to_tensors(states[part]).items()
    }


def from_tensors(aggregators: Aggregators, tensors: Mapping[str, NDArray[np.generic]]) -> States:
    """Undo ``to_tensors``, in new memory. Raises ValueError if the tensors are of no such states."""
    found = {}
    for part, aggregator in aggregators.items():
        others = tuple(_prefix(other) for other in aggregators if other not in (part, UPDATE))
        prefix = _prefix(part)
        mine = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if (name.startswith(prefix) if prefix else not name.startswith(others))
        }
        found[part] = aggregator.from_tensors(mine)
    return found


def _prefix(part: str) -> str:
    return "" if part == UPDATE else f"{part}."


def next_control(control: Vector, total: Sum, devices: int) -> Vector:
    """Return SCAFFOLD's next server control variate: c + sum(c_k' - c_k) / N, float32, shape (P,).

    Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (2020), arXiv 1910.06378,
    Algorithm 1, line 17. ``total`` has the round's changes of c_k, each with a weight of 1; ``devices`` is N."""
    after: Vector = (control + add_up(total) / devices).astype(np.float32)
    return after
