"""What [aggregation] needs of the rest of a plan and of the bundle's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetlearn_protocol import extensions
from fleetlearn_protocol.manifest import LocalStep

from fleetlearn_coordinator.aggregation.aggregators import AGGREGATORS
from fleetlearn_coordinator.aggregation.robust.kept_updates import MAX_KEPT
from fleetlearn_coordinator.aggregation.robust.rules import RULES, RobustRule, least_updates
from fleetlearn_coordinator.aggregation.weighing.fair import fair
from fleetlearn_coordinator.aggregation.weighing.normalised import STEPS, most_alpha, normalised
from fleetlearn_coordinator.aggregation.weighing.weighing import WeighingRule, own_rule
from fleetlearn_coordinator.plan.own_algorithms import WEIGHING_RULE
from fleetlearn_coordinator.plan.regions_section import RegionsSection
from fleetlearn_coordinator.plan.sections import Aggregation, RoundSection

NORMALISE = "aggregation.normalise = true"
WEIGHING = "aggregation.weighing"


def weighing_rule(
    aggregation: Aggregation, step: LocalStep, hyper: Mapping[str, float]
) -> WeighingRule | None:
    """Return the rule by which updates are weighed, if there is one. ``hyper``: the step's
    hyper-parameters.

    Raises ValueError, in words, where the step does not fit, or an own rule cannot be had."""
    if aggregation.weighing is not None:
        name, given = aggregation.weighing, aggregation.weighing_parameters
        return own_rule(name, extensions.make_once(WEIGHING_RULE, name, given, WEIGHING))
    if aggregation.q is not None:
        if "lr" not in hyper:
            raise ValueError(
                f"aggregation.q = {aggregation.q:g} needs a step with a learning rate lr."
            )
        return fair(aggregation.q, hyper["lr"])
    if not aggregation.normalise:
        return None
    if step.optimizer not in STEPS:
        raise ValueError(
            f"{NORMALISE} needs to know how much each gradient of a device counts in its update, "
            f"as with {', '.join(STEPS)}."
        )
    rho = 0.0 if step.optimizer == "sgd" else hyper["momentum"]
    mu = hyper["mu"] if step.proximal else 0.0
    alpha = hyper["lr"] * mu
    if not 0 <= rho < 1:
        raise ValueError(f"{NORMALISE} needs a momentum of 0 to below 1; it is {rho:g}.")
    if alpha and step.clip:
        raise ValueError(
            f"{NORMALISE} with mu = {mu:g} needs a step that does not clip the gradient."
        )
    most = most_alpha(step.optimizer, rho)
    if alpha >= 1 or alpha > most:
        limit = f"of at most {most:.3g}" if most < 1 else "below 1"
        raise ValueError(
            f"{NORMALISE} needs lr * mu {limit}, here with momentum {rho:g}; lr is {hyper['lr']:g} "
            f"and mu {mu:g}. With more, the proximal term undoes a gradient in later steps more "
            "than once."
        )
    return normalised(step.optimizer, rho, alpha)


def contradictions_of_aggregation(
    aggregation: Aggregation,
    round_: RoundSection,
    regions: RegionsSection | None = None,
    *,
    mix: bool,
    evaluate: bool,
) -> Iterable[str]:
    """Yield what does not fit together. ``mix``: server.mix; ``evaluate``: local.evaluate."""
    name, rule = aggregation.aggregator, RULES.get(aggregation.aggregator)
    is_own = name not in AGGREGATORS
    rules_given = {
        "aggregation.q": aggregation.q is not None,
        NORMALISE: aggregation.normalise,
        WEIGHING: aggregation.weighing is not None,
    }
    chosen = [key for key, there in rules_given.items() if there]
    if aggregation.weighing is not None and not extensions.is_extension(
        WEIGHING_RULE, aggregation.weighing
    ):
        yield (
            f'{WEIGHING} = "{aggregation.weighing}" is not known: it takes '
            f"{WEIGHING_RULE.own}. FedNova's is aggregation.normalise, q-FedAvg's aggregation.q"
        )
    if aggregation.weighing_parameters and aggregation.weighing is None:
        yield (
            f"aggregation.weighing_parameters = {aggregation.weighing_parameters} need {WEIGHING}, "
            "an own weighing rule"
        )
    if aggregation.parameters and not is_own:
        yield (
            f"aggregation.parameters = {aggregation.parameters} are for an own aggregator; "
            f'aggregation.aggregator is "{name}"'
        )
    if len(chosen) > 1:
        yield (
            " and ".join(chosen) + ": each says what updates are multiplied by; it takes one of "
            "them"
        )
    if chosen and (rule is not None or is_own):
        yield (
            f'{chosen[0]} weighs the updates of a mean: it needs aggregation.aggregator = "mean", '
            f"not {name!r}"
        )
    if chosen and mix:
        yield (
            f"{chosen[0]} weighs a round's updates against each other; server.mix = true has one "
            "at a time"
        )
    if aggregation.q is not None and not evaluate:
        yield (
            "aggregation.q weighs updates by the losses that devices measure: it needs "
            "local.evaluate = true"
        )
    if rule is None and not is_own:
        return
    if mix:
        yield (
            f"aggregation.aggregator = {name!r} combines several updates; server.mix = true has "
            "one at a time"
        )
    if round_.goal > MAX_KEPT:
        yield (
            f"round.goal = {round_.goal}: the aggregator {name} keeps a round's updates, at most "
            f"{MAX_KEPT}"
        )
    if rule is None:
        return
    sizes = {"round": (round_.goal, round_.minimum)}
    if regions is not None:
        named = regions.named.items()
        sizes = {f"regions.named.{key}": (each.goal, each.minimum) for key, each in named}
    for where, (goal, minimum) in sizes.items():
        yield from _too_few_updates(aggregation, rule, where, goal, minimum)


def _too_few_updates(
    aggregation: Aggregation, rule: RobustRule, where: str, goal: int, minimum: int
) -> Iterable[str]:
    """Yield why a robust aggregator may have too few updates of the round, or of a region.
    ``where``: the section that says how many."""
    bounds, name = aggregation.bounds, aggregation.aggregator
    least = least_updates(name, bounds, goal)
    if minimum < least:
        share = f"aggregation.hostile = {bounds.hostile:g}"
        what = f"{where}.minimum = {minimum} and {where}.goal = {goal}"
        if least > goal:
            hostile = bounds.count(goal)
            yield (
                f"{what}: with {hostile} hostile devices ({share}) {name} needs "
                f"{rule.least(hostile)} updates"
            )
        yield f"{what}: with {share} {name} needs a minimum of {least}"
