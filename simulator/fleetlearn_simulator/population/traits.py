"""What a device is for the whole scenario. It is computed from the device's number when it is
needed, and not kept."""

from __future__ import annotations

from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.scenario.scenario import Scenario

Ids: TypeAlias = NDArray[np.int64]
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


class Traits(NamedTuple):
    """The traits of n devices: arrays of shape (n,)."""

    tier: Ints
    """Index in ``scenario.tiers``."""
    speed: Floats
    """A step of training takes ``compute.step_seconds`` / speed."""
    download: Floats
    """Bytes per second."""
    upload: Floats
    """Bytes per second."""
    latency: Floats
    """Seconds for a message and its answer."""
    memory: Floats
    """MiB that training may use. Infinite if the tier does not say."""
    offset: Floats
    """Seconds by which its clock is ahead of the scenario's: its time zone, and its clock's
    error."""


def traits(scenario: Scenario, ids: Ids) -> Traits:
    """Return the traits of these devices."""
    tiers = list(scenario.tiers.values())
    tier = tiers_of(scenario, ids)
    table = np.array(
        [
            (
                tier.speed,
                tier.download,
                tier.upload,
                tier.latency,
                inf if tier.memory is None else tier.memory,
                tier.spread,
            )
            for tier in tiers
        ]
    )
    values = table.T[:, tier]
    if table[:, -1].any():
        values[:3] *= np.exp(
            values[-1] * keyed_random.normal(scenario.seed, "traits", ids, keyed_random.COLUMN[:3])
        )
    speed, download, upload, latency, memory, _ = values
    return Traits(tier, speed, download, upload, latency, memory, offsets(scenario, ids))


def tiers_of(scenario: Scenario, ids: Ids) -> Ints:
    """Return the index of each device's tier in ``scenario.tiers``."""
    return _pick(scenario, "tier", ids, [tier.share for tier in scenario.tiers.values()])


def enough_memory(scenario: Scenario, ids: Ids) -> NDArray[np.bool_]:
    """Return whether each device has the memory that training takes."""
    enough = np.array(
        [
            tier.memory is None or tier.memory >= scenario.compute.memory
            for tier in scenario.tiers.values()
        ]
    )
    return np.ones(len(ids), np.bool_) if enough.all() else enough[tiers_of(scenario, ids)]


def offsets(scenario: Scenario, ids: Ids) -> Floats:
    """Return the seconds by which each device's clock is ahead of the scenario's."""
    zones = scenario.availability.zones or ()
    seconds_ahead = np.zeros(len(ids))
    if zones:
        seconds = 3600 * np.array([zone.hours for zone in zones])
        seconds_ahead += seconds[_pick(scenario, "zone", ids, [zone.share for zone in zones])]
    if scenario.failures.clock_skew:
        seconds_ahead += scenario.failures.clock_skew * keyed_random.normal(
            scenario.seed, "skew", ids
        )
    return seconds_ahead


def _pick(scenario: Scenario, purpose: str, ids: Ids, shares: list[float]) -> Ints:
    """Draw an index for each device, by shares."""
    if len(shares) == 1:
        return np.zeros(len(ids), np.int64)
    ends = np.cumsum(shares)
    choice = np.searchsorted(
        ends / ends[-1], keyed_random.uniform(scenario.seed, purpose, ids), side="right"
    )
    return np.minimum(choice, len(shares) - 1, dtype=np.int64)
