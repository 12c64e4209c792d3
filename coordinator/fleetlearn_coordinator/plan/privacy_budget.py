"""The account of a plan's privacy budget, and what the engine needs of it. The coordinator and the
simulator both stop by it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from fleetlearn_protocol.epsilon_text import budget_text, spent_text
from fleetlearn_protocol.errors import many

from fleetlearn_coordinator.aggregation.privacy.blt import BltStrategy
from fleetlearn_coordinator.aggregation.privacy.correlated import strategy_of
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.plan.privacy_section import PrivacySection
from fleetlearn_coordinator.privacy.budget import (
    PrivacyAccount,
    Segment,
    begin_segment,
    make_account,
    spent_after,
)
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.settings import ReleaseBudget


def digest_of(rules: PrivacyRules) -> str:
    """Return a name of these rules, and of how their noise is correlated: the same in every process
    that makes the same noise of the same sums."""
    named = [rules, *([strategy] if (strategy := _strategy(rules)) else [])]
    return hashlib.sha256(msgspec.json.encode(named, order="sorted")).hexdigest()


def _strategy(rules: PrivacyRules) -> BltStrategy | None:
    return strategy_of(rules) if rules.mechanism == "dp-ftrl" else None


def account_of(
    privacy: PrivacySection, rules: PrivacyRules, before: Sequence[Segment] = ()
) -> PrivacyAccount:
    """Return the account of a run with this [privacy], whose rules are ``rules``, after the
    segments ``before``. Raises PrivacyError where the extra ``privacy`` is not installed."""
    segment = Segment(
        rules.mechanism,
        rules.noise,
        rules.separation,
        rules.participations,
        rules.planned,
        digest_of(rules),
        strategy=_strategy(rules),
    )
    return make_account(begin_segment(before, segment), privacy.epsilon, privacy.delta)


def budget_of(account: PrivacyAccount) -> ReleaseBudget | None:
    """Return after how many releases the run stops, and why. None: no budget limits them."""
    if account.budget is None or account.left is None:
        return None
    rounds = account.rounds + account.left
    spent, beyond = (
        spent_after(account.segments, account.left + more, account.delta) for more in (0, 1)
    )
    told, budget = spent_text(spent, account.budget), budget_text(account.budget)
    seen = account.rounds - account.releases
    if account.is_local:
        times = many(rounds, "round")
    else:
        times = many(rounds - seen, "release")
        if seen:
            times += f" and {many(seen, 'sum')} that came to no model"
    reason = (
        f"the privacy budget is spent: epsilon {told} of {budget} after {times}; another "
        f"would make it {spent_text(beyond, account.budget)}"
    )
    finish = Finish(reason, "privacy budget", spent, account.budget)
    return ReleaseBudget(rounds, finish, account.is_local)
