"""What a run has spent of its privacy budget, and how many releases are left.

A *segment* is a stretch of a run whose releases were made under the same rules: a changed plan
begins another one. Each kind of noise here is Gaussian, and Gaussian mechanisms compose exactly: a
device's contributions move what a segment releases by at most ``Segment.mu`` standard deviations of
its noise, and all segments together by the root of the sum of the squares (Dong, Roth and Su 2022,
"Gaussian Differential Privacy", arXiv 1905.02383, corollary 3.3). So epsilon is that of one
Gaussian mechanism. The sum is over the worst case: one device takes part as often as it may in
every segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, sqrt

import msgspec

from fleetlearn_coordinator.aggregation.privacy.blt import BltStrategy, correlated_sensitivity
from fleetlearn_coordinator.aggregation.privacy.rules import Mechanism
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon, sensitivity

MOST = 2**20
"""Releases up to which it is looked how many are left."""


class Segment(msgspec.Struct, frozen=True):
    """Releases that were made one after the other under the same rules."""

    mechanism: Mechanism
    noise: float
    """The noise multiplier: standard deviation of the noise of one release, in units of the most
    that one device adds to the sum."""
    separation: int
    """Least number of releases from one participation of a device to its next."""
    participations: int
    """Most releases of the segment that one device takes part in."""
    planned: int
    """Releases for which correlated noise was made: the plan's stop.rounds."""
    rules: str = ""
    """A name of all rules of the releases: the segment ends where any of them changes. Empty: it
    has ended, whatever the rules are."""
    releases: int = 0
    """How many were made."""
    abandoned: int = 0
    """Abandoned rounds that have spent as much as a release. With mechanism local: all, as devices
    had sent their updates. With mechanism distributed: each whose sum the coordinator may have
    seen."""
    strategy: BltStrategy | None = None
    """How the noise was correlated, with mechanism dp-ftrl. It is kept, as another version of this
    package, or another machine, may find another one for the same plan."""

    @property
    def mu(self) -> float:
        """The most that one device's data move the segment's releases, in standard deviations of
        their noise.

        With mechanism local, what a device sends is what it tells, whether it counts or not: one
        update in each round, however few of them the limits let count. So it is with the sums of
        abandoned rounds, with mechanism distributed: the limits count releases alone.
        """
        if self.mechanism == "local":
            return sqrt(self.releases + self.abandoned) / self.noise
        made = self.releases, self.separation, self.participations
        if not self.releases:
            released = 0.0
        elif self.mechanism == "dp-ftrl":
            released = correlated_sensitivity(*made, self.planned, self.strategy)
        else:
            released = sensitivity(self.mechanism, *made)
        return hypot(released, sqrt(self.abandoned)) / self.noise

    def after(self, releases: int) -> Segment:
        """Return the segment after this many more releases."""
        return msgspec.structs.replace(self, releases=self.releases + releases)


def releases_of(segments: Sequence[Segment]) -> int:
    """Return how many releases were made in all segments."""
    return sum(segment.releases for segment in segments)


def spent(segments: Sequence[Segment], delta: float) -> float:
    """Return the epsilon that these releases have spent at ``delta``. Before the first one: 0.
    Raises PrivacyError where the extra ``privacy`` is not installed."""
    mu = hypot(*(segment.mu for segment in segments))
    return gaussian_epsilon(mu, delta) if mu else 0.0


def spent_after(segments: Sequence[Segment], releases: int, delta: float) -> float:
    """Return the epsilon that is spent after this many more releases of the last segment's kind."""
    return spent([*segments[:-1], segments[-1].after(releases)], delta)


def releases_left(
    segments: Sequence[Segment], epsilon: float, delta: float, most: int = MOST
) -> int:
    """Return how many more releases of the last segment's kind keep what is spent at or below
    ``epsilon``: from 0 to ``most``. More releases may cost nothing, once no device may take part
    again."""
    good, bad = 0, 1
    while spent_after(segments, min(bad, most), delta) <= epsilon:
        if bad >= most:
            return most
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        if spent_after(segments, middle, delta) <= epsilon:
            good = middle
        else:
            bad = middle
    return good


def begin_segment(segments: Sequence[Segment], new: Segment) -> list[Segment]:
    """Return the segments with which releases go on under the rules of ``new``, which counts no
    release: the last one that has any goes on where its rules are the same."""
    kept = [segment for segment in segments if segment.releases or segment.abandoned]
    if kept and msgspec.structs.replace(kept[-1], releases=0, abandoned=0) == new:
        return kept
    return [*kept, new]


class PrivacyAccount(msgspec.Struct, frozen=True):
    """What a run has spent of its budget: kept in its ledger, and shown to people."""

    segments: list[Segment]
    """The last one goes on."""
    delta: float
    budget: float | None
    """The plan's epsilon. None: the plan states a noise, and no budget."""
    epsilon: float
    """What all releases have spent at ``delta``."""
    left: int | None
    """How many more releases are within the budget. None: any number."""
    releases: int
    """How many were made in all segments."""

    def after_release(self) -> PrivacyAccount:
        """Return the account after one more release."""
        return PrivacyAccount(
            [*self.segments[:-1], self.segments[-1].after(1)],
            self.delta,
            self.budget,
            spent_after(self.segments, 1, self.delta),
            None if self.left is None else max(0, self.left - 1),
            self.releases + 1,
        )

    @property
    def is_local(self) -> bool:
        """Whether each update tells the coordinator something, so that abandoned rounds spend
        too."""
        return self.segments[-1].mechanism == "local"

    def spends_abandoned(self, *, seen: bool) -> bool:
        """Return whether a round that is abandoned spends something. ``seen``: whether the sum of
        its updates may have been seen; where devices add the noise, nobody else has added any."""
        return self.is_local or (seen and self.segments[-1].mechanism == "distributed")

    @property
    def rounds(self) -> int:
        """How many rounds have spent something: those that released a model, and the abandoned
        ones that ``spends_abandoned``."""
        return self.releases + sum(segment.abandoned for segment in self.segments)

    def after_abandoned(self, *, seen: bool = False) -> PrivacyAccount:
        """Return the account after a round that was abandoned. ``seen``: as for
        ``spends_abandoned``."""
        if not self.spends_abandoned(seen=seen):
            return self
        *earlier, last = self.segments
        last = msgspec.structs.replace(last, abandoned=last.abandoned + 1)
        # With mechanism distributed it may cost more than a release, of which limits let a device
        # be in few.
        return make_account([*earlier, last], self.budget, self.delta)


def make_account(segments: Sequence[Segment], budget: float | None, delta: float) -> PrivacyAccount:
    """Return the account of a run whose releases go on in the last of these segments. Raises
    PrivacyError where the extra ``privacy`` is not installed."""
    # Asked for in any case, so that a missing extra is said at the start.
    gaussian_epsilon(1.0, delta)
    epsilon = spent(segments, delta)
    left = None if budget is None else releases_left(segments, budget, delta)
    left = None if left == MOST else left
    return PrivacyAccount([*segments], delta, budget, epsilon, left, releases_of(segments))
