"""What of a plan contradicts its local algorithm."""

from __future__ import annotations

from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, leaves_updates_out


def _clips(plan: PlanKeys) -> bool:
    bound = plan.aggregation.norm_bound
    return bound is not None and bound.action == "clip"


def _with_passes() -> str:
    return " and ".join(
        f'"{name}"' for name, algorithm in ALGORITHMS.items() if algorithm.personal_passes
    )


def _weighing(plan: PlanKeys) -> str:
    """Return the key that weighs updates by a rule, with its value."""
    if plan.aggregation.weighing is not None:
        return f'weighing = "{plan.aggregation.weighing}"'
    return "normalise = true" if plan.aggregation.normalise else f"q = {plan.aggregation.q:g}"


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
        lambda plan: plan.algorithm.tied and leaves_updates_out(plan),
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}" counts on what all devices that took part '
            f"keep; the aggregator {plan.aggregation.aggregator} leaves some of them out. It needs "
            'aggregation.aggregator = "mean"'
        ),
    ),
    PlanRule(
        lambda plan: not plan.algorithm.sums_gradients and plan.aggregation.has_rule,
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}": an update is no sum of gradients, as '
            "aggregation.normalise, aggregation.q and aggregation.weighing take it. It needs none"
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
        lambda plan: plan.local.schedule is not None and plan.aggregation.q is not None,
        lambda plan: (
            f"[local.schedule] with aggregation.q = {plan.aggregation.q:g}: q-FedAvg takes 1 / lr "
            "for a constant of the loss, in each round the same. It takes a fixed local.lr"
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.local.step_schedule is not None
            and (plan.aggregation.normalise or plan.aggregation.q is not None)
        ),
        lambda plan: (
            f"[local.step_schedule] with aggregation.{_weighing(plan)}: it is worked out from the "
            "learning rate of a device's steps, all the same. It takes a fixed local.lr, or "
            "[local.schedule], which changes it by rounds"
            if plan.aggregation.normalise
            else f"[local.step_schedule] with aggregation.{_weighing(plan)}: q-FedAvg takes 1 / lr "
            "for a constant of the loss, at each step the same. It takes a fixed local.lr"
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
            "without normalise, q or weighing"
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
