"""What of a plan does not go together with [quality]."""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule
from fleetlearn_coordinator.plan.quality_section import QualitySection

MOST_MEASURED = 1024
"""Devices of a round whose updates are measured: four sets of them for each, which are kept."""
ABOUT_DEVICES = "[quality] is about what single devices have"


def _quality_rule(
    breaks: Callable[[PlanKeys, QualitySection], object],
    text: Callable[[PlanKeys, QualitySection], str],
) -> PlanRule:
    """Return a rule that only plans with [quality] must keep."""
    return PlanRule(
        lambda plan: plan.quality is not None and breaks(plan, plan.quality),
        lambda plan: "" if plan.quality is None else text(plan, plan.quality),
    )


def _contribution_rule(
    breaks: Callable[[PlanKeys], object], text: Callable[[PlanKeys], str]
) -> PlanRule:
    """Return a rule that only plans with quality.contributions must keep."""
    return _quality_rule(
        lambda plan, quality: quality.contributions is not None and breaks(plan),
        lambda plan, quality: f"quality.contributions = {quality.contributions} {text(plan)}",
    )


def _clips(plan: PlanKeys) -> bool:
    bound = plan.aggregation.norm_bound
    return bound is not None and bound.action == "clip"


QUALITY_RULES = (
    _quality_rule(
        lambda plan, quality: plan.privacy is not None,
        lambda plan, quality: (
            f"[quality] with [privacy]: {ABOUT_DEVICES}, and nothing of that may be told. Look at "
            "the data in a run of its own without [privacy], whose devices' owners agree to it"
        ),
    ),
    _quality_rule(
        lambda plan, quality: plan.secure is not None,
        lambda plan, quality: (
            f"[quality] with [secure]: {ABOUT_DEVICES}, which the coordinator is not to know. Look "
            "at the data in a run of its own without [secure], whose devices' owners agree to it"
        ),
    ),
    _quality_rule(
        lambda plan, quality: plan.is_family,
        lambda plan, quality: (
            "[quality] with several models: devices are compared by the loss of one model on their "
            "data. Leave [quality] or [family] out"
        ),
    ),
    _quality_rule(
        lambda plan, quality: plan.algorithm.computes,
        lambda plan, quality: (
            f'recipe = "{plan.recipe}" with [quality]: the bundle has no model that devices could '
            "measure. Leave [quality] out; what a statistics run finds says how the data are "
            "distributed"
        ),
    ),
    _contribution_rule(
        lambda plan: plan.evaluation.data is None,
        lambda plan: "needs held-out data: evaluation.data",
    ),
    _contribution_rule(
        lambda plan: plan.round.asynchronous or plan.round.late == "carry",
        lambda plan: (
            "compares updates of one model. It needs synchronous rounds that discard late reports"
        ),
    ),
    _contribution_rule(
        lambda plan: plan.round.goal > MOST_MEASURED,
        lambda plan: (
            "keeps each update of a round until its end, and measures four models for each: with "
            f"round.goal = {plan.round.goal} that is more than {MOST_MEASURED}"
        ),
    ),
    _contribution_rule(
        lambda plan: plan.distil is not None,
        lambda plan: (
            "with [distil]: what an update is worth would be what is left of it after the "
            "distillation. Leave one of them out"
        ),
    ),
    _contribution_rule(
        lambda plan: plan.aggregation.aggregator != "mean" or plan.aggregation.has_rule,
        lambda plan: (
            "measures what an update adds to a weighted mean, and this plan's model is none. It "
            'needs aggregation.aggregator = "mean", without q, normalise and weighing'
        ),
    ),
    _contribution_rule(
        _clips,
        lambda plan: (
            "measures updates as they came, and this plan shortens those that are longer than "
            f"aggregation.max_norm = {plan.aggregation.max_norm:g} before they count. It needs "
            'aggregation.norm_action = "refuse", or no max_norm'
        ),
    ),
    _quality_rule(
        lambda plan, quality: quality.minimum > quality.devices,
        lambda plan, quality: (
            f"quality.minimum = {quality.minimum} is more than quality.devices = {quality.devices}"
        ),
    ),
)
"""Each with its reason."""
