"""The values of a plan that depend on its recipe and on each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES
from fleetlearn_coordinator.aggregation.robust.rules import DEFAULTS, RULES, Bounds, least_updates
from fleetlearn_coordinator.aggregation.round_summary import PERSONAL
from fleetlearn_coordinator.aggregation.staleness import FUNCTIONS
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_coordinator.plan.sections import CONCURRENCY, DEADLINE, SECTIONS
from fleetlearn_coordinator.plan.toml_errors import near

RELATED = ("local", "round", "staleness", "aggregation", "server", "stop", "evaluation", "models")
"""The sections whose defaults depend on the recipe or on each other."""
SYNCHRONOUS: Mapping[str, Any] = {"over_selection": 1.3, "gather": 5.0, "late": "discard"}
"""Defaults of what only synchronous rounds have."""


def fill_defaults(raw: dict[str, Any]) -> None:
    """Put in what depends on other values. Leaves what has a wrong type for the conversion to
    refuse."""
    name = raw.get("recipe", "fedavg")
    if name not in list(RECIPES):  # a list, since what was given may not be hashable
        raise ValueError(
            f"recipe = {name!r} is not known{near(str(name), RECIPES)} Recipes: "
            f"{', '.join(RECIPES)}."
        )
    recipe = RECIPES[name]
    for section in SECTIONS:
        raw.setdefault(section, {})
    local, round_, staleness, aggregation, server, stop, evaluation, models = (
        raw[section] for section in RELATED
    )
    raw.setdefault("data_dir", f"{raw.get('name')}.run")
    if isinstance(local, dict):
        given = local
        local = raw["local"] = {**recipe.local, **given}
        chosen = local["algorithm"]
        if chosen not in list(ALGORITHMS):
            hint, allowed = near(str(chosen), ALGORITHMS), ", ".join(ALGORITHMS)
            raise ValueError(
                f"local.algorithm = {chosen!r} is not known{hint} Algorithms: {allowed}."
            )
        if chosen != recipe.local["algorithm"] and "personal_epochs" not in given:
            local.pop("personal_epochs", None)  # the recipe's is for its own algorithm
    if isinstance(aggregation, dict):
        aggregation = raw["aggregation"] = {**recipe.aggregation, **aggregation}
        _check_aggregation(aggregation)
    if isinstance(round_, dict):
        defaults = recipe.round
        if isinstance(aggregation, dict) and aggregation["aggregator"] in RULES:
            # A robust rule bounds what one device can do; a weight that the device claims itself
            # would undo that.
            defaults = {**defaults, "weighting": "uniform"}
        _fill_round(round_, defaults, partial(_least_updates, aggregation))
    if isinstance(staleness, dict) and isinstance(round_, dict):
        _fill_staleness(staleness, round_)
    if isinstance(evaluation, dict) and isinstance(round_, dict):
        evaluation.setdefault("devices", round_.get("goal", 1))
        evaluation.setdefault("deadline", round_.get("deadline", DEADLINE))
        if isinstance(devices := evaluation["devices"], int):
            evaluation.setdefault("minimum", max(1, -(-devices // 2)))
    if isinstance(stop, dict):
        stop.setdefault("direction", _better(stop.get("metric")))
        if isinstance(models, dict):
            _fill_models(models, stop)
    if isinstance(server, dict):
        chosen = server.setdefault("optimizer", recipe.server["optimizer"])
        if chosen not in list(optimizers.OPTIMIZERS):
            hint = near(str(chosen), optimizers.OPTIMIZERS)
            allowed = ", ".join(optimizers.OPTIMIZERS)
            raise ValueError(
                f"server.optimizer = {chosen!r} is not known{hint} Optimizers: {allowed}."
            )
        values: dict[str, Any] = {**optimizers.defaults(chosen)}
        for key in set(server) & {"lr", "momentum", "beta1", "beta2", "tau"} - set(values):
            takes = ", ".join(values) or "no hyper-parameter"
            raise ValueError(
                f"server.{key} = {server[key]!r}: the optimizer {chosen} takes {takes}"
            )
        raw["server"] = {
            **values,
            **(recipe.server if chosen == recipe.server["optimizer"] else {}),
            **server,
        }


def _better(metric: object) -> str:
    """Return on which side a metric's better values are."""
    return "below" if metric in ("loss", f"{PERSONAL}loss") else "above"


