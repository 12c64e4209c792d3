"""Which devices are connected to the coordinator, and which come next."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.fleet.events import EventQueue
from fleetlearn_simulator.population.availability import online, until
from fleetlearn_simulator.scenario.scenario import Scenario

MIN_REFILL_SECONDS, MAX_REFILL_SECONDS = 60.0, 3600.0
"""The shortest and the longest time until other devices are looked for, while not all connections
are taken. Between them it is a tenth of the time since a round ended."""
MAX_DRAWS_PER_ARRIVAL = 64
"""Devices that are drawn for each one that connects, at most. If few are online, some connections
stay free."""


class Connections:
    """The devices that are connected. At most ``population.connected`` are; the others are told to
    come back later.

    With pace steering (returns.py) it is the engine that decides, and nobody is drawn here."""

    def __init__(self, scenario: Scenario, events: EventQueue) -> None:
        self.scenario, self.events = scenario, events
        self.connected: dict[int, float] = {}
        """Device -> when it goes offline."""
        self.away: dict[int, float] = {}
        """Device -> when it connects again after the coordinator's restart."""
        self.without_examples: set[int] = set()
        """Devices that have no examples, of those that were drawn. They never connect."""
        self.arrivals = 0
        """Draws of devices so far."""
        self.refill_expected = True
        """Whether the event ``fill`` is in the queue."""

    def expect_refill(self, last_end: float) -> None:
        """Look for other devices later, if there is room. ``last_end``: when a round ended."""
        able = self.scenario.population.size - len(self.without_examples)
        most, now = min(self.scenario.population.connected, able), self.events.now
        if not self.refill_expected and len(self.connected) < most:
            self.refill_expected = True
            wait = min(max(MIN_REFILL_SECONDS, (now - last_end) / 10), MAX_REFILL_SECONDS)
            self.events.expect(now + wait, "fill")

    def arriving(self, leases: Container[str]) -> list[tuple[int, float]]:
        """Return devices that are online and not connected, as many as there is room for, in a
        random order, with the times when they go offline. ``leases``: names of the devices that
        have a task."""
        room = self.scenario.population.connected - len(self.connected)
        if room <= 0:
            return []
        size, seed = self.scenario.population.size, self.scenario.seed
        if size <= 2 * self.scenario.population.connected:
            there = self._may_connect(np.arange(size), leases)
            luck = keyed_random.uniform(seed, "arrival", np.array(there, np.int64), self.arrivals)
            self.arrivals += 1
            chosen = [there[row] for row in np.argsort(luck, kind="stable")[:room].tolist()]
        else:
            found: dict[int, None] = {}
            count = more = 0
            while len(found) < room and more * MAX_DRAWS_PER_ARRIVAL >= count:
                count, before = max(64, 2 * (room - len(found))), len(found)
                drawn = keyed_random.uniform(seed, "arrival", self.arrivals + np.arange(count))
                self.arrivals += count
                found |= dict.fromkeys(self._may_connect((drawn * size).astype(np.int64), leases))
                more = len(found) - before
            chosen = [*found][:room]
        ends = until(self.scenario, np.array(chosen, np.int64), self.events.now)
        return [(device, float(end)) for device, end in zip(chosen, ends, strict=True)]

    def _may_connect(self, devices: NDArray[np.int64], leases: Container[str]) -> list[int]:
        there: list[int] = devices[online(self.scenario, devices, self.events.now)].tolist()
        # A device that vanished stays away until the engine gives its task up: it would get the
        # same task again.
        there = [device for device in there if device not in self.without_examples]
        return [
            device
            for device in there
            if device not in self.connected and name_of(device) not in leases
        ]
