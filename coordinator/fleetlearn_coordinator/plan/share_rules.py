"""What of a plan does not go together with rounds whose goal is a share of the devices."""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule


def _share_rule(breaks: Callable[[PlanKeys], object], why: str) -> PlanRule:
    """Return a rule that only plans with ``round.goal_share`` must keep. ``why``: what it does not
    go with, the reason, and what to do."""
    return PlanRule(
        lambda plan: plan.round.goal_share is not None and breaks(plan),
        lambda plan: f"round.goal_share = {plan.round.goal_share:g} {why}",
    )


SHARE_RULES = (
    PlanRule(
        lambda plan: plan.round.minimum_share is not None and plan.round.goal_share is None,
        lambda plan: (
            f"round.minimum_share = {plan.round.minimum_share:g} is a share of each round's own "
            "goal: it needs round.goal_share. Where all rounds have the same goal, round.minimum "
            "says how many reports they need"
        ),
    ),
    _share_rule(
        lambda plan: plan.round.asynchronous,
        'and round.participation = "asynchronous": round.goal is then how many updates are '
        "buffered, and devices come and go while the buffer fills, so that there is no moment at "
        'which to count them. It takes "synchronous"',
    ),
    _share_rule(
        lambda plan: plan.regions is not None,
        "with [regions]: each region has a goal of its own, and a round needs devices in each of "
        "them. It takes rounds without regions",
    ),
    _share_rule(
        lambda plan: plan.clusters is not None,
        "with [clusters]: before each round a fixed number of devices says which model fits its "
        "data best, and they alone train. Set round.goal alone",
    ),
    _share_rule(
        lambda plan: plan.privacy is not None,
        "with [privacy]: the noise of a release, and how likely a device is to be in it, are "
        "computed for one goal that the plan states. With a goal that follows from who happens to "
        "be there, the stated epsilon would be wrong. Set round.goal alone",
    ),
    _share_rule(
        lambda plan: plan.secure is not None,
        "with [secure]: how many bits an element has, and of how many devices any sum must be, is "
        "fixed for one size of a round, and devices sign it. Set round.goal alone",
    ),
)
