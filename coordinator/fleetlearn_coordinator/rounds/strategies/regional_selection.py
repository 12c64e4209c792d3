"""Selection in rounds with regions: devices of each region are chosen by themselves, by the same
rules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.regional_book import RegionalBook
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.selection_rules import NOTHING_STATED, SelectionRules
from fleetlearn_coordinator.rounds.settings import RegionSettings, Settings
from fleetlearn_coordinator.rounds.strategies.quotas import Quotas
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection

PREFIX = "region:"
"""What the label of a region begins with, where devices' labels have quotas."""
NO_REGION = "regions"
"""What keeps a device from tasks that is in none of the regions: the plan's [regions]."""


@dataclass(slots=True)
class RegionalQuotas(Quotas):
    """``Quotas`` that let only devices of one region be given tasks."""

    region: str | None = None
    """The region whose devices are chosen now."""

    def left(self, label: str) -> int:
        if label.startswith(PREFIX):
            return int(label == f"{PREFIX}{self.region}")
        return Quotas.left(self, label)


class OneRegion(RegionalQuotas):
    """Quotas that leave all devices of one region room, and no others."""

    def left(self, label: str) -> int:
        return RegionalQuotas.left(self, label) if label.startswith(PREFIX) else 1


@dataclass(slots=True)
class RegionalSelection(RuledSelection):
    """``RuledSelection`` where rounds have regions. Which one a device is in is among what it
    states (``Stated.region``); one that is in none waits, and is given nothing."""

    regions: dict[str, RegionSettings] = field(init=False)
    book: RegionalBook = field(init=False)
    """The rounds' leases. The engine sets it."""
    begun: set[str] = field(default_factory=set)
    """The regions that were given tasks in this round."""

    def __post_init__(self) -> None:
        assert self.settings.regions is not None
        self.regions = {rule.name: rule for rule in self.settings.regions.regions}
        if self.settings.selection is None:
            self.settings = self.settings._replace(selection=SelectionRules())
        RuledSelection.__post_init__(self)
        self.quotas = RegionalQuotas(self.quotas.shares, self.quotas.size)

    # --- where devices are ---

    def _kind_of(self, device: str) -> tuple[bool, tuple[str, ...], int]:
        explored, labels, weight = RuledSelection._kind_of(self, device)
        return explored, (*labels, PREFIX + self._region_of(device)), weight

    def _region_of(self, device: str) -> str:
        return self.stated.get(device, NOTHING_STATED).region

    def add(self, device: str) -> None:
        if self._region_of(device) in self.regions:
            RuledSelection.add(self, device)
        else:
            self.remove(device)
            self.ineligible[device] = (NO_REGION,)

    def ready_in(self, region: str) -> int:
        """Return how many devices of the region that are not in doubt a new round could give
        tasks."""
        return self._pools(self.idle).most(self.quotas, PREFIX + region)

    def waiting_in(self, region: str) -> int:
        """Return how many devices of the region a new round could give tasks, in doubt or not."""
        everywhere = (self.idle, *self.doubted.values())
        return sum(self._pools(names).most(self.quotas, PREFIX + region) for names in everywhere)

    def live(self) -> dict[str, object]:
        keys = f"selection.{NO_REGION}"
        live = RuledSelection.live(self)
        causes = live["ineligible_by"]
        assert isinstance(causes, dict)
        return {
            **live,
            "ineligible_by": {
                NO_REGION if key == keys else key: count for key, count in causes.items()
            },
        }

    def end_round(self, reported: Collection[str]) -> None:
        self.begun.clear()
        RuledSelection.end_round(self, reported)

    # --- who is chosen ---

    def choose(
        self, most: int, round: int, first: int, book: LeaseBook, region: str | None = None
    ) -> list[str]:
        assert region is not None
        self._set_region(region)
        devices = RuledSelection.choose(self, most, round, first, book)
        self._set_region(None)
        if devices:
            self.begun.add(region)
        return devices

    def choose_again(
        self, most: int, round: int, lost: Collection[str], region: str | None = None
    ) -> list[str]:
        self._set_region(region)
        devices = RuledSelection.choose_again(self, most, round, lost)
        self._set_region(None)
        return devices

    def _set_region(self, region: str | None) -> None:
        assert isinstance(self.quotas, RegionalQuotas)
        self.quotas.region = region

    def _all_quotas(self) -> Quotas:
        """Those who have the largest losses, or utilities, are looked for among devices of the
        region: others would leave it few candidates, or none."""
        return OneRegion({}, self.quotas.size, region=self._chosen_for.name)

    @property
    def _chosen_for(self) -> RegionSettings:
        """The region whose devices are chosen now."""
        assert isinstance(self.quotas, RegionalQuotas)
        assert self.quotas.region is not None
        return self.regions[self.quotas.region]

    def _spare(self) -> int:
        return (self._chosen_for.cohort - self._chosen_for.goal + 1) // 2

    def _idle_here(self) -> int:
        return self.ready_in(self._chosen_for.name)

    def _is_first(self, first: int) -> bool:
        return self._chosen_for.name not in self.begun

    def _lacks_minimum(self, book: LeaseBook) -> bool:
        return self.book.reported[self._chosen_for.name] < self._chosen_for.minimum

    def _may_try_again(self, device: str, round: int) -> bool:
        here = self._region_of(device) == self._chosen_for.name
        return here and RuledSelection._may_try_again(self, device, round)


def selection_of(settings: Settings) -> Selection:
    """Return the selection that the settings ask for."""
    if settings.regions is not None:
        return RegionalSelection(settings)
    return Selection(settings) if settings.selection is None else RuledSelection(settings)
