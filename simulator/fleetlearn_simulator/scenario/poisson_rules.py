"""What a scenario needs for Poisson sampling (``privacy.sampling = "poisson"``): that nothing but a
device's own coin decides whether it takes part in a round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fleetlearn_simulator.scenario.sections import HAZARDS

if TYPE_CHECKING:
    from fleetlearn_simulator.scenario.scenario import Scenario

LEAST_GOAL = 50
"""With this many devices wanted, a round that nobody is drawn for has a probability below e^-50.
Such a round would be drawn again, which is not accounted for."""


def is_poisson(scenario: Scenario) -> bool:
    """Return whether each round's devices are drawn by Poisson sampling."""
    privacy = scenario.plan.privacy
    return privacy is not None and privacy.sampling == "poisson"


def poisson_contradictions(scenario: Scenario) -> Iterator[str]:
    """Yield why the rounds of a scenario would be no Poisson sample."""
    plan, privacy = scenario.plan, scenario.plan.privacy
    if privacy is None or privacy.sampling != "poisson":
        return
    asks = 'plan.privacy.sampling = "poisson"'
    failures, round_ = scenario.failures, plan.round
    if scenario.population.size != privacy.population:
        yield (
            f"{asks}: population.size = {scenario.population.size} must be "
            f"plan.privacy.population = {privacy.population}: each device takes part with "
            "probability round.goal / population"
        )
    if round_.goal < LEAST_GOAL:
        yield f"{asks} needs plan.round.goal of at least {LEAST_GOAL}; it is {round_.goal}"
    if round_.goal > privacy.population:
        yield f"{asks}: plan.round.goal = {round_.goal} is more than the population"
    if privacy.separation > 1 or privacy.participations < plan.stop.rounds:
        yield (
            f"{asks} draws each device in each round: it takes plan.privacy.separation = 1 "
            "and plan.privacy.participations of at least plan.stop.rounds, the defaults"
        )
    if plan.secure is not None:
        yield (
            f"{asks} with [secure]: how many are drawn is chance, and nobody adds fewer than "
            f"secure.minimum = {plan.secure.minimum} masks up. A round of fewer would have no "
            "release, which tells who was drawn. Leave sampling or [secure] out"
        )
    lasting = {
        'round.participation = "asynchronous"': round_.asynchronous,
        'round.late = "carry"': round_.late == "carry",
        "[selection]": plan.engine_settings(1.0).selection is not None,
        "pace.connected": plan.pace.connected is not None,
        "evaluation.every": plan.evaluation.every is not None,
    }
    for key in (key for key, used in lasting.items() if used):
        yield f"{asks}: with plan.{key} it is not the coin alone that decides who takes part"
    if scenario.availability.kind != "always":
        yield (
            f'{asks} needs availability.kind = "always"; with "{scenario.availability.kind}" a '
            "device that is drawn may be offline"
        )
    tiers = [tier.failures for tier in scenario.tiers.values()]
    goes_wrong = {
        f'law = "{failures.law}"': failures.law != HAZARDS,
        **{key: getattr(failures, key) for key in ("download", "train", "upload", "crash")},
        **{
            f"{key} of a tier": any(getattr(tier, key) for tier in tiers)
            for key in ("download", "train", "upload", "crash")
        },
        "stragglers": failures.stragglers and failures.discard,
        "outages": failures.outages,
    }
    for key in (key for key, value in goes_wrong.items() if value):
        yield f"{asks}: with failures.{key} a device that is drawn may not report"
    if scenario.coordinator.crashes:
        yield f"{asks}: with coordinator.crashes a device that is drawn may not report"
