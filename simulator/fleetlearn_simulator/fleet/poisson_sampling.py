"""Poisson sampling: in each round each device of the population takes part by a coin of its own,
independently, with the probability goal / population.

Only a simulation can have that: real devices check in when they like. Here the devices that were
drawn are connected when the round begins, and no others; the engine is told to give all of them a
task, and to end the round with their reports.
"""

from __future__ import annotations

import numpy as np
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import RoundSize

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.poisson_rules import is_poisson
from fleetlearn_simulator.scenario.scenario import Scenario


class PoissonSampling:
    """Draws who takes part in each round."""

    def __init__(self, scenario: Scenario) -> None:
        self._seed, self._size = scenario.seed, scenario.population.size
        self._rate = scenario.plan.round.goal / scenario.population.size
        self.drawn = 0
        """How many devices were drawn for the newest round."""

    def draw(self, engine: Engine) -> list[int]:
        """Return the devices of the next round to open, and let that round be theirs."""
        # The seed is the secret here: no other number of the run is drawn for this purpose.
        devices, redrawn = np.arange(self._size), 0
        chosen = list[int]()
        while not chosen:  # less than e^-50 of the rounds have none (``LEAST_GOAL``)
            luck = keyed_random.uniform(
                self._seed, "poisson sampling", devices, engine.round + 1, redrawn
            )
            chosen = np.flatnonzero(luck < self._rate).tolist()
            redrawn += 1
        self.drawn = len(chosen)
        engine.resize(RoundSize(self.drawn, self.drawn, self.drawn))
        return chosen

    def check(self, number: int, reports: int) -> None:
        """Raise SimulatorError unless all devices that were drawn for a round reported."""
        if reports != self.drawn:
            raise SimulatorError(
                f"round {number} has {reports} reports of the {self.drawn} devices that were "
                'drawn for it: with privacy.sampling = "poisson" each must report. A device was '
                "too slow (round.deadline, local.time_budget) or its training diverged"
            )


def sampling_of(scenario: Scenario) -> PoissonSampling | None:
    """Return the scenario's Poisson sampling, if its plan asks for it."""
    return PoissonSampling(scenario) if is_poisson(scenario) else None
