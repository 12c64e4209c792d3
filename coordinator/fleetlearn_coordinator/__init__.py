"""The coordinator: combines what devices send, and expects them to vanish at any moment."""

from fleetlearn_coordinator.engine import Engine, Settings
from fleetlearn_coordinator.plan import Plan, PlanError
from fleetlearn_coordinator.records import Status, read_model, read_status
from fleetlearn_coordinator.service import Result, serve, serve_async
from fleetlearn_coordinator.store import StoreError

__all__ = [
    "Engine",
    "Plan",
    "PlanError",
    "Result",
    "Settings",
    "Status",
    "StoreError",
    "read_model",
    "read_status",
    "serve",
    "serve_async",
]
