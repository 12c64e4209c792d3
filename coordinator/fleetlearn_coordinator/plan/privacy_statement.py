"""What a plan's [privacy] promises, computed before anything runs: for
`fleetlearn-coordinator privacy`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from statistics import NormalDist

import msgspec
from fleetlearn_protocol.epsilon_text import spent_text

from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.plan.noise_row import NoiseRow, noise_row
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.privacy_assumptions import NOT_PROTECTED, assumed
from fleetlearn_coordinator.plan.privacy_terms import (
    epsilon_after,
    privacy_rules,
    run_sensitivity,
)
from fleetlearn_coordinator.privacy.accounting import need_accounting


class EpsilonRow(msgspec.Struct, frozen=True):
    """What has been spent after some releases."""

    releases: int
    epsilon: float
    """At the plan's delta."""
    guess: float
    """The largest probability with which anybody who sees all that the run shows can say whether a
    device sent its own updates or zeros, where both are as likely before: 0.5 is a coin."""
    allowed: bool
    """Whether it is within the budget."""


class WhatIf(msgspec.Struct, frozen=True):
    """What another plan would give."""

    change: str
    epsilon: float
    """After all planned releases."""
    on_mean: float
    """Standard deviation of each element's noise on the mean."""


class Enough(msgspec.Struct, frozen=True):
    """Whether there are enough devices for one thing."""

    what: str
    needed: int
    there: int

    @property
    def holds(self) -> bool:
        return self.needed <= self.there


class PrivacyStatement(msgspec.Struct, frozen=True):
    """What ``fleetlearn-coordinator privacy`` prints."""

    run: str
    plan: str
    """The plan's file."""
    mechanism: str
    delta: float
    budget: float | None
    """privacy.epsilon."""
    planned: int
    """stop.rounds: releases that the run plans."""
    allowed: int
    """How many of them are within the budget."""
    spending: list[EpsilonRow]
    noise: NoiseRow
    assumed: list[str]
    not_protected: list[str]
    what_if: list[WhatIf]
    devices: list[Enough]
    remarks: list[str]


def privacy_statement(plan: Plan, elements: int | None) -> PrivacyStatement:
    """Return what the plan promises. ``elements``: of the bundle's model; None where it is not
    known.

    Raises PrivacyError without the extra or where no noise can be found. The plan has [privacy]."""
    privacy = plan.privacy
    assert privacy is not None
    need_accounting()
    rules = privacy_rules(plan, plan.largest_weight)
    assert rules is not None
    after = partial(epsilon_after, plan, noise=rules.noise)
    planned = plan.stop.rounds
    budget = math.inf if privacy.epsilon is None else privacy.epsilon
    allowed = bisect_right(range(1, planned + 1), budget, key=after)
    return PrivacyStatement(
        run=plan.name,
        plan=plan.file,
        mechanism=privacy.mechanism,
        delta=privacy.delta,
        budget=privacy.epsilon,
        planned=planned,
        allowed=allowed,
        spending=[
            EpsilonRow(releases, after(releases), best_guess(plan, releases, rules.noise), fits)
            for releases in _shown(planned, allowed)
            for fits in (releases <= allowed,)
        ],
        noise=noise_row(plan, rules, elements),
        assumed=[*assumed(plan, rules)],
        not_protected=[*NOT_PROTECTED],
        what_if=[*_what_if(plan, rules)],
        devices=_devices(plan, plan.round.goal),
        remarks=[*_remarks(plan, allowed, after(planned))],
    )


def best_guess(plan: Plan, releases: int, noise: float) -> float:
    """Return ``EpsilonRow.guess``. One Gaussian mechanism with sensitivity / noise = mu is told
    from the other side with a probability of Phi(mu / 2) (Dong, Roth and Su, arXiv 1905.02383,
    equation 4); with Poisson sampling it is at most (exp(epsilon) + delta) / (1 + exp(epsilon))."""
    privacy = plan.privacy
    assert privacy is not None
    if privacy.sampling == "poisson":
        odds = math.exp(-epsilon_after(plan, releases, noise))
        return min(1.0, (1 + privacy.delta * odds) / (1 + odds))
    return NormalDist().cdf(run_sensitivity(privacy, releases, plan.stop.rounds) / noise / 2)


def _shown(planned: int, allowed: int) -> list[int]:
    """Return after which releases epsilon is shown: 1, 10, 100 and so on, the last that the budget
    allows, and the last that is planned."""
    tens = {10**power for power in range(10) if 10**power < planned}
    return sorted({*tens, planned} | ({allowed} if allowed else set()))


def _what_if(plan: Plan, rules: PrivacyRules) -> Iterator[WhatIf]:
    privacy, goal = plan.privacy, rules.goal
    assert privacy is not None
    now = noise_row(plan, rules, None).on_mean
    planned = plan.stop.rounds
    larger = msgspec.structs.replace(
        plan, round=msgspec.structs.replace(plan.round, goal=10 * goal)
    )
    grown = math.sqrt(10) if rules.mechanism == "local" else 10.0
    yield WhatIf("this plan", epsilon_after(plan, planned, rules.noise), now)
    grows = f"goal = {10 * goal}"
    if rules.mechanism == "distributed" and plan.secure is not None:
        grows += f" and secure.minimum = {10 * plan.secure.minimum}"
    yield WhatIf(
        f"{grows}, the same noise on the mean (noise = {rules.noise * grown:.4g})",
        epsilon_after(larger, planned, rules.noise * grown),
        now,
    )
    yield WhatIf(
        f"{grows}, the same noise multiplier",
        epsilon_after(larger, planned, rules.noise),
        now / grown,
    )


def _devices(plan: Plan, goal: int) -> list[Enough]:
    """Return whether there are enough devices for full rounds of ``goal`` to the end of the run."""
    privacy, planned = plan.privacy, plan.stop.rounds
    assert privacy is not None
    most = privacy.most_of(planned)
    return [
        Enough("devices for one full round: goal", goal, privacy.population),
        Enough(
            "devices that wait for their next turn: separation x goal",
            privacy.separation * goal,
            privacy.population,
        ),
        Enough(
            "participations: stop.rounds x goal",
            planned * goal,
            privacy.population * most,
        ),
    ]


def _remarks(plan: Plan, allowed: int, last: float) -> Iterator[str]:
    """Yield what whoever decides about the plan should not miss."""
    privacy, planned = plan.privacy, plan.stop.rounds
    assert privacy is not None
    if not allowed:
        yield "The budget does not allow one release: the coordinator refuses to start this run."
    elif allowed < planned:
        yield (
            f"The run stops at its budget, after {allowed} of the {planned} releases that "
            "stop.rounds plans."
        )
    if privacy.epsilon is None:
        yield "There is no budget (privacy.epsilon): the run stops by [stop] alone."
    reached = min(last, privacy.epsilon or math.inf)
    if reached > WEAK:
        told = spent_text(reached, privacy.epsilon, 4)
        yield (
            f"epsilon = {told} promises little: see the right guesses. "
            f"Below {WEAK:g} is what the field calls reasonable, below 1 strong."
        )
    if 10 * plan.round.goal * privacy.separation > privacy.population:
        needed = 10 * plan.round.goal * privacy.separation
        yield (
            f"Ten times the goal needs a population of {needed} or more (separation x goal); it is "
            f"{privacy.population}."
        )


WEAK = 10.0
"""Ponomareva et al., "How to DP-fy ML", arXiv 2303.00654, section 5.2: tier 2 is epsilon <= 10,
"reasonable"; tier 1 is <= 1, "strong"; tier 3, above, "weak to no"."""
