"""What a run without a model has found."""

from __future__ import annotations

from typing import Any

import msgspec
from fleetlearn_protocol import open_bundle

from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.status import read_model


class ComputationView(msgspec.Struct, frozen=True):
    """What a run without a model has found so far."""

    run: str
    """The run's name."""
    computation: str
    """The kind of computation."""
    version: int
    """How many rounds made it."""
    progress: str
    """Where it stands, for people."""
    done: bool
    """Whether it is over."""
    result: dict[str, Any]
    """What is known, as the kind says it."""


def read_result(plan: Plan, version: int | None = None) -> ComputationView:
    """Return what the plan's run has found, or had after this many rounds. Raises PlanError where
    it trains a model, StoreError where there is no such version."""
    computation = plan.computation(open_bundle(plan.bundle, files=()).manifest)
    number, state = read_model(plan.data_dir, version)
    return ComputationView(
        plan.name,
        computation.kind,
        number,
        computation.progress(state),
        computation.is_done(state),
        computation.result(state),
    )
