"""A simulated fleet: the coordinator's own engine and aggregation, real training, and devices that
come and go."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlearn_simulator.data.own_source import DeviceData
    from fleetlearn_simulator.errors import SimulatorError
    from fleetlearn_simulator.population.availability_laws import AvailabilityLaw, in_slots
    from fleetlearn_simulator.population.devices import Devices
    from fleetlearn_simulator.population.failure_laws import VanishingTasks
    from fleetlearn_simulator.results.measured import load_results
    from fleetlearn_simulator.run import Options, Outcome, simulate
    from fleetlearn_simulator.scenario.own_algorithms import register
    from fleetlearn_simulator.scenario.scenario import Scenario

__all__ = [
    "AvailabilityLaw",
    "DeviceData",
    "Devices",
    "Options",
    "Outcome",
    "Scenario",
    "SimulatorError",
    "VanishingTasks",
    "in_slots",
    "load_results",
    "register",
    "simulate",
]

_MODULES = {
    "data.own_source": ("DeviceData",),
    "errors": ("SimulatorError",),
    "population.availability_laws": ("AvailabilityLaw", "in_slots"),
    "population.devices": ("Devices",),
    "population.failure_laws": ("VanishingTasks",),
    "results.measured": ("load_results",),
    "scenario.own_algorithms": ("register",),
    "run": ("Options", "Outcome", "simulate"),
    "scenario.scenario": ("Scenario",),
}


def __getattr__(name: str) -> Any:
    # Late, so that the command can say which extra is missing before any of this asks for it.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)  # for completion: what was not asked for yet is not in the module
