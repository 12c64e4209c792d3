"""What of a plan contradicts itself: keys that are right by themselves, and not together.

A rule is a condition and a text. The tables are read in order, and the first rule that holds is
what the author of the plan is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fleetlearn_protocol.encodings import find_encoding, leaves_residual
from fleetlearn_protocol.errors import ProtocolError

from fleetlearn_coordinator.aggregation import aggregators
from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES
from fleetlearn_coordinator.plan.aggregation_rules import contradictions_of_aggregation
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.sections import PaceSection


class PlanRule(NamedTuple):
    """Something that makes no sense in a plan."""

    breaks: Callable[[PlanKeys], object]
    """Whether the plan is so, by Python's truth of what this returns."""
    text: Callable[[PlanKeys], str]
    """The keys, what they say, and what is allowed."""


def contradictions(plan: PlanKeys) -> Iterable[str]:
    """Yield what of the plan contradicts itself, each with what it takes."""
    round_ = plan.round
    yield from _broken(MODEL_RULES, plan)
    yield from contradictions_of_aggregation(
        plan.aggregation, round_, mix=plan.server.mix, evaluate=plan.local.evaluate
    )
    yield from _broken(ALGORITHM_RULES, plan)
    yield from _broken(WEIGHT_RULES, plan)
    yield from plan.selection.contradictions(
        asynchronous=round_.asynchronous,
        tasks=round_.goal if round_.asynchronous else round_.cohort,
    )
    yield from _broken(ROUND_RULES, plan)
    for key in {"lr", "mu"} & set(plan.local.hyper):
        yield f"local.hyper.{key} has its own key: local.{key}"
    yield from _broken(STOP_RULES, plan)


def _broken(rules: Iterable[PlanRule], plan: PlanKeys) -> Iterable[str]:
    return (rule.text(plan) for rule in rules if rule.breaks(plan))


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


def _leaves_updates_out(plan: PlanKeys) -> bool:
    return plan.aggregation.aggregator != aggregators.MEAN.name


def _clips(plan: PlanKeys) -> bool:
    bound = plan.aggregation.norm_bound
    return bound is not None and bound.action == "clip"


def _with_passes() -> str:
    return " and ".join(f'"{name}"' for name, row in ALGORITHMS.items() if row.personal_passes)


def _stale(plan: PlanKeys) -> str:
    """Return the key by which stale updates come."""
    carries = plan.round.late == "carry"
    return 'late = "carry"' if carries else 'participation = "asynchronous"'


KEEPS_WHOLE = "devices keep what their whole updates made"

ALGORITHM_RULES = (
    PlanRule(
        lambda plan: plan.local.personal_epochs is not None and not plan.algorithm.personal_passes,
        lambda plan: (
            f"local.personal_epochs = {plan.local.personal_epochs} is for local.algorithm = "
            f'{_with_passes()}; here it is "{plan.local.algorithm}"'
        ),
    ),
    PlanRule(
        lambda plan: plan.algorithm.tied and _leaves_updates_out(plan),
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}" counts on what all devices that took part '
            f"keep; the aggregator {plan.aggregation.aggregator} leaves some of them out. It needs "
            'aggregation.aggregator = "mean"'
        ),
    ),
    PlanRule(
        lambda plan: plan.local.adaptive_mu and plan.local.algorithm != "plain",
        lambda plan: (
            'local.adaptive_mu = true is for local.algorithm = "plain"; mu of '
            f'"{plan.local.algorithm}" is another number'
        ),
    ),
    PlanRule(
        lambda plan: plan.local.adaptive_mu and plan.aggregation.normalise,
        lambda plan: (
            "local.adaptive_mu = true changes mu from round to round; aggregation.normalise = true "
            "needs it to stay"
        ),
    ),
    PlanRule(
        lambda plan: plan.algorithm.tied and _clips(plan),
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}": {KEEPS_WHOLE}, so these must count '
            'whole. It takes aggregation.norm_action = "refuse"'
        ),
    ),
    PlanRule(
        lambda plan: plan.algorithm.tied and plan.aggregation.has_rule,
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}" works with the mean of whole updates, '
            "without normalise or q"
        ),
    ),
    PlanRule(
        lambda plan: plan.algorithm.tied and plan.server.mix,
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}" works with the mean of several updates; '
            "server.mix = true has one at a time"
        ),
    ),
    PlanRule(
        lambda plan: (plan.server.optimizer == "feddyn") != (plan.local.algorithm == "feddyn"),
        lambda plan: (
            f'server.optimizer = "{plan.server.optimizer}" and local.algorithm = '
            f'"{plan.local.algorithm}": FedDyn needs "feddyn" for both, as recipe = "feddyn" has it'
        ),
    ),
    # The server's h must be the mean of what all devices keep, and a device keeps what its whole
    # update made, as its encoding sent it.
    PlanRule(
        lambda plan: plan.algorithm.whole_updates and plan.round.weighting != "uniform",
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}": {KEEPS_WHOLE}, so all of them must count '
            'the same. It needs round.weighting = "uniform"; here it is '
            f'"{plan.round.weighting}"'
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.algorithm.whole_updates and (plan.round.asynchronous or plan.round.late == "carry")
        ),
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}" and round.{_stale(plan)}: {KEEPS_WHOLE}, '
            "and stale ones count less. Whole ones would make the model swing ever further. It "
            "needs synchronous rounds that discard late updates"
        ),
    ),
    PlanRule(
        lambda plan: plan.algorithm.counts_devices and plan.server.devices is None,
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}" needs server.devices, the number of all '
            "devices that may take part; an estimate will do, rather too high than too low"
        ),
    ),
    PlanRule(
        lambda plan: not plan.algorithm.counts_devices and plan.server.devices is not None,
        lambda plan: (
            f'server.devices = {plan.server.devices} is for local.algorithm = "scaffold" and '
            f'"feddyn"; here it is "{plan.local.algorithm}"'
        ),
    ),
)

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


def _encoding_fault(plan: PlanKeys) -> str | None:
    try:
        find_encoding(plan.encoding.up)
    except ProtocolError as error:
        return error.text
    return None


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
        lambda plan: leaves_residual(plan.encoding.up) and _leaves_updates_out(plan),
        lambda plan: (
            f'encoding.up = "{plan.encoding.up}" leaves most elements of each update out: the '
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
        _encoding_fault,
        lambda plan: f'encoding.up = "{plan.encoding.up}": {_encoding_fault(plan)}',
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


def _target_is_unbounded(plan: PlanKeys) -> bool:
    """Whether one device's word could meet the target: it is not between finite bounds."""
    target = plan.stop.target
    if target is None:
        return False
    return not all(low < high and low <= target <= high for low, high in plan.bounds.values())


STOP_RULES = (
    PlanRule(
        lambda plan: plan.stop.target is not None and plan.stop.metric is None,
        lambda plan: (
            f"stop.target = {plan.stop.target} needs stop.metric, the name of a metric of the "
            'bundle or "loss"'
        ),
    ),
    PlanRule(
        lambda plan: plan.stop.metric is not None and plan.stop.target is None,
        lambda plan: f'stop.metric = "{plan.stop.metric}" needs stop.target, the value to stop at',
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
