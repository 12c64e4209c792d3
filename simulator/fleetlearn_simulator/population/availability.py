"""When a device may take part: a law's answer (availability_laws.py), the outages of its region,
and whether it could train at all."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.population.availability_laws import AvailabilityLaw, Flags, our_law
from fleetlearn_simulator.population.devices import Devices
from fleetlearn_simulator.population.members import may_train
from fleetlearn_simulator.population.traits import Floats, Ids
from fleetlearn_simulator.scenario.own_algorithms import AVAILABILITY_LAW, call_own, own
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.scenario.sections import AVAILABILITY

KEY = "availability.kind"
"""What names the law."""


def availability_law(scenario: Scenario) -> AvailabilityLaw:
    """Return the scenario's law. Raises SimulatorError."""
    rule = scenario.availability
    if rule.kind in AVAILABILITY:
        return our_law(rule)
    law = own(AVAILABILITY_LAW, rule.kind, rule.parameters, KEY)
    if not isinstance(law, AvailabilityLaw):
        raise SimulatorError(
            f'{KEY} = "{rule.kind}" returned a {type(law).__name__}; expected an object with the '
            "functions online, until and next_online, as fleetlearn_simulator.in_slots returns one"
        )
    return CheckedLaw(rule.kind, law)


class CheckedLaw(AvailabilityLaw):
    """An own law, whose answers are checked."""

    def __init__(self, name: str, law: AvailabilityLaw) -> None:
        self.name, self.law = name, law

    def online(self, devices: Devices, t: float) -> Flags:
        return self._called("online", self.law.online, devices, t, "b")

    def until(self, devices: Devices, t: float) -> Floats:
        return self._checked_times("until", self.law.until, devices, t)

    def next_online(self, devices: Devices, t: float) -> Floats:
        return self._checked_times("next_online", self.law.next_online, devices, t)

    def _checked_times(
        self, what: str, law: Callable[[Devices, float], Floats], devices: Devices, t: float
    ) -> Floats:
        found = self._called(what, law, devices, t, "f")
        if not (found >= t).all():  # NaN is not, either
            row = int(np.flatnonzero(~(found >= t))[0])
            raise SimulatorError(
                f'{KEY} = "{self.name}": {what}() said {found[row]} for device '
                f"{devices.ids[row]} at {t} s; expected a time from then on, or infinity"
            )
        return found

    def _called(
        self,
        what: str,
        law: Callable[[Devices, float], NDArray[Any]],
        devices: Devices,
        t: float,
        kind: str,
    ) -> NDArray[Any]:
        found = call_own(f'{KEY} = "{self.name}": {what}()', lambda: np.asarray(law(devices, t)))
        count = len(devices)
        if found.shape != (count,) or found.dtype.kind != kind:
            words = {"b": "bool", "f": "float64"}[kind]
            raise SimulatorError(
                f'{KEY} = "{self.name}": {what}() returned {found.dtype} of shape {found.shape} '
                f"for {count} devices; expected {words} of shape ({count},)"
            )
        return found


def online(scenario: Scenario, ids: Ids, t: float) -> Flags:
    """Return whether each device may get a task at the time ``t``, in seconds: whether it is
    online, its region has network, it has the memory to train, and a model of the plan fits it."""
    law = availability_law(scenario)
    found = law.online(Devices(scenario, ids), t) & may_train(scenario, ids)
    for outage in scenario.failures.outages:
        if outage.begin <= t < outage.end:
            found &= ids % scenario.failures.regions != outage.region
    return found


def until(scenario: Scenario, ids: Ids, t: float) -> Floats:
    """Return when each device goes offline, in seconds. Outages of its region are not considered.

    The result is ``t`` for a device that is offline, and infinity for a device that never goes
    offline.
    """
    law, devices = availability_law(scenario), Devices(scenario, ids)
    there = law.online(devices, t)
    end = np.full(len(ids), t)
    end[there] = law.until(devices.select(there), t)
    return end


def next_online(scenario: Scenario, ids: Ids, t: float) -> Floats:
    """Return the first time from ``t`` on at which each device may get a task (see ``online``), in
    seconds. Infinite: never. After an outage of its region a device may be offline again."""
    law, devices = availability_law(scenario), Devices(scenario, ids)
    begin = np.full(len(ids), t)
    away = ~law.online(devices, t)
    begin[away] = law.next_online(devices.select(away), t)
    for row in sorted(scenario.failures.outages, key=lambda row: row.begin):
        inside = (
            (ids % scenario.failures.regions == row.region)
            & (row.begin <= begin)
            & (begin < row.end)
        )
        begin[inside] = row.end
    begin[~may_train(scenario, ids)] = inf
    return begin
