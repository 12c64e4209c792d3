"""What of a plan does not go together with a family: with several models in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleetlearn_protocol.manifest import Manifest

from fleetlearn_coordinator.plan.family_section import MAX_MEMBERS
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, leaves_updates_out


def _family_rule(breaks: Callable[[PlanKeys], object], text: Callable[[PlanKeys], str]) -> PlanRule:
    """Return a rule that only plans with several models must keep."""
    return PlanRule(
        lambda plan: plan.is_family and breaks(plan),
        lambda plan: f"{_which(plan)} and {text(plan)}",
    )


def _which(plan: PlanKeys) -> str:
    """Return what makes the plan a family's, as its author wrote it."""
    return "[family]" if plan.family else "[clusters]"


def _refusal_follows_quantile(plan: PlanKeys) -> bool:
    bound = plan.aggregation.norm_bound
    return bound is not None and bound.action == "refuse" and bound.quantile is not None


FAMILY_RULES = (
    _family_rule(
        lambda plan: len(plan.members) > MAX_MEMBERS,
        lambda plan: f"{len(plan.members)} members: it takes 1 to {MAX_MEMBERS}",
    ),
    _family_rule(
        lambda plan: plan.family and plan.initial is not None,
        lambda plan: (
            f"initial = {str(plan.initial)!r}: it is one model, and each member begins with its "
            "bundle's model"
        ),
    ),
    _family_rule(
        lambda plan: plan.secure is not None,
        lambda plan: (
            "[secure]: a sum of masked updates is of one model, and must be of secure.minimum "
            "devices; how many a member has in a round is not known before they are masked"
        ),
    ),
    _family_rule(
        lambda plan: plan.privacy is not None,
        lambda plan: (
            "[privacy]: its noise and its epsilon are for the release of one model in a round, and "
            "for devices whose model does not depend on what they are"
        ),
    ),
    _family_rule(
        lambda plan: plan.algorithm.computes,
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}": a computation has one state, which no '
            "member's devices could bring forward alone. Give each computation a run of its own"
        ),
    ),
    _family_rule(
        lambda plan: plan.algorithm.tied,
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}": what devices keep is tied to what the '
            "coordinator keeps of one model, and a device may train another one next time. It "
            "takes an algorithm that keeps nothing tied, such as recipe fedavg or fedprox"
        ),
    ),
    _family_rule(
        lambda plan: plan.encoding.leaves_residual,
        lambda plan: (
            f'encoding.up = "{plan.encoding.up}": what it leaves out of an update is added to the '
            "device's next one, which may be of another model"
        ),
    ),
    _family_rule(
        leaves_updates_out,
        lambda plan: (
            f'aggregation.aggregator = "{plan.aggregation.aggregator}": it needs a least number of '
            "updates of one model, and round.minimum counts those of all members together. It "
            'takes "mean"'
        ),
    ),
    _family_rule(
        _refusal_follows_quantile,
        lambda plan: (
            'aggregation.norm_action = "refuse" with aggregation.norm_quantile: the bound would '
            'follow refused updates of all members together. It takes norm_action = "clip"'
        ),
    ),
    _family_rule(
        lambda plan: plan.local.adaptive_mu,
        lambda plan: (
            "local.adaptive_mu = true: mu follows the loss of one model. It takes a fixed local.mu"
        ),
    ),
)
"""Each with its reason. docs/algorithms/families.md lists them for people."""


def family_misfit(manifests: Mapping[str, Manifest]) -> str | None:
    """Return why these bundles, by their members' names, cannot be one family, and what to do.
    None: they can."""
    (first, one), *others = manifests.items()
    for name, other in others:
        if {*other.metrics} != {*one.metrics}:
            return (
                f"[family]: member {first} measures {_listed(one)}, and member {name} "
                f"{_listed(other)}. The round's metrics are means over the devices of all members: "
                "export the bundles with the same metrics"
            )
    return None


def _listed(manifest: Manifest) -> str:
    return " and ".join(["loss", *sorted(manifest.metrics)])
