"""What a plan's [privacy] comes to: its noise, and the rules of its releases."""

from __future__ import annotations

import math

from fleetlearn_protocol.epsilon_text import budget_text, spent_text
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.weighing.norm_bound import Enforced, NormBound
from fleetlearn_coordinator.plan.distributed_noise import device_noise, survivors
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.privacy_section import METRICS_SHARE, PrivacySection
from fleetlearn_coordinator.privacy import accounting
from fleetlearn_coordinator.privacy.accounting import PrivacyError


def run_sensitivity(privacy: PrivacySection, releases: int, planned: int) -> float:
    """Return how far one device can move the first ``releases`` sums together, of ``planned``, in
    units of C."""
    return accounting.sensitivity(
        privacy.mechanism, releases, privacy.separation, privacy.participations, planned
    )


def sampling_rate(plan: PlanKeys) -> float:
    """Return the probability with which a device takes part in a round of Poisson sampling."""
    assert plan.privacy is not None
    return min(1.0, plan.round.goal / plan.privacy.population)


def noise_multiplier(plan: PlanKeys) -> float:
    """Return the noise multiplier: the plan's, else the least with which stop.rounds releases are
    within the budget. Raises PrivacyError where it cannot be found, or the extra is missing."""
    privacy, rounds = plan.privacy, plan.stop.rounds
    assert privacy is not None
    if privacy.noise is not None:
        return privacy.noise
    assert privacy.epsilon is not None, "a plan has at least one of the two"
    if privacy.sampling == "poisson":
        rate = sampling_rate(plan)
        return accounting.poisson_noise_for(privacy.epsilon, privacy.delta, rate, rounds)
    moved = run_sensitivity(privacy, rounds, rounds)
    return accounting.noise_for(privacy.epsilon, privacy.delta, moved)


def epsilon_after(plan: PlanKeys, releases: int, noise: float) -> float:
    """Return epsilon at privacy.delta of the run's first ``releases`` releases with this noise
    multiplier. Raises PrivacyError without the extra."""
    privacy = plan.privacy
    assert privacy is not None
    if privacy.sampling == "poisson":
        rate = sampling_rate(plan)
        return accounting.poisson_epsilon(noise, rate, releases, privacy.delta)
    moved = run_sensitivity(privacy, releases, plan.stop.rounds)
    return accounting.gaussian_epsilon(moved / noise, privacy.delta)


def private_bound(privacy: PrivacySection, largest_weight: int, size: int) -> NormBound | None:
    """Return the bound on updates that the coordinator enforces, whatever devices have done before.
    ``size``: of the model. None with mechanism = "local": updates come with noise, which makes them
    longer than the clip norm, and what is done with them then costs no privacy."""
    if privacy.mechanism == "local":
        return None
    return NormBound(
        privacy.clip,
        "clip",
        privacy.clip_quantile,
        privacy.clip_rate or 0.2,
        Enforced(largest_weight, size),
    )


def privacy_rules(plan: PlanKeys, largest_weight: int) -> PrivacyRules | None:
    """Return the rules of the plan's releases, or None without [privacy]. Raises PrivacyError as
    ``noise_multiplier`` does, where what a round releases beside the mean leaves it none, and as
    ``device_noise`` does."""
    privacy = plan.privacy
    if privacy is None:
        return None
    noise = noise_multiplier(plan)
    measured = privacy.metrics == "noised"
    rules = PrivacyRules(
        mechanism=privacy.mechanism,
        noise=noise,
        clip=privacy.clip,
        clip_quantile=privacy.clip_quantile,
        clip_rate=privacy.clip_rate or 0.2,
        goal=plan.round.goal,
        largest_weight=largest_weight,
        separation=privacy.separation,
        participations=privacy.participations,
        planned=plan.stop.rounds,
        survivors=survivors(plan),
        metrics=measured,
        metrics_noise=(privacy.metrics_noise or noise / math.sqrt(METRICS_SHARE))
        if measured
        else None,
        metric_bounds=privacy.metrics_bounds if measured else {},
    )
    device_noise(plan, noise)
    try:
        _ = rules.split
    except ValueError as error:
        raise PrivacyError(Code.BAD_MESSAGE, str(error)) from None
    return rules


def check_budget(plan: PlanKeys) -> None:
    """Raise PrivacyError where the extra is missing, no noise can be found, or the budget does not
    allow one release."""
    privacy = plan.privacy
    if privacy is None:
        return
    accounting.need_accounting()
    rules = privacy_rules(plan, 1)
    assert rules is not None
    if privacy.epsilon is None:
        return
    first = epsilon_after(plan, 1, rules.noise)
    if first > privacy.epsilon:
        raise PrivacyError(
            Code.BAD_MESSAGE,
            f"privacy.epsilon = {budget_text(privacy.epsilon)} does not allow one release: with "
            f"privacy.noise = {rules.noise:g} the first one alone costs "
            f"{spent_text(first, digits=4)}. It takes a larger epsilon, or more noise; without "
            "privacy.noise the noise for stop.rounds releases is computed",
        )
