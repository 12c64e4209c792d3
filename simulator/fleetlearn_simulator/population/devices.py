"""Some simulated devices, as own laws see them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.keyed_random import Key
from fleetlearn_simulator.population.traits import Floats, Ids, Ints, offsets, tiers_of
from fleetlearn_simulator.scenario.scenario import Scenario


class Devices:
    """n devices. What is known of a device follows from its number and the scenario alone."""

    def __init__(self, scenario: Scenario, ids: Ids) -> None:
        self.scenario, self.ids = scenario, ids
        """The devices' numbers: int64, shape (n,)."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def seed(self) -> int:
        """The scenario's."""
        return self.scenario.seed

    @cached_property
    def tier(self) -> Ints:
        """The number of each device's tier in ``tiers``: int64, shape (n,)."""
        return tiers_of(self.scenario, self.ids)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the scenario's tiers."""
        return tuple(self.scenario.tiers)

    @cached_property
    def offset(self) -> Floats:
        """Seconds by which each device's clock is ahead of the scenario's, which begins at
        midnight: float64, shape (n,)."""
        return offsets(self.scenario, self.ids)

    def select(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Devices:
        """Return the devices in these rows."""
        return Devices(self.scenario, self.ids[rows])

    def uniform(self, purpose: str, *keys: Key) -> Floats:
        """Return a number in [0, 1) for each device.

        It follows from the seed, the purpose, the device's number and the keys alone, so that it is
        the same at each call. ``keys``: integers that say which number is meant, such as that of a
        slot: each is one for all, or int64 of shape (n,), or of shape (k, 1) or (k, n) for k
        numbers of each device. The result then has the shape (k, n).
        """
        return keyed_random.uniform(self.seed, f"law {purpose}", self.ids, *keys)

    def normal(self, purpose: str, *keys: Key) -> Floats:
        """Return standard normal numbers, as ``uniform`` returns uniform ones."""
        return keyed_random.normal(self.seed, f"law {purpose}", self.ids, *keys)
