"""What of a plan contradicts its [privacy] about who takes part, and in how many releases."""

from __future__ import annotations

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import private_rule

MOST_CORRELATED = 100_000
"""Most releases that correlated noise is made for: its search takes a second for so many."""


def _fixed_size(plan: PlanKeys) -> str:
    """Return what of the plan is no round of independent coins."""
    privacy = plan.privacy
    assert privacy is not None
    if privacy.mechanism != "gaussian":
        return f'privacy.mechanism = "{privacy.mechanism}"'
    if plan.round.asynchronous:
        return 'round.participation = "asynchronous"'
    if plan.round.late == "carry":
        return 'round.late = "carry"'
    return f"privacy.separation = {privacy.separation}"


RELEASE_RULES = (
    private_rule(
        lambda plan, privacy: privacy.mechanism == "dp-ftrl" and plan.stop.rounds > MOST_CORRELATED,
        lambda plan, privacy: (
            f'stop.rounds = {plan.stop.rounds} with privacy.mechanism = "dp-ftrl": the noise is '
            "made for the rounds that are planned, and the more there are the larger it is. State "
            f"how many rounds there will be, up to {MOST_CORRELATED}"
        ),
    ),
    private_rule(
        lambda plan, privacy: (
            privacy.sampling == "poisson"
            and (
                privacy.mechanism != "gaussian"
                or plan.round.asynchronous
                or plan.round.late == "carry"
                or privacy.separation > 1
            )
        ),
        lambda plan, privacy: (
            f'privacy.sampling = "poisson" with {_fixed_size(plan)}: the smaller epsilon holds '
            "where each device takes part in each release by a coin of its own, whatever it did "
            "before, and with noise of its own for each release. It needs mechanism = "
            '"gaussian", synchronous rounds that discard late updates, and separation = 1'
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.population < plan.round.goal,
        lambda plan, privacy: (
            f"privacy.population = {privacy.population} is less than round.goal = "
            f"{plan.round.goal}: no round could be full"
        ),
    ),
    private_rule(
        lambda plan, privacy: privacy.separation * plan.round.minimum > privacy.population,
        lambda plan, privacy: (
            f"privacy.separation = {privacy.separation} releases of at least round.minimum = "
            f"{plan.round.minimum} devices need {privacy.separation * plan.round.minimum} devices, "
            f"and privacy.population is {privacy.population}: the run would come to a round for "
            "which no device may take part yet, and wait for ever. It takes a separation of at "
            f"most {privacy.population // plan.round.minimum}"
        ),
    ),
    private_rule(
        lambda plan, privacy: (
            plan.stop.rounds * plan.round.minimum
            > privacy.population * privacy.most_of(plan.stop.rounds)
        ),
        lambda plan, privacy: (
            f"stop.rounds = {plan.stop.rounds} releases of at least round.minimum = "
            f"{plan.round.minimum} devices need {plan.stop.rounds * plan.round.minimum} "
            f"participations, and privacy.population = {privacy.population} devices have "
            f"{privacy.population * privacy.most_of(plan.stop.rounds)} of them, at most "
            f"{privacy.most_of(plan.stop.rounds)} each: the run could never end. It takes "
            "more privacy.participations, or fewer rounds"
        ),
    ),
)
