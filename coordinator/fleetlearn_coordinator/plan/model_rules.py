"""What of a plan contradicts itself about its models: how they are made, kept and measured, and
which one ends the run."""

from __future__ import annotations

from fleetlearn_protocol import extensions

from fleetlearn_coordinator.aggregation.round_summary import PERSONAL
from fleetlearn_coordinator.plan.own_algorithms import STOP_RULE
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule


def _mixes_several(plan: PlanKeys) -> bool:
    """Whether the server mixes models, and not one device's at a time, as FedAsync does."""
    one_at_a_time = plan.round.asynchronous and plan.round.goal == 1
    return plan.server.mix and not (one_at_a_time and plan.server.optimizer == "sgd")


MODEL_RULES = (
    PlanRule(
        lambda plan: plan.round.minimum > plan.round.goal,
        lambda plan: (
            f"round.minimum = {plan.round.minimum} is more than round.goal = {plan.round.goal}; it "
            "takes 1 to the goal"
        ),
    ),
    PlanRule(
        lambda plan: plan.evaluation.minimum > plan.evaluation.devices,
        lambda plan: (
            f"evaluation.minimum = {plan.evaluation.minimum} is more than evaluation.devices = "
            f"{plan.evaluation.devices}; it takes 1 to the devices"
        ),
    ),
    PlanRule(
        lambda plan: plan.models.best is not None and plan.models.metric is None,
        lambda plan: (
            f"models.best = {plan.models.best} needs models.metric: what the best models are best "
            "by"
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.models.best is not None
            and plan.models.measured_by == "held-out"
            and plan.evaluation.data is None
        ),
        lambda plan: 'models.measured_by = "held-out" needs evaluation.data',
    ),
    PlanRule(
        _mixes_several,
        lambda plan: (
            "server.mix = true mixes the model with one device's at a time: it needs "
            f'round.participation = "asynchronous", round.goal = 1 (it is {plan.round.goal}) and '
            'server.optimizer = "sgd"'
        ),
    ),
)


def _target_is_unbounded(plan: PlanKeys) -> bool:
    """Whether one device's word could meet the target: it is not between finite bounds."""
    target = plan.stop.target
    if target is None:
        return plan.stop.bounds is not None and not plan.stop.bounds[0] < plan.stop.bounds[1]
    return not all(low < high and low <= target <= high for low, high in plan.bounds.values())


def _best_is_unbounded(plan: PlanKeys) -> bool:
    """Whether one device's word could be better than any model: then nothing improves after it, and
    patience ends."""
    stop = plan.stop
    if stop.patience is None or stop.target is not None or stop.bounds is not None:
        return False
    known = stop.direction == "below" or stop.metric in ("accuracy", f"{PERSONAL}accuracy")
    return stop.measured_by != "held-out" and not known


STOP_RULES = (
    PlanRule(
        lambda plan: bool(plan.stop.parameters) and plan.stop.rule is None,
        lambda plan: f"stop.parameters = {plan.stop.parameters} need stop.rule, an own stop rule",
    ),
    PlanRule(
        lambda plan: (
            plan.stop.rule is not None and not extensions.is_extension(STOP_RULE, plan.stop.rule)
        ),
        lambda plan: f'stop.rule = "{plan.stop.rule}" is not known: it takes {STOP_RULE.own}',
    ),
    PlanRule(
        lambda plan: plan.stop.target is not None and plan.stop.metric is None,
        lambda plan: (
            f"stop.target = {plan.stop.target} needs stop.metric, the name of a metric of the "
            'bundle or "loss"'
        ),
    ),
    PlanRule(
        lambda plan: plan.stop.patience is not None and plan.stop.metric is None,
        lambda plan: (
            f"stop.patience = {plan.stop.patience} needs stop.metric, the metric that is to "
            'improve: one of the bundle or "loss"'
        ),
    ),
    PlanRule(
        lambda plan: plan.stop.least is not None and plan.stop.patience is None,
        lambda plan: (
            f"stop.least = {plan.stop.least} needs stop.patience, after how many measured models "
            "without such an improvement to stop"
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.stop.metric is not None and plan.stop.target is None and plan.stop.patience is None
        ),
        lambda plan: (
            f'stop.metric = "{plan.stop.metric}" needs stop.target, the value to stop at, or '
            "stop.patience, after how many measured models without an improvement"
        ),
    ),
    PlanRule(
        _best_is_unbounded,
        lambda plan: (
            f"stop.patience = {plan.stop.patience} needs stop.bounds = [least, greatest], what "
            f"{plan.stop.metric} can be for one example: a device that reports more must not be "
            "better than all models to come"
        ),
    ),
    PlanRule(
        lambda plan: plan.stop.bounds is not None and plan.stop.metric is None,
        lambda plan: (
            f"stop.bounds = {list(plan.stop.bounds or ())} needs stop.metric, the metric that can "
            "be no more and no less"
        ),
    ),
    PlanRule(
        lambda plan: plan.stop.bounds is not None and _target_is_unbounded(plan),
        lambda plan: (
            f"stop.bounds = {list(plan.stop.bounds or ())} takes the least and the greatest value, "
            "with the target between"
        ),
    ),
    PlanRule(
        _target_is_unbounded,
        lambda plan: (
            f"stop.target = {plan.stop.target} needs stop.bounds = [least, greatest], what "
            f"{plan.stop.metric} can be for one example: a device that reports more or less must "
            "not stop the run"
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.stop.metric is not None
            and plan.stop.measured_by == "round"
            and not plan.local.evaluate
        ),
        lambda plan: (
            f'stop.metric = "{plan.stop.metric}" is measured by the devices: it needs '
            "local.evaluate = true"
        ),
    ),
    PlanRule(
        lambda plan: plan.stop.measured_by == "held-out" and plan.evaluation.data is None,
        lambda plan: (
            'stop.measured_by = "held-out" needs evaluation.data, an .npz file of held-out data'
        ),
    ),
    PlanRule(
        lambda plan: plan.stop.measured_by == "evaluation" and plan.evaluation.every is None,
        lambda plan: (
            'stop.measured_by = "evaluation" needs evaluation.every, the number of rounds between '
            "two evaluations"
        ),
    ),
)
