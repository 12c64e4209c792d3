"""The regions of a run's rounds, over restarts: which task is in which, and which are over in the
open round."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.messages import CheckIn

from fleetlearn_coordinator.aggregation.regional_round import RegionalWeights
from fleetlearn_coordinator.network.peer_log import say_seldom
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import RegionEnded
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata, Unfinished

REGIONS_OVER = "regions_over"
"""Key of the metadata: the last round in which a region's part was over, and which, as JSON."""


class RestoredRegions(NamedTuple):
    """What an earlier process left of the open round's regions; ``Restored`` has the two."""

    regions: dict[str, str]
    over: dict[str, bool]


class RunRegions:
    """The regions of a run."""

    def __init__(self, plan: Plan) -> None:
        section = self._section = plan.regions
        self.weights: RegionalWeights | None = None if section is None else section.weights
        """What each weighs in the model. None: rounds have no regions."""
        self._over: dict[str, bool] = {}
        self._round = 0

    def region_of(self, check_in: CheckIn, gateway: str | None) -> str:
        """Return the region of a device that checks in; empty if it is in none, or there are none.
        ``gateway``: as in ``RegionsSection.region_of``."""
        if self._section is None:
            return ""
        if gateway is not None and gateway not in self._section.named:
            say_seldom(
                f'region = "{gateway}" of a service file',
                f"the plan has no such region, but {', '.join(self._section.named)}. Devices that "
                "connect there are placed by their tags and names alone",
            )
        return self._section.region_of(check_in.device, check_in.tags, gateway)

    def why_not(self, check_in: CheckIn, gateway: str | None) -> str:
        """Return why a device is in no region, for its owner; empty if it is in one, or there are
        none."""
        if self._section is None or self.region_of(check_in, gateway):
            return ""
        return "it is in none of the plan's regions ([regions])"

    def row_of(self, ended: RegionEnded) -> Metadata:
        """Return the row that says that a region's part of the open round is over."""
        if ended.round != self._round:
            self._round, self._over = ended.round, {}
        self._over[ended.region] = ended.is_done
        content = {"round": self._round, "over": self._over}
        return Metadata(REGIONS_OVER, json.dumps(content))

    def take_back(self, found: Unfinished, ledger: Ledger) -> RestoredRegions:
        """Return what an earlier process left. Raises StoreError where the open round has tasks of
        regions that the plan does not have, or has regions now and had none."""
        tasks: Iterable[Any] = (*found.leases, *found.reports)
        regions = {each.task: each.region for each in tasks if each.region is not None}
        names = () if self.weights is None else self.weights.names
        strange = sorted({*regions.values()} - {*names})
        without = self.weights is not None and any(each.region is None for each in tasks)
        if found.round is not None and (strange or without):
            has = f"regions {', '.join(strange)}" if strange else "none"
            now = f"regions {', '.join(names)}" if names else "none"
            text = (
                f"round {found.round} is open and has tasks of {has}; the plan has {now} now. "
                "Start with the plan as it was and let the round end, or give the round up"
            )
            raise StoreError(Code.BAD_MESSAGE, text)
        saved = ledger.get(REGIONS_OVER)
        content = {} if saved is None else json.loads(saved)
        if content.get("round") == found.round and found.round is not None:
            self._round, self._over = content["round"], content["over"]
        return RestoredRegions(regions, dict(self._over))


def region_of_task(engine: Engine, device: str) -> str | None:
    """Return the region in which the device was given its task; None: rounds have no regions."""
    return engine.book.terms[device].region
