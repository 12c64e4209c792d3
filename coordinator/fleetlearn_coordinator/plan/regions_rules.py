"""What of a plan does not go together with regions: with hierarchical rounds."""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, leaves_updates_out
from fleetlearn_coordinator.plan.regions_section import NamedRegion, RegionsSection


def _regional_rule(
    breaks: Callable[[PlanKeys, RegionsSection], object],
    text: Callable[[PlanKeys, RegionsSection], str],
) -> PlanRule:
    """Return a rule that only plans with regions must keep."""

    def told(plan: PlanKeys) -> str:
        assert plan.regions is not None
        return text(plan, plan.regions)

    return PlanRule(lambda plan: plan.regions is not None and breaks(plan, plan.regions), told)


def _first(
    regions: RegionsSection, breaks: Callable[[NamedRegion], object]
) -> tuple[str, NamedRegion] | None:
    """Return the first region that breaks a rule."""
    return next(((name, each) for name, each in regions.named.items() if breaks(each)), None)


def _region_rule(
    breaks: Callable[[PlanKeys, NamedRegion], object],
    text: Callable[[PlanKeys, str, NamedRegion], str],
) -> PlanRule:
    """Return a rule that each region must keep."""

    def told(plan: PlanKeys, regions: RegionsSection) -> str:
        found = _first(regions, lambda each: breaks(plan, each))
        assert found is not None
        return text(plan, *found)

    return _regional_rule(
        lambda plan, regions: _first(regions, lambda each: breaks(plan, each)), told
    )


REGIONS_RULES = (
    _regional_rule(
        lambda plan, _: plan.round.asynchronous,
        lambda plan, _: (
            '[regions] and round.participation = "asynchronous": a region\'s part of a round has '
            "a beginning and an end, and asynchronous training has no rounds that wait for "
            'devices. It takes "synchronous"'
        ),
    ),
    _regional_rule(
        lambda plan, _: plan.round.late == "carry",
        lambda plan, _: (
            '[regions] and round.late = "carry": a late update would count in a later round, in '
            'which its region may be over. It takes "discard"'
        ),
    ),
    _regional_rule(
        lambda plan, _: plan.is_family,
        lambda plan, _: (
            "[regions] and a run with several models: a region is done when it has its reports, "
            "of whichever models they are, and a model could be left without any. It takes one "
            "bundle"
        ),
    ),
    _regional_rule(
        lambda plan, _: plan.secure is not None,
        lambda plan, _: (
            "[regions] and [secure]: of a round's masked updates one sum is unmasked, of all "
            "devices that reported, and a region that has failed could not be left out of it"
        ),
    ),
    _regional_rule(
        lambda plan, _: plan.algorithm.computes,
        lambda plan, _: (
            f'[regions] and local.algorithm = "{plan.local.algorithm}": what is computed is about '
            "all devices that reported; it would leave out those of a failed region without a word"
        ),
    ),
    _regional_rule(
        lambda plan, _: plan.keeps_device_models,
        lambda plan, _: (
            "[regions] and "
            + ("[quality] contributions" if plan.distil is None else '[distil] teachers="devices"')
            + ": it needs each device's model, also of a region that has failed"
        ),
    ),
    _regional_rule(
        lambda plan, regions: plan.privacy is not None and regions.weighting != "updates",
        lambda plan, regions: (
            f'regions.weighting = "{regions.weighting}" with [privacy]: the noise is for a sum in '
            "which each update weighs the same; in a small region one would weigh more. It takes "
            '"updates"'
        ),
    ),
    _regional_rule(
        lambda plan, _: plan.privacy is not None and plan.privacy.sampling == "poisson",
        lambda plan, _: (
            '[regions] and privacy.sampling = "poisson": who takes part would be drawn from all '
            'regions together. It takes "none"'
        ),
    ),
    _regional_rule(
        lambda plan, regions: leaves_updates_out(plan) and regions.weighting == "updates",
        lambda plan, _: (
            f'[regions] and aggregation.aggregator = "{plan.aggregation.aggregator}": what it '
            "makes of a region's updates is no sum that could go on. With regions.weighting = "
            '"uniform" or "given" it works within each region, and the model moves by the mean of '
            'what it finds; with weighting = "updates" it takes "mean"'
        ),
    ),
    _regional_rule(
        lambda plan, regions: plan.aggregation.has_rule and regions.weighting != "updates",
        lambda plan, regions: (
            f'regions.weighting = "{regions.weighting}" with aggregation.normalise, '
            "aggregation.q or aggregation.weighing, which weigh the updates of all devices against "
            'each other. It takes "updates"'
        ),
    ),
    _regional_rule(
        lambda plan, regions: plan.server.devices is not None and regions.weighting != "updates",
        lambda plan, regions: (
            f'regions.weighting = "{regions.weighting}" with server.devices: what devices keep '
            'goes with the mean of all updates. It takes "updates"'
        ),
    ),
    _regional_rule(
        lambda plan, regions: regions.goal > len(regions.named),
        lambda plan, regions: (
            f"regions.goal = {regions.goal} of {len(regions.named)} regions: it takes 1 to "
            f"{len(regions.named)}"
        ),
    ),
    _regional_rule(
        lambda plan, regions: regions.minimum > regions.goal,
        lambda plan, regions: (
            f"regions.minimum = {regions.minimum} is more than regions.goal = {regions.goal}"
        ),
    ),
    _region_rule(
        lambda plan, each: each.minimum > each.goal,
        lambda plan, name, each: (
            f"regions.named.{name}: minimum = {each.minimum} is more than goal = {each.goal}"
        ),
    ),
    _region_rule(
        lambda plan, each: each.deadline > plan.round.deadline,
        lambda plan, name, each: (
            f"regions.named.{name}: deadline = {each.deadline:g} s is more than round.deadline = "
            f"{plan.round.deadline:g} s"
        ),
    ),
    _regional_rule(
        lambda plan, regions: (
            regions.weighting == "given" and _first(regions, lambda each: each.weight is None)
        ),
        lambda plan, regions: (
            'regions.weighting = "given" needs the weight of each region; these have none: '
            + ", ".join(name for name, each in regions.named.items() if each.weight is None)
        ),
    ),
    _regional_rule(
        lambda plan, regions: (
            regions.weighting != "given" and _first(regions, lambda each: each.weight is not None)
        ),
        lambda plan, regions: (
            f'regions.weighting = "{regions.weighting}" has no use for the weight of '
            + ", ".join(name for name, each in regions.named.items() if each.weight is not None)
            + '; it takes weighting = "given"'
        ),
    ),
)
"""Each with its reason. docs/operate/regions.md lists them for people."""
