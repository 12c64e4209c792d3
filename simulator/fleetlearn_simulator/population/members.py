"""Which member of a plan's family each simulated device trains: the first that fits what its tier
says of it, by the coordinator's own rule."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator.population.traits import Floats, Ids, Ints, enough_memory, tiers_of
from fleetlearn_simulator.scenario.family_rules import (
    NO_MEMBER,
    members_of_tiers,
    regions_of_members,
)
from fleetlearn_simulator.scenario.scenario import Scenario

TOGETHER = 2**20
"""Devices whose members are found at a time, where all of a population's are."""


def members_of(scenario: Scenario, ids: Ids) -> Ints:
    """Return the number of the member that each device trains, in the plan's order, or
    ``NO_MEMBER``. Without [family] it is 0."""
    if not scenario.plan.family:
        return np.zeros(len(ids), np.int64)
    places = np.zeros(len(ids), np.int64)
    for place, region in enumerate(regions_of_members(scenario), 1):
        places[ids % scenario.failures.regions == region] = place
    table = np.array(members_of_tiers(scenario), np.int64)
    found: Ints = table[tiers_of(scenario, ids), places]
    return found


def may_train(scenario: Scenario, ids: Ids) -> NDArray[np.bool_]:
    """Return whether each device has the memory that training takes, and a model that fits it."""
    enough = enough_memory(scenario, ids)
    if scenario.plan.family:
        enough = enough & (members_of(scenario, ids) != NO_MEMBER)
    return enough


def count_members(scenario: Scenario) -> tuple[dict[str, int], int]:
    """Return how many devices of the population train each member of the plan's family, and how
    many no member fits."""
    names, size = [*scenario.plan.family], scenario.population.size
    counts = np.zeros(len(names) + 1, np.int64)
    for start in range(0, size, TOGETHER):
        ids = np.arange(start, min(start + TOGETHER, size))
        counts += np.bincount(members_of(scenario, ids) - NO_MEMBER, minlength=len(counts))
    none, *each = counts.tolist()
    return dict(zip(names, each, strict=True)), none


def step_seconds_of(scenario: Scenario, ids: Ids) -> float | Floats:
    """Return the seconds of a step on a device of speed 1: one number, or each device's. They must
    be measured."""
    seconds = scenario.compute.step_seconds
    if not isinstance(seconds, dict):
        return float(seconds)
    by_member = np.array([seconds[name] for name in scenario.plan.family])
    found: Floats = by_member[members_of(scenario, ids)]
    return found
