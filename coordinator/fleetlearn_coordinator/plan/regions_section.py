"""[regions] of a plan: hierarchical rounds, in which each region has a goal and a deadline of its
own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import ROUND_FLOOR, Decimal
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from fleetlearn_protocol.messages import Tags
from msgspec import Meta

from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES
from fleetlearn_coordinator.aggregation.regional_round import RegionalWeights
from fleetlearn_coordinator.plan.service_settings import RegionName
from fleetlearn_coordinator.plan.toml_errors import Section
from fleetlearn_coordinator.rounds.settings import RegionSettings, RegionsSettings

MAX_REGIONS = 64
"""Each has a sum of the model's size in memory."""
Patterns = Annotated[tuple[str, ...], Meta(max_length=100)]
Goal = Annotated[int, Meta(ge=1, le=MAX_UPDATES)]
Minimum = Annotated[int, Meta(ge=1)]
Factor = Annotated[float, Meta(ge=1, le=100)]
Seconds = Annotated[float, Meta(gt=0, le=366 * 86400.0)]
OVER_SELECTION = 1.3


class EachRegion(Section, frozen=True, kw_only=True):
    """[regions.each]: what holds for each region that does not say otherwise."""

    goal: Goal | None = None
    """Reports wanted of the region; its part of the round ends as soon as it has them."""
    over_selection: Factor = OVER_SELECTION
    """Tasks given for each report wanted, since some devices will vanish."""
    minimum: Minimum | None = None
    """With fewer reports at its deadline the region has failed. Default: half of its goal, rounded
    up."""
    deadline: Seconds | None = None
    """Seconds from the round's start to the end of the region's part. Default: round.deadline."""


class NamedRegion(Section, frozen=True, kw_only=True):
    """[regions.named.NAME]: a region, and which devices are in it: those that are connected to a
    gateway of this region (``region`` of the gateway's service file); else those that have its tags
    and a name of its patterns. A device is in the first region that it fits."""

    goal: Goal
    """As in [regions.each], whose value is the default; so are the next three."""
    over_selection: Factor
    minimum: Minimum
    deadline: Seconds
    tags: Tags = ()
    """Tags that a device must have, all of them."""
    devices: Patterns = ()
    """Patterns of devices' names, such as "eu-*": a device's name must fit one of them."""
    weight: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """What the region weighs in the model, with weighting = "given"."""

    @property
    def cohort(self) -> int:
        """Tasks of the region in a round: goal * over_selection, rounded up."""
        return math.ceil(self.goal * Decimal(str(self.over_selection)))

    def fits(self, device: str, tags: Collection[str]) -> bool:
        """Return whether a device with these tags is in the region, whatever its gateway is."""
        if not (self.tags or self.devices):
            return False
        named = not self.devices or any(fnmatchcase(device, each) for each in self.devices)
        return named and {*self.tags} <= {*tags}


class RegionsSection(Section, frozen=True, kw_only=True):
    """[regions]: hierarchical rounds. What the devices of a region send goes on together, or not at
    all."""

    goal: Annotated[int, Meta(ge=1, le=MAX_REGIONS)]
    """Regions that close the round when they are done. Default: all."""
    minimum: Annotated[int, Meta(ge=1, le=MAX_REGIONS)]
    """With fewer regions that are done the round is abandoned. Default: half of the goal, rounded
    up."""
    weighting: Literal["updates", "uniform", "given"] = "updates"
    """Whether an update weighs what it weighs in a round without regions, or each region weighs the
    same, or what its ``weight`` says."""
    each: EachRegion
    named: Annotated[dict[RegionName, NamedRegion], Meta(min_length=1, max_length=MAX_REGIONS)]
    """The regions by name, in the order in which a device is tried."""

    @property
    def settings(self) -> RegionsSettings:
        """What the engine needs of this."""
        regions = (
            RegionSettings(name, each.goal, each.cohort, each.minimum, each.deadline)
            for name, each in self.named.items()
        )
        return RegionsSettings(tuple(regions), self.goal, self.minimum)

    @property
    def weights(self) -> RegionalWeights:
        """What each region weighs in the model."""
        names = tuple(self.named)
        if self.weighting == "updates":
            return RegionalWeights(names)
        given = {name: each.weight or 1.0 for name, each in self.named.items()}
        return RegionalWeights(names, given)

    def region_of(self, device: str, tags: Collection[str], gateway: str | None) -> str:
        """Return the region of a device with these tags; empty if it is in none. ``gateway``: the
        region of the gateway that it is connected to; None: it has none, or there are none."""
        if gateway in self.named:
            return gateway or ""
        fitting = (name for name, each in self.named.items() if each.fits(device, tags))
        return next(fitting, "")


