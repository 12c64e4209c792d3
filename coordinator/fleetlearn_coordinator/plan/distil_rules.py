"""What contradicts [distil] in a plan, each with its reason."""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_coordinator.aggregation.robust.kept_updates import MAX_KEPT
from fleetlearn_coordinator.plan.distil_section import DistilSection
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, leaves_updates_out

DEVICES = 'distil.teachers = "devices"'


def _rule(
    breaks: Callable[[PlanKeys, DistilSection], object], text: Callable[[PlanKeys], str]
) -> PlanRule:
    """Return a rule that only plans with [distil] must keep."""
    return PlanRule(lambda plan: plan.distil is not None and breaks(plan, plan.distil), text)


def _by_devices(breaks: Callable[[PlanKeys], object], text: Callable[[PlanKeys], str]) -> PlanRule:
    """Return a rule for plans whose teachers are the devices' own models."""
    return _rule(lambda plan, distil: distil.teachers == "devices" and breaks(plan), text)


def _clips(plan: PlanKeys) -> bool:
    bound = plan.aggregation.norm_bound
    return bound is not None and bound.action == "clip"


def _nameless(plan: PlanKeys) -> list[str]:
    """Return the members that name no distillation bundle."""
    return [name for name, member in plan.family.items() if member.distil is None]


DISTIL_RULES = (
    PlanRule(
        lambda plan: plan.distil is None and len(_nameless(plan)) < len(plan.family),
        lambda plan: (
            "[family] names distillation bundles, which [distil] uses: add [distil] with data, or "
            "leave distil out"
        ),
    ),
    _rule(
        lambda plan, distil: plan.family and (distil.bundle is not None or _nameless(plan)),
        lambda plan: (
            "[distil] with [family]: each member names its own distillation bundle, as "
            f"family.{next(iter([*_nameless(plan), *plan.family]))}.distil, and distil.bundle is "
            "left out"
        ),
    ),
    _rule(
        lambda plan, distil: not plan.family and distil.bundle is None,
        lambda plan: (
            "distil.bundle is missing: it names what export_distillation makes of the model of "
            "the plan's bundle"
        ),
    ),
    _rule(
        lambda plan, distil: distil.teachers == "members" and not plan.is_family,
        lambda plan: (
            'distil.teachers = "members" is for a family of several models: a model that is its '
            f"own teacher learns nothing. It needs {DEVICES}"
        ),
    ),
    _rule(
        lambda plan, distil: plan.round.asynchronous or plan.round.late == "carry",
        lambda plan: (
            "[distil] with round."
            + ('late = "carry"' if plan.round.late == "carry" else 'participation = "asynchronous"')
            + ": teachers are models of one round, and stale updates began from other models. It "
            'needs round.participation = "synchronous" with round.late = "discard"'
        ),
    ),
    _rule(
        lambda plan, distil: plan.algorithm.tied,
        lambda plan: (
            f'[distil] with local.algorithm = "{plan.local.algorithm}": what devices keep follows '
            "from the updates alone, and does not fit a model that has changed since. It needs "
            'local.algorithm = "plain"'
        ),
    ),
    _by_devices(
        lambda plan: plan.secure is not None,
        lambda plan: (
            f"{DEVICES} with [secure]: the teachers are single devices' models, and the "
            "coordinator knows the sum of the updates alone. Leave [distil] or [secure] out"
        ),
    ),
    _by_devices(
        lambda plan: plan.privacy is not None,
        lambda plan: (
            f"{DEVICES} with [privacy]: what a single device's model teaches would reach the "
            "model without noise, which is added to the mean of the updates. Leave [distil] or "
            "[privacy] out"
        ),
    ),
    _by_devices(
        leaves_updates_out,
        lambda plan: (
            f'{DEVICES} with aggregation.aggregator = "{plan.aggregation.aggregator}": each '
            "teacher's logits count, so that one hostile device could teach anything, which the "
            'aggregator is to prevent. It needs aggregation.aggregator = "mean"'
        ),
    ),
    _by_devices(
        _clips,
        lambda plan: (
            f"{DEVICES} with aggregation.max_norm = {plan.aggregation.max_norm:g}: a longer "
            "update is shortened in the mean, and its device's model would teach as it is. It "
            'needs aggregation.norm_action = "refuse"'
        ),
    ),
    _by_devices(
        lambda plan: plan.round.goal > MAX_KEPT,
        lambda plan: (
            f"round.goal = {plan.round.goal}: {DEVICES} keeps a round's updates, at most {MAX_KEPT}"
        ),
    ),
)
