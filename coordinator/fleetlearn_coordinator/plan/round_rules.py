"""What of a plan contradicts itself about its rounds: their size, weights, encodings and pace."""

from __future__ import annotations

from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, leaves_updates_out
from fleetlearn_coordinator.plan.sections import PaceSection

WEIGHT_RULES = (
    PlanRule(
        lambda plan: (
            plan.round.weighting == "inverse-participation"
            and (not plan.round.asynchronous or plan.round.goal == 1)
        ),
        lambda plan: (
            'round.weighting = "inverse-participation" weighs the updates of one buffer against '
            'each other: it needs round.participation = "asynchronous" and a round.goal above 1 '
            f"(it is {plan.round.goal})"
        ),
    ),
    PlanRule(
        lambda plan: plan.most_updates_of_a_device == 0,
        lambda plan: (
            f"round.max_share = {plan.round.max_share} of round.goal = {plan.round.goal} is less "
            f"than one update; it takes {1 / plan.round.goal:.3g} to 1"
        ),
    ),
)


def _tasks_of_a_round(plan: PlanKeys) -> str:
    if plan.round.asynchronous:
        return "round.concurrency"
    return "the cohort (round.goal * round.over_selection)"


ROUND_RULES = (
    PlanRule(
        lambda plan: plan.round.cohort > MAX_UPDATES,
        lambda plan: (
            f"round.goal * round.over_selection gives a cohort of {plan.round.cohort}; the limit "
            f"is {MAX_UPDATES}"
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.local.time_budget is not None and plan.local.time_budget > plan.round.deadline
        ),
        lambda plan: (
            f"local.time_budget = {plan.local.time_budget} s is more than round.deadline = "
            f"{plan.round.deadline} s"
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.recipe == "fedsgd" and (plan.local.epochs, plan.local.batch_size) != (1, 0)
        ),
        lambda plan: (
            f"local.epochs = {plan.local.epochs} and local.batch_size = {plan.local.batch_size}: "
            "recipe fedsgd is one step on all examples, epochs = 1 and batch_size = 0; more steps "
            'are recipe = "fedavg"'
        ),
    ),
    PlanRule(
        lambda plan: plan.encoding.leaves_residual and leaves_updates_out(plan),
        lambda plan: (
            f'encoding.up = "{plan.encoding.up}" leaves a part of each update out: the '
            f"aggregator {plan.aggregation.aggregator} compares updates element by element, or by "
            "their distances"
        ),
    ),
    PlanRule(
        lambda plan: plan.server.mix and plan.encoding.down == "float16",
        lambda plan: (
            'encoding.down = "float16": server.mix = true moves the model towards what devices '
            "were sent exactly"
        ),
    ),
    PlanRule(
        lambda plan: plan.encoding.fault(),
        lambda plan: f'encoding.up = "{plan.encoding.up}": {plan.encoding.fault()}',
    ),
    PlanRule(
        lambda plan: plan.pace.connected is None and plan.pace != PaceSection(),
        lambda plan: (
            "pace.longest and pace.check_ins need pace.connected, how many devices stay connected"
        ),
    ),
    PlanRule(
        lambda plan: plan.pace.connected is not None and plan.pace.connected < plan.round.cohort,
        lambda plan: (
            f"pace.connected = {plan.pace.connected} is less than {_tasks_of_a_round(plan)}, "
            f"{plan.round.cohort}: rounds could not be full"
        ),
    ),
)