def region_sections(raw: Mapping[str, Any]) -> dict[str, type[Section]]:
    """Return the tables of a plan's regions, by dotted name."""
    regions = raw.get("regions")
    named = regions.get("named") if isinstance(regions, dict) else None
    names = named if isinstance(named, dict) else ()
    return {"regions.each": EachRegion} | {f"regions.named.{name}": NamedRegion for name in names}


def fill_regions(
    regions: dict[str, Any], round_: dict[str, Any], least: Callable[[int], int], deadline: float
) -> None:
    """Fill what each region does not say, and what of [round] follows from the regions. ``least``:
    goal -> from how many updates on the aggregator works. ``deadline``: of a round, by default.
    Raises ValueError where [round] says itself what follows from the regions, or a region has no
    goal."""
    for key in ("goal", "minimum", "over_selection"):
        if key in round_:
            raise ValueError(
                f"round.{key} = {round_[key]!r} with [regions]: it follows from the regions'. "
                f"Leave it out; regions.each.{key} is for each region"
            )
    each, named = regions.setdefault("each", {}), regions.setdefault("named", {})
    if named == {}:
        raise ValueError(
            "[regions] names no region: write [regions.named.NAME] for each, with the tags or the "
            "names of its devices, or with neither where its gateways say that they are of it"
        )
    if not (isinstance(each, dict) and isinstance(named, dict)):
        round_["goal"] = 1  # the conversion refuses what is wrong
        return
    usual = {
        "over_selection": OVER_SELECTION,
        "deadline": round_.get("deadline", deadline),
        **each,
    }
    for name, region in named.items():
        if not isinstance(region, dict):
            continue
        named[name] = region = {**usual, **region}
        if "goal" not in region:
            raise ValueError(
                f"[regions.named.{name}] has no goal, and [regions.each] has none either: it takes "
                f"the reports that are wanted of a region, 1 to {MAX_UPDATES}"
            )
        goal = region["goal"]
        if isinstance(goal, int) and 0 < goal <= MAX_UPDATES:
            region.setdefault("minimum", max(1, -(-goal // 2), min(goal, least(goal))))
    regions.setdefault("goal", len(named))
    if isinstance(regions["goal"], int):
        regions.setdefault("minimum", max(1, -(-regions["goal"] // 2)))
    _fill_round(regions, [each for each in named.values() if isinstance(each, dict)], round_)


def _fill_round(
    regions: dict[str, Any], named: list[dict[str, Any]], round_: dict[str, Any]
) -> None:
    """Fill in how many tasks and reports a round has, all regions together."""
    round_["goal"] = round_["minimum"] = 1
    try:
        rows = [(each["goal"], each["over_selection"], each["minimum"]) for each in named]
        round_.update(numbers_of_round(rows, regions["minimum"]))
    except (TypeError, ValueError, KeyError, ArithmeticError):
        return  # the conversion refuses what is wrong


def numbers_of_round(rows: Iterable[tuple[int, float, int]], least: int) -> dict[str, Any]:
    """Return what of [round] follows from the goal, over-selection and minimum of each region.
    ``least``: fewest regions of a round that is committed."""
    rows = [*rows]
    goal = sum(goal for goal, _, _ in rows)
    cohort = sum(math.ceil(goal * Decimal(str(over))) for goal, over, _ in rows)
    fewest = sorted(minimum for _, _, minimum in rows)[:least]
    # Rounded down, so that goal * over_selection, rounded up, is the cohort.
    ratio = (Decimal(cohort) / goal).quantize(Decimal("1e-9"), ROUND_FLOOR)
    return {"goal": goal, "minimum": sum(fewest), "over_selection": float(ratio)}
