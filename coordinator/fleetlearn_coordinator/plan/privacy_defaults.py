"""The values of [privacy] that depend on the recipe and on the rounds, and what a private plan's
rounds begin with."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fleetlearn_coordinator.plan.sections import RoundSection, Stop


def prepare_private_rounds(
    privacy: dict[str, Any], local: dict[str, Any], round_: dict[str, Any]
) -> None:
    """Put in what a plan with [privacy] has by default, whatever its recipe: all updates weigh the
    same, and devices measure only what is released."""
    if round_.get("weighting") == "examples" and "max_weight" not in round_:
        raise ValueError(
            'round.weighting = "examples" with [privacy] needs round.max_weight, the most examples '
            "that count: the noise is in proportion to it, and everybody may know it. Or "
            'round.weighting = "uniform"'
        )
    round_.setdefault("weighting", "uniform")
    local.setdefault("evaluate", privacy.get("metrics", "none") == "noised")


def fill_privacy(privacy: dict[str, Any], mechanism: str, round_: object, stop: object) -> None:
    """Put in what depends on other values. Leaves what has a wrong type for the conversion to
    refuse."""
    mechanism = privacy.setdefault("mechanism", mechanism)
    try:
        cohort = msgspec.convert(round_, RoundSection).cohort
        rounds = msgspec.convert(stop, Stop).rounds
    except msgspec.ValidationError:
        return  # one of the plan's other tables is refused
    population = privacy.get("population")
    if mechanism != "dp-ftrl":
        privacy.setdefault("separation", 1)
    elif isinstance(population, int):
        privacy.setdefault("separation", max(1, population // (2 * cohort)))
    separation = privacy.get("separation")
    if isinstance(separation, int) and separation > 0:
        privacy.setdefault("participations", math.ceil(rounds / separation))
    if privacy.get("metrics") == "noised":
        _fill_metrics(privacy, stop)


def _fill_metrics(privacy: dict[str, Any], stop: object) -> None:
    rules = msgspec.convert(stop, Stop)
    if rules.metric is not None and rules.bounds is not None:
        privacy.setdefault("metrics_bounds", {rules.metric: list(rules.bounds)})
