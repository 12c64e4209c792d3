"""The values of a plan that depend on its recipe and on each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from fleetlearn_protocol.algorithms import LOCAL_ALGORITHM, OWN
from fleetlearn_protocol.extensions import is_extension

from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES
from fleetlearn_coordinator.aggregation.robust.rules import DEFAULTS, RULES, Bounds, least_updates
from fleetlearn_coordinator.aggregation.round_summary import PERSONAL
from fleetlearn_coordinator.aggregation.staleness import FUNCTIONS
from fleetlearn_coordinator.plan.family_section import fill_family
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.own_algorithms import (
    AGGREGATOR,
    SERVER_OPTIMIZER,
    STALENESS_FUNCTION,
    refuse_unknown_name,
)
from fleetlearn_coordinator.plan.privacy_defaults import fill_privacy, prepare_private_rounds
from fleetlearn_coordinator.plan.quality_section import fill_quality
from fleetlearn_coordinator.plan.recipes import RECIPES, Recipe
from fleetlearn_coordinator.plan.regions_section import fill_regions
from fleetlearn_coordinator.plan.schedule_section import fill_schedules
from fleetlearn_coordinator.plan.sections import CONCURRENCY, DEADLINE, OPTIONAL, ROUNDS, SECTIONS
from fleetlearn_coordinator.plan.secure_section import fill_secure, prepare_secure_rounds
from fleetlearn_coordinator.plan.toml_errors import near

RELATED = ("local", "round", "staleness", "aggregation", "server", "stop", "evaluation", "models")
"""The sections whose defaults depend on the recipe or on each other."""
# Bonawitz et al., "Towards Federated Learning at Scale" (arXiv 1902.01046), typically select 130 %
# of the devices that they want to hear from.
SYNCHRONOUS: Mapping[str, Any] = {"over_selection": 1.3, "gather": 5.0, "late": "discard"}
"""Defaults of what only synchronous rounds have."""


def fill_defaults(raw: dict[str, Any]) -> None:
    """Put in what depends on other values. Leaves what has a wrong type for the conversion to
    refuse."""
    name = raw.get("recipe", "fedavg")
    _refuse_unknown("recipe", name, RECIPES, "Recipes")
    recipe = RECIPES[name]
    fill_family(raw)
    for section in SECTIONS:
        if section not in OPTIONAL:
            raw.setdefault(section, {})
    local, round_, staleness, aggregation, server, stop, evaluation, models = (
        raw[section] for section in RELATED
    )
    raw.setdefault("data_dir", f"{raw.get('name')}.run")
    if recipe.mechanism is not None and "privacy" not in raw:
        raise ValueError(
            f'recipe = "{name}" needs [privacy] with population, delta, clip, and epsilon or noise'
        )
    if recipe.distils and "distil" not in raw:
        raise ValueError(
            f'recipe = "{name}" needs [distil] with data, examples without labels, and bundle, '
            "which export_distillation writes"
        )
    privacy = raw.get("privacy")
    if privacy is not None:
        raw.setdefault("durable", "power")  # a model that was seen stays counted
    if isinstance(privacy, dict) and isinstance(local, dict) and isinstance(round_, dict):
        prepare_private_rounds(privacy, local, round_)
    secure = raw.get("secure")
    if secure is not None and isinstance(local, dict) and isinstance(round_, dict):
        prepare_secure_rounds(local, round_)
    if isinstance(local, dict):
        raw["local"] = _filled_local(local, recipe)
    if isinstance(aggregation, dict):
        aggregation = raw["aggregation"] = {**recipe.aggregation, **aggregation}
        _check_aggregation(aggregation)
    if isinstance(round_, dict):
        defaults = recipe.round
        if isinstance(aggregation, dict) and aggregation["aggregator"] in RULES:
            # A robust rule bounds what one device can do; a weight that the device claims itself
            # would undo that.
            defaults = {**defaults, "weighting": "uniform"}
        if isinstance(regions := raw.get("regions"), dict):
            fill_regions(regions, round_, partial(_least_updates, aggregation), DEADLINE)
        _fill_round(round_, defaults, partial(_least_updates, aggregation))
    if isinstance(staleness, dict) and isinstance(round_, dict):
        _fill_staleness(staleness, round_)
    if isinstance(evaluation, dict) and isinstance(round_, dict):
        _fill_evaluation(evaluation, round_)
    if isinstance(stop, dict):
        stop = raw["stop"] = {**recipe.stop, **stop}
        stop.setdefault("direction", _better(stop.get("metric")))
        if isinstance(models, dict):
            _fill_models(models, stop)
        if isinstance(local, dict):
            fill_schedules(raw["local"], stop.get("rounds", ROUNDS))
    if isinstance(server, dict):
        raw["server"] = _filled_server(server, recipe)
    if isinstance(privacy, dict):
        fill_privacy(privacy, recipe.mechanism or "gaussian", round_, stop)
    if isinstance(secure, dict):
        fill_secure(secure, round_, privacy, computes=_computes(raw["local"]))
    if isinstance(quality := raw.get("quality"), dict):
        fill_quality(quality, round_, DEADLINE)


def _computes(local: object) -> bool:
    return isinstance(local, dict) and ALGORITHMS[local["algorithm"]].computes


def _refuse_unknown(key: str, name: object, table: Collection[str], what: str) -> None:
    # As a list, since the author of a plan may have given what is not hashable.
    if name not in list(table):
        raise ValueError(
            f"{key} = {name!r} is not known{near(str(name), table)} {what}: {', '.join(table)}."
        )


def _filled_local(local: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    filled: dict[str, Any] = {**recipe.local, **local}
    algorithm = filled["algorithm"]
    if algorithm not in [*ALGORITHMS] and is_extension(LOCAL_ALGORITHM, algorithm):
        filled["function"], filled["algorithm"] = algorithm, OWN
        algorithm = OWN
    elif (algorithm == OWN) != ("function" in filled):
        raise ValueError(
            f"local.algorithm = {algorithm!r} and local.function = {filled.get('function')!r}: an "
            'own algorithm is named by local.algorithm alone, such as "my_package:my_algorithm"'
        )
    refuse_unknown_name(LOCAL_ALGORITHM, "local.algorithm", algorithm, [*ALGORITHMS], "Algorithms")
    if algorithm != OWN and "parameters" in filled:
        raise ValueError(
            f"local.parameters = {filled['parameters']!r} are for an own algorithm; here it is "
            f'"{algorithm}", whose numbers are in [local.hyper]'
        )
    if algorithm != recipe.local["algorithm"] and "personal_epochs" not in local:
        filled.pop("personal_epochs", None)  # the recipe's is for its own algorithm
    return filled


def _fill_evaluation(evaluation: dict[str, Any], round_: dict[str, Any]) -> None:
    evaluation.setdefault("devices", round_.get("goal", 1))
    evaluation.setdefault("deadline", round_.get("deadline", DEADLINE))
    if "goal_share" in round_:  # fewer than the goal may be there
        evaluation.setdefault("minimum", round_.get("minimum", 1))
    if isinstance(devices := evaluation["devices"], int):
        evaluation.setdefault("minimum", max(1, _half(devices)))


def _filled_server(server: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    name = server.get("optimizer", recipe.server["optimizer"])
    ours = optimizers.OPTIMIZERS
    refuse_unknown_name(SERVER_OPTIMIZER, "server.optimizer", name, [*ours], "Optimizers")
    own = {} if name in ours else {"parameters": server.get("parameters", {})}
    takes_itself = optimizers.defaults(name) if name in ours else {}
    values: dict[str, Any] = {"optimizer": name, **takes_itself, **own}
    for key in set(server) & {"lr", "momentum", "beta1", "beta2", "tau", "parameters"} - set(
        values
    ):
        takes = ", ".join(takes_itself) or ("parameters" if own else "no hyper-parameter")
        raise ValueError(f"server.{key} = {server[key]!r}: the optimizer {name} takes {takes}")
    # The recipe's values are for its own optimizer.
    of_recipe = recipe.server if name == recipe.server["optimizer"] else {}
    return {**values, **of_recipe, **server}


def _half(count: int) -> int:
    """Return the half, rounded up."""
    return -(-count // 2)


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
    goal, share = round_.get("goal"), round_.get("goal_share")
    if share is not None:
        round_.setdefault("minimum_share", 0.5)
        if goal is None:
            raise ValueError(
                f"round.goal_share = {share!r} needs round.goal, the most reports that a round "
                f"wants, however many devices are there: 1 to {MAX_UPDATES}. What a round takes "
                "of memory and disk goes by it"
            )
    # a larger one is refused, and ``least`` would count for hours
    if isinstance(goal, int) and goal <= MAX_UPDATES:
        fewest = min(goal, least(goal))
        if share is None:
            fewest = goal if asynchronous else max(_half(goal), fewest)
        round_.setdefault("minimum", max(1, fewest))


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
    key = "staleness.function"
    refuse_unknown_name(STALENESS_FUNCTION, key, function, [*FUNCTIONS], "Functions")
    takes = FUNCTIONS[function].defaults if function in FUNCTIONS else {}
    known = takes if function in FUNCTIONS else ("parameters",)
    for key in {"a", "b", "parameters"} & set(staleness) - set(known):
        raise ValueError(
            f"staleness.{key} = {staleness[key]!r}: {function} takes "
            f"{' and '.join(known) or 'neither'}"
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
    ours = [*aggregators.AGGREGATORS]
    refuse_unknown_name(AGGREGATOR, "aggregation.aggregator", name, ours, "Aggregators")
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
