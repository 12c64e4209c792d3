"""When devices check in that are away, with pace steering.

A device that is told to come back does so after 0.5 to 1.5 times the time that it was told, as the
device SDK does. If it is offline then, it comes soon after it is online again. All devices check in
for the first time within an hour: what is done to a fleet that is switched on at one moment is a
matter of the listener, not of pace steering.

The times are one column. Only the devices of the window that has begun are events in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.fleet.events import EventQueue
from fleetlearn_simulator.population.availability import next_online, online, until
from fleetlearn_simulator.population.traits import Ids
from fleetlearn_simulator.scenario.scenario import Scenario

WINDOW = 60.0
"""Seconds of virtual time whose check-ins are found together."""
FIRST_CHECK_INS = 3600.0
"""Seconds within which all devices check in for the first time."""
BACK_OFF = 30.0
"""A device that lost its connection, or was offline, connects within this many seconds of when it
can."""
BLOCK = 4096
"""Random numbers that are drawn together."""


class Returns:
    """The devices that are away, and when each checks in next."""

    def __init__(self, scenario: Scenario, events: EventQueue) -> None:
        self.scenario, self.events = scenario, events
        ids = np.arange(scenario.population.size)
        self.due = FIRST_CHECK_INS * keyed_random.uniform(scenario.seed, "first check-in", ids)
        """Seconds, float64 of shape (devices,). Infinite: the device is connected."""
        self.checked_in: Callable[[int], None] = lambda device: None
        """Called with each device that checks in."""
        self._window_end = 0.0
        self._ends: dict[int, float] = {}
        """Device that is to check in in this window -> when it goes offline."""
        self._draws = 0
        self._luck: list[float] = []

    def begin_window(self, connected: Mapping[int, float]) -> None:
        """Expect what happens in the window that begins now. ``connected``: device -> when it goes
        offline."""
        now, scenario = self.events.now, self.scenario
        self._window_end = end = now + WINDOW
        self.events.expect(end, "window")
        for device, leaves in connected.items():
            if leaves < end:
                self.events.expect(leaves, "leave", device)
        ids: Ids = np.flatnonzero(self.due < end)
        self.due[ids] = np.maximum(self.due[ids], now)
        here, leave = online(scenario, ids, now), until(scenario, ids, now)
        come = here & (leave > self.due[ids])
        leaving, offline = ids[here & ~come], ids[~here]
        self.due[leaving] = np.maximum(
            end, next_online(scenario, leaving, end) + BACK_OFF * self._random(len(leaving))
        )
        due = np.maximum(
            self.due[offline],
            next_online(scenario, offline, now) + BACK_OFF * self._random(len(offline)),
        )
        # A window late rather than at its end: else all that come online in a window come in half
        # of the next one.
        self.due[offline] = np.where(due < end, due + WINDOW, due)
        ids, leave = ids[come], leave[come]
        order = np.argsort(self.due[ids], kind="stable")
        self._ends = dict(zip(ids.tolist(), leave.tolist(), strict=True))
        for device in ids[order].tolist():
            self.events.expect(float(self.due[device]), "return", device)

    def snapshot(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return who comes when, as tensors and plain values: for ``take_up``."""
        tensors = {
            "due": self.due,
            "devices": np.array([*self._ends], np.int64),
            "ends": np.array([*self._ends.values()], np.float64),
            "luck": np.array(self._luck, np.float64),
        }
        return tensors, {"window_end": self._window_end, "draws": self._draws}

    def take_up(self, tensors: Mapping[str, NDArray[Any]], state: Mapping[str, Any]) -> None:
        """Go on from what another object's ``snapshot`` returned."""
        self.due, self._luck = tensors["due"], tensors["luck"].tolist()
        self._ends = dict(zip(tensors["devices"].tolist(), tensors["ends"].tolist(), strict=True))
        self._window_end, self._draws = state["window_end"], state["draws"]

    def is_due(self, device: int, time: float) -> bool:
        """Return whether the device checks in at this time, as it was expected."""
        return bool(self.due[device] == time)

    def postpone(self, device: int, seconds: float) -> None:
        """The device cannot check in now, and tries again after ``seconds``."""
        self.send_away(device, seconds, self._ends.pop(device))

    def arrive(self, device: int) -> float:
        """The device checks in. Returns when it goes offline."""
        self.due[device] = inf
        self.checked_in(device)
        leaves = self._ends.pop(device)
        if leaves < self._window_end:
            self.events.expect(leaves, "leave", device)
        return leaves

    def leave(self, device: int) -> None:
        """The device has lost its connection. It comes back when it can."""
        # the next window tells whether it is online
        self.due[device] = self._window_end + BACK_OFF * self._draw()

    def send_away(self, device: int, after: float, leaves: float) -> None:
        """The device, which is online until ``leaves``, is told to come back after ``after``
        seconds."""
        self.due[device] = due = self.events.now + (0.5 + self._draw()) * after
        if due >= self._window_end:
            return
        if due < leaves:
            self._ends[device] = leaves
            self.events.expect(due, "return", device)
        else:
            self.leave(device)

    def _random(self, count: int) -> keyed_random.Floats:
        """Return the next uniform numbers."""
        self._draws += count
        return keyed_random.uniform(self.scenario.seed, "return", self._draws - np.arange(count))

    def _draw(self) -> float:
        """Return the next uniform number, out of a block: to compute each by itself takes ten times
        as long."""
        if not self._luck:
            self._luck = self._random(BLOCK).tolist()
        return self._luck.pop()
