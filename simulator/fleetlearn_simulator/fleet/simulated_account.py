"""What the releases of a simulated private run have spent of its budget. It follows from the plan
and from how many there were: a simulation has one plan, and no roll backs."""

from __future__ import annotations

from typing import Any

from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.privacy_budget import account_of, budget_of
from fleetlearn_coordinator.plan.privacy_terms import epsilon_after
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.rounds.settings import ReleaseBudget
from fleetlearn_protocol.epsilon_text import budget_text, spent_text

from fleetlearn_simulator.fleet.sent_updates import DeviceNoise

POISSON_POINTS = 10
"""With Poisson sampling epsilon is computed after so many numbers of releases, for each takes a
second or more. In between, the next one's is told, which is an upper bound."""


class SimulatedAccount:
    """The account of a simulated run."""

    def __init__(self, plan: Plan, rules: PrivacyRules) -> None:
        """``plan``: one whose budget allows a release (``Plan.check_against``)."""
        assert plan.privacy is not None
        self.plan, self.rules, self.terms = plan, rules, plan.privacy
        self.is_poisson = plan.privacy.sampling == "poisson"
        self.limit = (
            self._poisson_limit() if self.is_poisson else budget_of(account_of(self.terms, rules))
        )
        """After how many releases the run stops. None: no budget limits them."""

    def summary(self, releases: int, abandoned: int = 0) -> dict[str, Any]:
        """Return what a round's summary says after this many releases, as the coordinator's does.
        ``abandoned``: rounds without a release. Where devices add the noise they spend as much."""
        rounds = releases + (abandoned if self.rules.mechanism == "local" else 0)
        left = None if self.limit is None else max(0, self.limit.releases - rounds)
        return {
            "release": releases,
            "epsilon": self._epsilon(self._counted(rounds)),
            "delta": self.terms.delta,
            "of": self.terms.epsilon,
            "left": left,
        }

    def _counted(self, releases: int) -> int:
        """Return the number of releases whose epsilon is told after this many."""
        if not self.is_poisson:
            return releases
        planned = self.plan.stop.rounds
        step = -(-planned // POISSON_POINTS)
        return max(releases, min(-(-releases // step) * step, planned))

    def _epsilon(self, releases: int) -> float:
        return epsilon_after(self.plan, releases, self.rules.noise)

    def _poisson_limit(self) -> ReleaseBudget | None:
        """Return the limit where the budget ends before ``stop.rounds``."""
        budget, planned = self.terms.epsilon, self.plan.stop.rounds
        if budget is None or self._epsilon(planned) <= budget:
            return None
        good, bad = 1, planned  # one release is within the budget (``Plan.check_against``)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._epsilon(middle) <= budget else (good, middle)
        spent = self._epsilon(good)
        told, of = spent_text(spent, budget), budget_text(budget)
        reason = f"the privacy budget is spent: epsilon {told} of {of} after {good:,} releases"
        return ReleaseBudget(good, Finish(reason, "privacy budget", spent, budget))


def device_noise(rules: PrivacyRules | None, seed: int) -> DeviceNoise | None:
    """Return the noise that the devices of a run add themselves. None: they add none."""
    if rules is None or rules.mechanism != "local":
        return None
    return DeviceNoise(rules.noise * rules.clip, seed)
