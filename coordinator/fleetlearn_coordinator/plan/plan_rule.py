"""A rule that a plan must keep: a condition under which the plan makes no sense, and a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fleetlearn_coordinator.aggregation import aggregators
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.privacy_section import PrivacySection


class PlanRule(NamedTuple):
    """Something that makes no sense in a plan."""

    breaks: Callable[[PlanKeys], object]
    """Says whether the plan breaks the rule: whatever Python takes for true."""
    text: Callable[[PlanKeys], str]
    """The keys, what they say, and what is allowed."""


def broken(rules: Iterable[PlanRule], plan: PlanKeys) -> Iterable[str]:
    return (rule.text(plan) for rule in rules if rule.breaks(plan))


def leaves_updates_out(plan: PlanKeys) -> bool:
    return plan.aggregation.aggregator != aggregators.MEAN.name


def private_rule(
    breaks: Callable[[PlanKeys, PrivacySection], object],
    text: Callable[[PlanKeys, PrivacySection], str],
) -> PlanRule:
    """Return a rule that only plans with [privacy] must keep."""

    def told(plan: PlanKeys) -> str:
        assert plan.privacy is not None
        return text(plan, plan.privacy)

    return PlanRule(lambda plan: plan.privacy is not None and breaks(plan, plan.privacy), told)
