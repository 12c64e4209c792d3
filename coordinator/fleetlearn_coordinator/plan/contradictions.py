"""What of a plan contradicts itself: keys that are right by themselves, and not together.

A rule is a condition and a text. The tables are read in order, and the first rule that holds is
what the author of the plan is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetlearn_coordinator.plan.aggregation_rules import contradictions_of_aggregation
from fleetlearn_coordinator.plan.algorithm_rules import ALGORITHM_RULES
from fleetlearn_coordinator.plan.clusters_rules import CLUSTERS_RULES
from fleetlearn_coordinator.plan.computation_rules import COMPUTATION_RULES
from fleetlearn_coordinator.plan.distil_rules import DISTIL_RULES
from fleetlearn_coordinator.plan.family_rules import FAMILY_RULES
from fleetlearn_coordinator.plan.model_rules import MODEL_RULES, STOP_RULES
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import broken
from fleetlearn_coordinator.plan.privacy_rules import privacy_contradictions
from fleetlearn_coordinator.plan.quality_rules import QUALITY_RULES
from fleetlearn_coordinator.plan.regions_rules import REGIONS_RULES
from fleetlearn_coordinator.plan.round_rules import ROUND_RULES, WEIGHT_RULES
from fleetlearn_coordinator.plan.scores_rules import SCORES_RULES
from fleetlearn_coordinator.plan.secure_rules import secure_contradictions
from fleetlearn_coordinator.plan.share_rules import SHARE_RULES


def contradictions(plan: PlanKeys) -> Iterable[str]:
    """Yield what of the plan contradicts itself, each with what it takes."""
    round_ = plan.round
    yield from broken(SHARE_RULES, plan)
    yield from broken(REGIONS_RULES, plan)
    yield from broken(CLUSTERS_RULES, plan)
    yield from broken(QUALITY_RULES, plan)
    yield from broken(FAMILY_RULES, plan)
    yield from broken(COMPUTATION_RULES, plan)
    yield from broken(SCORES_RULES, plan)
    yield from privacy_contradictions(plan)
    yield from secure_contradictions(plan)
    yield from broken(DISTIL_RULES, plan)
    yield from broken(MODEL_RULES, plan)
    yield from contradictions_of_aggregation(
        plan.aggregation,
        round_,
        plan.regions,
        mix=plan.server.mix,
        evaluate=plan.local.evaluate,
    )
    yield from broken(ALGORITHM_RULES, plan)
    yield from broken(WEIGHT_RULES, plan)
    yield from plan.selection.contradictions(
        asynchronous=round_.asynchronous,
        tasks=round_.goal if round_.asynchronous else round_.cohort,
    )
    yield from broken(ROUND_RULES, plan)
    for key in {"lr", "mu"} & set(plan.local.hyper):
        yield f"local.hyper.{key} has its own key: local.{key}"
    yield from broken(STOP_RULES, plan)
