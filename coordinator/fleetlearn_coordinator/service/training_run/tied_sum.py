"""Devices that lost what they kept: how SCAFFOLD's c and FedDyn's h become right again.

Both are a sum over what all devices keep, divided by their number N. A device that lost its part, such as with a new
disk, says so in its report. What it had before is in the sum for ever, and nobody knows it any more: the coordinator
never has the parts of single devices. So the sum begins again from zeros, and all devices with it, as at the run's
first round; the model stays. What devices keep has to be learnt again then. So this happens at most once in N reports:
a device that loses everything every day must not keep the others at zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from fleetlearn_protocol.messages import Report

from fleetlearn_coordinator.storage.ledger import Ledger, Metadata
from fleetlearn_coordinator.storage.stored_json import decode

TIED_SUM = "tied_sum"
"""The key of its state in the run's metadata."""


class TiedSum(NamedTuple):
    """What is known of the sum at the newest model."""

    reports: int = 0
    """How many reports it has, since it began from zeros."""
    lost: int = 0
    """How many devices' parts are in it that the devices do not have any more."""
    since: int = 0
    """The last round before it began from zeros. What came of a task of that round or an earlier one is not in it."""

    @property
    def row(self) -> Metadata:
        """What is written with the model."""
        return Metadata(TIED_SUM, msgspec.json.encode(self).decode())

    def after(self, devices: int, reports: Iterable[Report], round: int) -> TiedSum:
        """Return the state after a round with these reports. ``devices``: the plan's N. Where ``since`` is that round,
        the sum begins from zeros."""
        found = [report.lost_tied for report in reports]
        count, lost = self.reports + len(found), self.lost + sum(found)
        return TiedSum(since=round) if lost and count >= devices else TiedSum(count, lost, self.since)


def load_tied_sum(ledger: Ledger) -> TiedSum:
    """Return the state at the newest model. An earlier version wrote none."""
    saved = ledger.get(TIED_SUM)
    return TiedSum() if saved is None else decode(saved, TiedSum, "what the database says of tied vectors")
