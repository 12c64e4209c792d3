"""The robust aggregators by name, and what a plan may set of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.robust import coordinatewise, distances
from fleetlearn_coordinator.aggregation.robust.kept_updates import KeptUpdates

Floats = NDArray[np.float64]


class Bounds(NamedTuple):
    """What a plan says of hostile devices."""

    hostile: float = 0.2
    """The largest share of the devices that may send anything, below 1/2."""
    radius: float | None = None
    """Of centred clipping: the longest difference from the centre that counts whole, as an L2 norm.
    None: the median of these differences."""

    def count(self, updates: int) -> int:
        """Return f, how many of the updates may be hostile ones."""
        return int(self.hostile * updates + 1e-9)  # 0.3 * 10 is 3


DEFAULTS = Bounds()


class RobustRule(NamedTuple):
    """A robust aggregator."""

    result: Callable[[KeptUpdates, Bounds], Floats]
    """The round's updates, in an order of their own -> what the server optimizer moves the model
    by, shape (P,)."""
    least: Callable[[int], int]
    """f -> how many updates there must be at least."""
    takes: str | None
    """The field of ``Bounds`` that it uses."""


def _median(kept: KeptUpdates, bounds: Bounds) -> Floats:
    return coordinatewise.by_columns(kept, coordinatewise.median)


def _trimmed_mean(kept: KeptUpdates, bounds: Bounds) -> Floats:
    return coordinatewise.by_columns(
        kept, partial(coordinatewise.trimmed_mean, cut=bounds.count(len(kept)))
    )


def _krum(kept: KeptUpdates, bounds: Bounds) -> Floats:
    return _nearest(kept, bounds.count(len(kept)), 1)


def _multi_krum(kept: KeptUpdates, bounds: Bounds) -> Floats:
    hostile = bounds.count(len(kept))
    return _nearest(kept, hostile, max(1, len(kept) - hostile - 2))


def _nearest(kept: KeptUpdates, hostile: int, count: int) -> Floats:
    found = distances.squared_distances(distances.inner_products(kept))
    return distances.combine(kept, distances.multi_krum(found, hostile, count))


def _bulyan(kept: KeptUpdates, bounds: Bounds) -> Floats:
    hostile = bounds.count(len(kept))
    found = distances.squared_distances(distances.inner_products(kept))
    chosen = distances.bulyan_selection(found, hostile)
    selected = kept.select(chosen)
    count = max(1, len(chosen) - 2 * hostile)
    return coordinatewise.by_columns(
        selected, partial(coordinatewise.mean_around_median, count=count)
    )


def _geometric_median(kept: KeptUpdates, bounds: Bounds) -> Floats:
    return distances.combine(
        kept, distances.geometric_median(distances.inner_products(kept), kept.weights())
    )


def _centred_clipping(kept: KeptUpdates, bounds: Bounds) -> Floats:
    return distances.combine(
        kept, distances.centred_clipping(distances.inner_products(kept), bounds.radius)
    )


RULES: Mapping[str, RobustRule] = {
    "median": RobustRule(_median, lambda hostile: 1, None),
    "trimmed-mean": RobustRule(_trimmed_mean, lambda hostile: 2 * hostile + 1, "hostile"),
    "krum": RobustRule(_krum, lambda hostile: 2 * hostile + 3, "hostile"),
    "multi-krum": RobustRule(_multi_krum, lambda hostile: 2 * hostile + 3, "hostile"),
    "bulyan": RobustRule(_bulyan, lambda hostile: 4 * hostile + 3, "hostile"),
    "geometric-median": RobustRule(_geometric_median, lambda hostile: 1, None),
    "centred-clipping": RobustRule(_centred_clipping, lambda hostile: 1, "radius"),
}


def least_updates(name: str, bounds: Bounds, goal: int) -> int:
    """Return from how many updates on the rule works, for each number of them up to ``goal``. More
    than ``goal``: not for the goal itself."""
    least, count = RULES[name].least, goal
    while count and count >= least(bounds.count(count)):
        count -= 1
    return count + 1
