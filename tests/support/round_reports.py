"""For tests of a round: its rules, and reports as columns, in arrays or to be read one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.model_state import ModelState, make_state
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint, modular_sum
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.reports import PartColumn, ReportColumns
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_coordinator.aggregation.weighing.norm_bound import Enforced, NormBound
from fleetlearn_coordinator.aggregation.weighing.weighing import PLAIN, Weighing
from fleetlearn_protocol.messages import UPDATE


def rules_of(**more: Any) -> RoundRules:
    """Return Federated Averaging's rules, or others."""
    usual: dict[str, Any] = {
        "aggregators": {UPDATE: aggregators.make("mean")},
        "weighing": PLAIN,
        "optimizer": optimizers.make("sgd"),
        "staleness_factor": lambda staleness: 1 / (1 + staleness),
        "outlive": False,
        "mixing_rate": None,
        "devices": None,
        "metrics": ("accuracy", "loss"),
        "bounds": {},
        "max_weight": 1000,
        "first_mu": 0.0,
        "adaptive_mu": False,
        "most_mu": 1.0,
    }
    return RoundRules(**(usual | more))


def private_rules_of(size: int, most: int = 1, clip: float = 1.0, **more: Any) -> RoundRules:
    """Return the rules of private rounds, of a model of ``size`` elements. ``more``: of
    ``PrivacyRules``."""
    usual: dict[str, Any] = {
        "mechanism": "gaussian",
        "noise": 1.0,
        "goal": 10,
        "participations": 10,
        "clip": clip,
        "largest_weight": most,
    }
    bound = NormBound(clip, "clip", enforced=Enforced(most, size))
    privacy = PrivacyRules(**(usual | more))
    return rules_of(weighing=Weighing(bound=bound), privacy=privacy, outlive=True)


def masked_rules_of(*, equal: bool = True, **more: Any) -> RoundRules:
    """Return the rules of rounds of masked updates of 20 bits, clipped to 1."""
    numbers = FixedPoint(1.0, 20, equal)
    usual: dict[str, Any] = {"aggregators": {UPDATE: modular_sum(numbers)}, "secure": numbers}
    return rules_of(**(usual | more))


def state_of(rules: RoundRules, model: Sequence[float], **more: Any) -> ModelState:
    """Return the state before a run's first round."""
    vector = np.array(model, np.float32)
    usual: dict[str, Any] = {
        "version": 0,
        "optimizer_state": rules.optimizer.init(vector),
        "vectors": {},
    }
    return make_state(rules, None, model=vector, **(usual | more))


def reports_of_rows(
    updates: Sequence[Sequence[float]],
    weights: Sequence[int],
    *,
    parts: Mapping[str, Sequence[Sequence[float]]] | None = None,
    one_by_one: bool = False,
    **more: Any,
) -> ReportColumns:
    """Return reports with these updates, whose weights are their examples. ``parts``: beside the
    update. ``one_by_one``: the parts are to be read where they are, as from files."""
    rows = {UPDATE: updates, **(parts or {})}
    arrays = {part: np.array(column, np.float32) for part, column in rows.items()}
    columns: dict[str, PartColumn] = dict(arrays)
    if one_by_one:
        columns = {part: list(map(ArrayUpdate, array)) for part, array in arrays.items()}
    count = len(weights)
    usual: dict[str, Any] = {
        "examples": np.array(weights, np.int64),
        "steps": np.ones(count, np.int64),
        "complete": np.ones(count, np.bool_),
        "loss": np.full(count, 0.5),
        "metrics": {"accuracy": np.full(count, np.nan)},
    }
    return ReportColumns(
        weights=np.array(weights, np.int64),
        largest={
            part: np.abs(array).max(axis=1).astype(np.float64) for part, array in arrays.items()
        },
        parts=columns,
        **(usual | more),
    )
