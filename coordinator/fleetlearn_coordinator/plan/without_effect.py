"""Values of a plan that change nothing: keys that are right, and whose time never comes. A run
begins all the same; its log and ``doctor`` say them."""

from __future__ import annotations

from collections.abc import Iterable

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, broken
from fleetlearn_coordinator.plan.schedule_section import schedule_remarks


def _between_measurements(plan: PlanKeys) -> int | None:
    """Return how many rounds are between two models whose stop.metric is measured. None: they are
    measured when somebody asks for it."""
    apart = {"evaluation": plan.evaluation.every, "held-out": plan.evaluation.data_every}
    return apart.get(plan.stop.measured_by, 1)


def _most_measured(plan: PlanKeys) -> int:
    """Return how many models are measured by stop.metric until stop.rounds, at most; the initial
    one and the last one among them."""
    apart = _between_measurements(plan)
    return 2**31 if apart is None else 2 + (plan.stop.rounds - 1) // apart


WITHOUT_EFFECT = (
    PlanRule(
        lambda plan: plan.stop.patience is not None and plan.stop.patience >= _most_measured(plan),
        lambda plan: (
            f"stop.patience = {plan.stop.patience} and stop.rounds = {plan.stop.rounds}: at most "
            f"{_most_measured(plan)} models are measured until then, and patience never ends the "
            "run"
        ),
    ),
    PlanRule(
        lambda plan: plan.models.every is not None and plan.models.every > plan.stop.rounds,
        lambda plan: (
            f"models.every = {plan.models.every} and stop.rounds = {plan.stop.rounds}: no version "
            "is kept for that"
        ),
    ),
    PlanRule(
        lambda plan: plan.evaluation.data_every != 1 and plan.evaluation.data is None,
        lambda plan: (
            f"evaluation.data_every = {plan.evaluation.data_every} is for held-out data, and there "
            "is no evaluation.data"
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.models.best is not None
            and plan.models.measured_by == "evaluation"
            and plan.evaluation.every is None
        ),
        lambda plan: (
            f'models.best = {plan.models.best} with models.measured_by = "evaluation" and no '
            "evaluation.every: a model is measured only when somebody asks for it"
        ),
    ),
    PlanRule(
        lambda plan: (
            plan.models.best is not None
            and plan.models.measured_by == "round"
            and not plan.local.evaluate
        ),
        lambda plan: (
            f"models.best = {plan.models.best} with local.evaluate = false: the devices of a round "
            "measure no model"
        ),
    ),
)


def without_effect(plan: PlanKeys) -> Iterable[str]:
    """Yield what of the plan changes nothing, each with the reason."""
    yield from schedule_remarks(plan.local.schedule, plan.local.step_schedule, plan.stop.rounds)
    yield from broken(WITHOUT_EFFECT, plan)
