"""Laws of failure: when devices vanish while they have a task. Ours, the hazards of [failures], and
what an own one has to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.population.devices import Devices
from fleetlearn_simulator.population.traits import Floats, Ints
from fleetlearn_simulator.scenario.own_algorithms import FAILURE_LAW, call_own, own
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.scenario.sections import HAZARDS, Weibull

PHASES = ("download", "train", "upload")
KEY = "failures.law"
"""What names the law."""


class VanishingTasks(NamedTuple):
    """n tasks that were just given, of which some will fail as their devices vanish."""

    devices: Devices
    """Each task's device."""
    turn: Ints
    """The number of each task's round, or in an exchange the number of the turn in which the device
    is asked: int64, shape (n,). With ``devices`` and ``kind`` it says which task is meant: it is a
    key of the random numbers that a law draws beside ``luck``."""
    kind: str
    """``train``, or the kind of an exchange, such as ``evaluation``."""
    now: float
    """When the tasks are given, in seconds of the scenario."""
    seconds: Floats
    """How long each phase takes where the device stays: float64, shape (3, n), the rows those of
    ``PHASES``. Waiting for a place to transfer is not in it. Where time is short, training ends
    earlier."""
    luck: Floats
    """A random number in [0, 1) for each phase and task: float64, shape (3, n). It follows from the
    seed, the device's number and the turn."""


FailureLaw: TypeAlias = Callable[[VanishingTasks], Floats]
"""Returns how many seconds after each phase's beginning the device vanishes: float64, shape (3, n),
the rows those of ``PHASES``. Where this is not less than the phase's length, or infinite, the
device stays. What it says of a task follows from the task's column alone."""


class Hazards(NamedTuple):
    """Our law, ``hazards``. In each phase a device is still there after t seconds with probability
    exp(-(rate * t)^shape)."""

    rates: Sequence[Sequence[float]]
    """Per second: a row for each phase, with each tier's."""
    shapes: Sequence[Sequence[float]]

    def __call__(self, tasks: VanishingTasks) -> Floats:
        rows = self.by_phase(tasks.devices.tier, tasks.luck)
        return np.array([np.full(len(tasks.devices), inf) if row is None else row for row in rows])

    @property
    def any(self) -> bool:
        """Whether a device can vanish at all."""
        return any(map(any, self.rates))

    def by_phase(self, tier: Ints, luck: Floats) -> list[Floats | None]:
        """Return what a law returns, row by row. None: nobody vanishes in this phase."""
        return [
            _hazard(np.array(rates)[tier], np.array(shapes)[tier], own) if any(rates) else None
            for rates, shapes, own in zip(self.rates, self.shapes, luck, strict=True)
        ]


def hazards_of(scenario: Scenario) -> Hazards:
    """Return the hazards of a scenario's [failures] and of its tiers."""
    rows = [by_tier(scenario, phase) for phase in PHASES]
    return Hazards(
        [[each.rate if isinstance(each, Weibull) else float(each) for each in row] for row in rows],
        [[each.shape if isinstance(each, Weibull) else 1.0 for each in row] for row in rows],
    )


def own_law(scenario: Scenario) -> FailureLaw | None:
    """Return the law that the scenario names, or None where it is ours. Raises SimulatorError."""
    failures = scenario.failures
    if failures.law == HAZARDS:
        return None
    law: FailureLaw = own(FAILURE_LAW, failures.law, failures.parameters, KEY)
    return law


def vanishing(law: FailureLaw, name: str, tasks: VanishingTasks) -> list[Floats | None]:
    """Return what an own law says of these tasks, row by row. Raises SimulatorError where it is not
    what a law returns."""
    found = call_own(f'{KEY} = "{name}"', lambda: np.asarray(law(tasks)))
    count = len(tasks.devices)
    if found.shape != (len(PHASES), count) or found.dtype.kind != "f":
        raise SimulatorError(
            f'{KEY} = "{name}" returned {found.dtype} of shape {found.shape} for {count} tasks; '
            f"expected float64 of shape ({len(PHASES)}, {count}): the seconds after which each "
            f"device vanishes while it is in {', '.join(PHASES)}, infinite where it stays"
        )
    if not (found >= 0).all():  # NaN is not, either
        phase, row = np.argwhere(~(found >= 0))[0].tolist()
        raise SimulatorError(
            f'{KEY} = "{name}" said {found[phase, row]} s for device {tasks.devices.ids[row]} in '
            f"its {PHASES[phase]}; expected at least 0, or infinity"
        )
    return [*found]


def by_tier(scenario: Scenario, key: str) -> list[Any]:
    """Return each tier's value of a key: its own, or that in [failures]."""
    usual = getattr(scenario.failures, key)
    values = [getattr(tier.failures, key) for tier in scenario.tiers.values()]
    return [usual if own is None else own for own in values]


def _hazard(rate: Floats, shape: Floats, luck: Floats) -> Floats:
    """Return the seconds in a phase until the device vanishes. It is still there with probability
    exp(-(rate * t)^shape)."""
    scale = np.where(rate > 0, 1 / np.where(rate > 0, rate, 1.0), inf)
    # The smallest number drawn is 0, and 0 times infinity would be NaN.
    exponential = -np.log1p(-np.maximum(luck, 2.0**-54))
    return np.asarray(exponential ** (1 / shape) * scale)
