"""Devices that lost what they kept: how SCAFFOLD's c and FedDyn's h become right again.

Both are a sum over what all devices keep, divided by their number N. A device that lost its part,
such as with a new disk, says so in its report. What it had before is in the sum for ever, and
nobody knows it any more: the coordinator never has the parts of single devices. So the sum begins
again from zeros, and all devices with it, as at the run's first round; the model stays. What
devices keep has to be learnt again then. So this happens at most once in N reports: a device that
loses everything every day must not keep the others at zeros.
"""

from __future__ import annotations

from typing import NamedTuple


class TiedSum(NamedTuple):
    """What is known of the sum at the newest model."""

    reports: int = 0
    """How many reports it has, since it began from zeros."""
    lost: int = 0
    """How many devices' parts are in it that the devices do not have any more."""
    since: int = 0
    """The last round before it began from zeros. What came of a task of that round or an earlier
    one is not in it."""

    def after(self, devices: int, reports: int, lost: int, round: int) -> TiedSum:
        """Return the state after a round with this many reports, of which ``lost`` say that their
        devices lost what they kept. ``devices``: the plan's N. Where ``since`` is that round, the
        sum begins from zeros."""
        count, missing = self.reports + reports, self.lost + lost
        if missing and count >= devices:
            return TiedSum(since=round)
        return TiedSum(count, missing, self.since)


EMPTY_SUM = TiedSum()
"""At a run's first model."""
