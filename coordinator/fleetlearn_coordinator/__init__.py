"""The coordinator: combines what devices send, and expects them to vanish at any moment."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlearn_coordinator.aggregation.aggregators import Aggregator
    from fleetlearn_coordinator.aggregation.optimizers import Optimizer
    from fleetlearn_coordinator.aggregation.own_aggregators import RoundUpdates
    from fleetlearn_coordinator.aggregation.weighing.weighing import Reported, WeighingRule
    from fleetlearn_coordinator.plan.own_algorithms import register
    from fleetlearn_coordinator.plan.plan import Plan, PlanError
    from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
    from fleetlearn_coordinator.results.run_results import RunResults
    from fleetlearn_coordinator.rounds.engine import Engine
    from fleetlearn_coordinator.rounds.own_stop_rule import PastRound
    from fleetlearn_coordinator.rounds.settings import Settings
    from fleetlearn_coordinator.rounds.strategies.own_strategy import Choice, WaitingDevice
    from fleetlearn_coordinator.service.serve import RunResult, serve, serve_async
    from fleetlearn_coordinator.service.status import Status, read_model, read_status
    from fleetlearn_coordinator.storage.errors import StoreError

__all__ = [
    "Aggregator",
    "Choice",
    "Engine",
    "Optimizer",
    "PastRound",
    "Plan",
    "PlanError",
    "Reported",
    "RoundUpdates",
    "RunResult",
    "RunResults",
    "ServiceError",
    "ServiceSettings",
    "Settings",
    "Status",
    "StoreError",
    "WaitingDevice",
    "WeighingRule",
    "read_model",
    "read_status",
    "register",
    "serve",
    "serve_async",
]

_MODULES = {
    "aggregation.aggregators": ("Aggregator",),
    "aggregation.optimizers": ("Optimizer",),
    "aggregation.own_aggregators": ("RoundUpdates",),
    "aggregation.weighing.weighing": ("Reported", "WeighingRule"),
    "plan.own_algorithms": ("register",),
    "plan.plan": ("Plan", "PlanError"),
    "plan.service_settings": ("ServiceError", "ServiceSettings"),
    "results.run_results": ("RunResults",),
    "rounds.engine": ("Engine",),
    "rounds.own_stop_rule": ("PastRound",),
    "rounds.settings": ("Settings",),
    "rounds.strategies.own_strategy": ("Choice", "WaitingDevice"),
    "service.serve": ("RunResult", "serve", "serve_async"),
    "service.status": ("Status", "read_model", "read_status"),
    "storage.errors": ("StoreError",),
}


def __getattr__(name: str) -> Any:
    # Late, so that the command can say which extra is missing before any of this asks for it.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)  # for completion: what was not asked for yet is not in the module
