"""A simulated fleet: the coordinator's own engine and aggregation, real training, and devices that come and go."""

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.run import Options, Outcome, simulate
from fleetlearn_simulator.scenario.scenario import Scenario

__all__ = ["Options", "Outcome", "Scenario", "SimulatorError", "simulate"]
