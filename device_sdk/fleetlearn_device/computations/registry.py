"""The kinds of computations that a device knows, and the sum over the rows of all batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from fleetlearn_protocol.computations.fixed_point import added
from fleetlearn_protocol.computations.function_settings import FunctionSums
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.settings import ComputationSettings, kind_of
from fleetlearn_protocol.vector import Vector

from fleetlearn_device.computations.boosted_components import compute as boosted_components
from fleetlearn_device.computations.boosted_trees import compute as boosted_trees
from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.computations.functions import sum_up_function
from fleetlearn_device.computations.statistics import compute as statistics
from fleetlearn_device.own_code import NO_FUNCTIONS, OwnFunctions

BATCH = 16384
"""Rows that are computed together: bounds memory."""

REGISTRY: Mapping[str, Callable[[Vector, Columns, Any], Sums]] = {
    "statistics": statistics,
    "boosted-trees": boosted_trees,
    "boosted-components": boosted_components,
}
"""Kind -> a function of the state, float32, shape (P,), of the columns of some rows, and of the
settings, which returns their sums, int64, shape (S,). The sums of rows that are computed together
must be what their sums alone add up to. Raises ValueError where they are too large."""


def sum_up(
    state: Vector,
    batches: Iterable[Columns],
    settings: ComputationSettings,
    functions: OwnFunctions = NO_FUNCTIONS,
) -> Sums:
    """Return the sums over the rows of all batches, int64, shape (S,). ``functions``: those that
    the device's owner allows. Raises ValueError where a sum is beyond 2^62, or the state is not
    this computation's, and FunctionError where an own function does not what it should."""
    if isinstance(settings, FunctionSums):
        return sum_up_function(state, batches, settings, functions)
    kind = kind_of(settings)
    total: Sums = np.zeros(KINDS[kind].sums(settings).size, np.int64)
    for columns in batches:
        total = added(total, REGISTRY[kind](state, columns, settings))
    return total