def _fill_models(models: dict[str, Any], stop: dict[str, Any]) -> None:
    if "metric" in models:
        models.setdefault("direction", _better(models["metric"]))
    elif "metric" in stop:
        models["metric"] = stop["metric"]
        models.setdefault("direction", stop["direction"])
    models.setdefault("measured_by", stop.get("measured_by", "round"))


def _fill_round(
    round_: dict[str, Any], defaults: Mapping[str, Any], least: Callable[[int], int]
) -> None:
    """``least``: goal -> from how many updates on the aggregator works."""
    asynchronous = round_.get("participation", defaults["participation"]) == "asynchronous"
    for key in ("concurrency", "max_share") if not asynchronous else SYNCHRONOUS:
        if key in round_:
            own, others = (
                ("asynchronous", "synchronous") if asynchronous else ("synchronous", "asynchronous")
            )
            raise ValueError(
                f"round.{key} = {round_[key]!r} is for {others} rounds; round.participation is "
                f'"{own}"'
            )
    for key, value in (defaults if asynchronous else {**defaults, **SYNCHRONOUS}).items():
        round_.setdefault(key, value)
    goal = round_.get("goal")
    # a larger one is refused, and ``least`` would count for hours
    if isinstance(goal, int) and goal <= MAX_UPDATES:
        round_.setdefault(
            "minimum", goal if asynchronous else max(1, -(-goal // 2), min(goal, least(goal)))
        )


def _fill_staleness(staleness: dict[str, Any], round_: dict[str, Any]) -> None:
    asynchronous = round_["participation"] == "asynchronous"
    if not asynchronous and round_.get("late") != "carry":
        if not staleness:
            return
        key, value = next(iter(staleness.items()))
        raise ValueError(
            f"staleness.{key} = {value!r}: no update is stale in synchronous rounds that discard "
            'late ones; it needs round.participation = "asynchronous" or round.late = "carry"'
        )
    function = staleness.setdefault("function", "polynomial")
    if function not in list(FUNCTIONS):
        hint = near(str(function), FUNCTIONS)
        raise ValueError(
            f"staleness.function = {function!r} is not known{hint} Functions: "
            f"{', '.join(FUNCTIONS)}."
        )
    takes = FUNCTIONS[function].defaults
    for key in {"a", "b"} & set(staleness) - set(takes):
        raise ValueError(
            f"staleness.{key} = {staleness[key]!r}: {function} takes "
            f"{' and '.join(takes) or 'neither'}"
        )
    for key, value in takes.items():
        staleness.setdefault(key, value)
    goal, most = round_.get("goal"), round_.get("concurrency")
    if asynchronous and isinstance(goal, int) and goal > 0:
        mean = -(-most // goal) if isinstance(most, int) else CONCURRENCY
        staleness.setdefault("max", CONCURRENCY * mean)
    staleness.setdefault("max", 1)


def _check_aggregation(aggregation: dict[str, Any]) -> None:
    name = aggregation["aggregator"]
    if name not in list(aggregators.AGGREGATORS):
        hint, allowed = near(str(name), aggregators.AGGREGATORS), ", ".join(aggregators.AGGREGATORS)
        raise ValueError(
            f"aggregation.aggregator = {name!r} is not known{hint} Aggregators: {allowed}."
        )
    takes = RULES[name].takes if name in RULES else None
    for key in aggregation.keys() & {"hostile", "radius"} - {takes}:
        raise ValueError(
            f"aggregation.{key} = {aggregation[key]!r}: {name} takes {takes or 'neither'}"
        )
    for key in ("norm_action", "norm_quantile", "norm_rate"):
        needs = "norm_quantile" if key == "norm_rate" else "max_norm"
        if key in aggregation and needs not in aggregation:
            raise ValueError(f"aggregation.{key} = {aggregation[key]!r} needs aggregation.{needs}")


def _least_updates(aggregation: object, goal: int) -> int:
    if not isinstance(aggregation, dict) or aggregation["aggregator"] not in RULES:
        return 1
    hostile = aggregation.get("hostile", DEFAULTS.hostile)
    return (
        least_updates(aggregation["aggregator"], Bounds(hostile), goal)
        if isinstance(hostile, float)
        else 1
    )
