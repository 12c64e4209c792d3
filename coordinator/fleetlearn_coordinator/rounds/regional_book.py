"""The lease book of rounds with regions: it also counts the leases and reports of each region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleetlearn_coordinator.rounds.lease_book import LeaseBook, Terms


@dataclass(slots=True)
class RegionalBook(LeaseBook):
    """A lease book in which each lease has a region (``Terms.region``)."""

    running: Counter[str] = field(default_factory=Counter)
    """Region -> its leases that run."""
    reported: Counter[str] = field(default_factory=Counter)
    """Region -> its reports of the open round."""
    over: dict[str, bool] = field(default_factory=dict)
    """Region whose part of the open round is over -> whether it is done. Otherwise it has
    failed."""

    def give(self, devices: Sequence[str], tasks: Sequence[str], terms: Terms, now: float) -> None:
        LeaseBook.give(self, devices, tasks, terms, now)
        self._count(self.running, terms, len(devices))

    def complete(
        self, devices: Sequence[str], tasks: Sequence[str], *, early: bool = False
    ) -> Sequence[str]:
        for device in devices:
            self._count(self.reported, self.terms[device], 1)
        return LeaseBook.complete(self, devices, tasks, early=early)

    def revive(self, device: str, task: str, ends: float) -> bool:
        revived = LeaseBook.revive(self, device, task, ends)
        if revived:
            self._count(self.running, self.terms[device], 1)
        return revived

    def _release(self, devices: Sequence[str]) -> Sequence[str]:
        for device in devices:
            self._count(self.running, self.terms[device], -1)
        return LeaseBook._release(self, devices)

    def _count(self, counter: Counter[str], terms: Terms, change: int) -> None:
        assert terms.region is not None, "a round with regions gives tasks in regions alone"
        counter[terms.region] += change

    def end_round(self, oldest: int) -> None:
        LeaseBook.end_round(self, oldest)
        self.reported.clear()
        self.over.clear()

    def devices_in(self, region: str) -> list[str]:
        """Return the devices with a lease in this region."""
        return [device for device, terms in self.terms.items() if terms.region == region]

    def count_restored(self, regions: Mapping[str, str], over: Mapping[str, bool]) -> None:
        """Count what ``restore`` brought back. ``regions``: task -> region, of the reports.
        ``over``: as the attribute."""
        for terms in self.terms.values():
            self._count(self.running, terms, 1)
        self.reported.update(regions[task] for task in self.accepted)
        self.over.update(over)
