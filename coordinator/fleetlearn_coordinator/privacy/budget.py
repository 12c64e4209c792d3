"""What a run has spent of its privacy budget, and how many releases are left.

A *segment* is a stretch of a run whose releases were made under the same parameters: a changed plan
begins another one. Each kind of noise here is Gaussian, and Gaussian mechanisms compose exactly: a
device's contributions move what a segment releases by at most ``Segment.mu`` standard deviations of
its noise, and all segments together by the root of the sum of the squares (Dong, Roth and Su 2022,
"Gaussian Differential Privacy", arXiv 1905.02383, corollary 3.3). So epsilon is that of one
Gaussian mechanism. The sum is over the worst case: one device takes part as often as it may in
every segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot

import msgspec

from fleetlearn_coordinator.aggregation.privacy.rules import Mechanism
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon, sensitivity


class Segment(msgspec.Struct, frozen=True):
    """Releases that were made one after the other under the same parameters."""

    mechanism: Mechanism
    noise: float
    """The noise multiplier: standard deviation of the noise of one release, in units of the most
    that one device adds to the sum."""
    clip: float
    """The clip norm of the plan, with which the segment began."""
    separation: int
    """Least number of releases from one participation of a device to its next."""
    participations: int
    """Most releases of the segment that one device takes part in."""
    largest_weight: int = 1
    """Most that one update weighs."""
    slack: float = 0.0
    """By how much rounding makes the sensitivity larger, as a fraction, where the noise does not
    contain it already."""
    releases: int = 0
    """How many were made."""

    @property
    def mu(self) -> float:
        """The most that one device's data move the segment's releases, in standard deviations of
        their noise."""
        if not self.releases:
            return 0.0
        moved = sensitivity(self.mechanism, self.releases, self.separation, self.participations)
        return moved * (1.0 + self.slack) / self.noise

    def after(self, releases: int) -> Segment:
        """Return the segment after this many more releases."""
        return msgspec.structs.replace(self, releases=self.releases + releases)


def releases_of(segments: Sequence[Segment]) -> int:
    """Return how many releases were made in all segments."""
    return sum(segment.releases for segment in segments)


def spent(segments: Sequence[Segment], delta: float) -> float:
    """Return the epsilon that these releases have spent at ``delta``. Before the first one: 0."""
    mu = hypot(*(segment.mu for segment in segments))
    return gaussian_epsilon(mu, delta) if mu else 0.0


def releases_left(segments: Sequence[Segment], epsilon: float, delta: float, most: int) -> int:
    """Return how many more releases of the last segment's kind keep what is spent at or below
    ``epsilon``: from 0 to ``most``. More releases may cost nothing, once no device may take part
    again."""

    def fits(releases: int) -> bool:
        return spent([*segments[:-1], segments[-1].after(releases)], delta) <= epsilon

    if not fits(1):
        return 0
    if fits(most):
        return most
    good, bad = 1, most
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def begin_segment(segments: Sequence[Segment], new: Segment) -> list[Segment]:
    """Return the segments with which releases go on under the parameters of ``new``, which counts
    no release: the last one goes on where its parameters are the same, also if it is empty. An
    empty one with others is left out."""
    if segments and msgspec.structs.replace(segments[-1], releases=0) == new:
        return [*segments]
    return [*(segment for segment in segments if segment.releases), new]
