"""What of a plan does not go together with clusters: with several models of one bundle."""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule
from fleetlearn_coordinator.plan.recipes import RECIPES


def _clusters_rule(
    breaks: Callable[[PlanKeys], object], text: Callable[[PlanKeys], str]
) -> PlanRule:
    """Return a rule that only plans with clusters must keep."""
    return PlanRule(
        lambda plan: plan.clusters is not None and breaks(plan),
        lambda plan: f"[clusters] and {text(plan)}",
    )


CLUSTERS_RULES = (
    PlanRule(
        lambda plan: RECIPES[plan.recipe].clusters and plan.clusters is None,
        lambda plan: (
            f'recipe = "{plan.recipe}" needs [clusters] with count: how many models there are'
        ),
    ),
    _clusters_rule(
        lambda plan: plan.family,
        lambda plan: (
            "[family]: clusters are several models of one bundle, which devices choose by their "
            "data, and members are of several bundles, chosen by what devices are. Leave one out"
        ),
    ),
    _clusters_rule(
        lambda plan: plan.distil is not None,
        lambda plan: (
            "[distil]: its teachers are the models of all devices together, and would teach each "
            "cluster what the others answer. Leave [distil] out"
        ),
    ),
    _clusters_rule(
        lambda plan: plan.algorithm.computes,
        lambda plan: (
            "a computation: it has sums that are added up, and no loss by which a device could "
            "choose. Leave [clusters] out"
        ),
    ),
    _clusters_rule(
        lambda plan: plan.round.asynchronous,
        lambda plan: (
            'round.participation = "asynchronous": a device chooses before it trains, among the '
            "models of the round, which only the devices of one round can do. It needs "
            "synchronous rounds"
        ),
    ),
    _clusters_rule(
        lambda plan: plan.round.late == "carry",
        lambda plan: (
            'round.late = "carry": the round for which a late update counts has other devices, '
            'which have chosen. It needs round.late = "discard"'
        ),
    ),
    _clusters_rule(
        lambda plan: plan.pace.connected is not None,
        lambda plan: (
            f"pace.connected = {plan.pace.connected}: a device that is sent away once it has "
            "measured the models is lost for its round. Leave pace.connected out"
        ),
    ),
    _clusters_rule(
        lambda plan: plan.evaluation.every is not None,
        lambda plan: (
            f"evaluation.every = {plan.evaluation.every}: an evaluation measures one model on a "
            "device, and which is the device's is known after it has measured all of them. The "
            "rounds' metrics are of each device's own cluster: leave evaluation.every out"
        ),
    ),
    _clusters_rule(
        lambda plan: plan.evaluation.data is not None,
        lambda plan: (
            "evaluation.data: nobody says which of the models held-out data are for. Leave "
            "evaluation.data out"
        ),
    ),
    _clusters_rule(
        lambda plan: plan.models.give,
        lambda plan: (
            "models.give = true: a device that takes no part does not say which model fits its "
            "data. Leave models.give out, and give a model by `export-model --member`"
        ),
    ),
)
"""Each with its reason. docs/algorithms/clusters.md lists them for people."""
