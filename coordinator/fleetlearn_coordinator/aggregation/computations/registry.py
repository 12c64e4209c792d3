"""The kinds of computations: how a round's total makes the next state, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.computations import (
    boosted_components,
    boosted_trees,
    statistics,
)


class Computation(NamedTuple):
    """One kind, on the coordinator's side. A state is float32, shape (P,); the last argument of
    each function is the settings that the bundle has of it."""

    advance: Callable[[Vector, Sums, int, Any], Vector]
    """State, total of the devices' sums (int64, shape (S,)), number of devices that it is of -> the
    next state, in new memory. Raises ValueError where the total cannot be one."""
    is_done: Callable[[Vector, Any], bool]
    """Whether the run is over with this state."""
    result: Callable[[Vector, Any], dict[str, Any]]
    """What is known, as JSON has it."""
    progress: Callable[[Vector, Any], str]
    """Where it stands, in one line."""


REGISTRY: Mapping[str, Computation] = {
    "statistics": Computation(
        statistics.advance, statistics.is_done, statistics.result, statistics.progress
    ),
    "boosted-trees": Computation(
        boosted_trees.advance, boosted_trees.is_done, boosted_trees.result, boosted_trees.progress
    ),
    "boosted-components": Computation(
        boosted_components.advance,
        boosted_components.is_done,
        boosted_components.result,
        boosted_components.progress,
    ),
}
"""By the kind's name."""
