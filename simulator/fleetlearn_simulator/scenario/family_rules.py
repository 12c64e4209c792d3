"""Which member of a plan's family fits the devices of each tier, by the coordinator's own rule; and
why a scenario does not fit such a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fleetlearn_coordinator.plan.family_section import FamilyMember
from fleetlearn_coordinator.service.training_run.members import first_fit
from fleetlearn_protocol.messages import CheckIn

from fleetlearn_simulator.scenario.sections import Tier

if TYPE_CHECKING:
    from fleetlearn_simulator.scenario.scenario import Scenario

NO_MEMBER = -1
"""In place of a member's number: none fits the device, which never takes part."""


def regions_of_members(scenario: Scenario) -> list[int]:
    """Return the regions that members choose their devices by, with a tag."""
    regions = scenario.failures.regions
    if regions == 1:  # the devices state none
        return []
    tags = {tag for member in scenario.plan.family.values() for tag in member.tags}
    numbers = (tag.removeprefix("region-") for tag in tags if tag.startswith("region-"))
    return sorted(int(number) for number in numbers if number.isdecimal() and int(number) < regions)


def members_of_tiers(scenario: Scenario) -> list[list[int]]:
    """Return the number of the member that fits the devices of each tier, or ``NO_MEMBER``: a row
    for each tier, in it the regions that no member names, then each of ``regions_of_members``."""
    family = scenario.plan.family
    numbers = {name: number for number, name in enumerate(family)}
    regions = [None, *regions_of_members(scenario)]
    return [
        [numbers.get(_fit(family, tier, region) or "", NO_MEMBER) for region in regions]
        for tier in scenario.tiers.values()
    ]


def _fit(family: Mapping[str, FamilyMember], tier: Tier, region: int | None) -> str | None:
    """Return the first member that fits a device of the tier, in this region or in another one."""
    tags = (*tier.tags, *([] if region is None else [f"region-{region}"]))
    memory = None if tier.memory is None else int(tier.memory * 2**20)
    return first_fit(family, CheckIn(1, "any", 1, memory=memory, tags=tags))


def family_contradictions(scenario: Scenario) -> Iterator[str]:
    """Yield why the scenario's devices cannot train the plan's family."""
    family, seconds = scenario.plan.family, scenario.compute.step_seconds
    if isinstance(seconds, dict) and not family:
        yield (
            "compute.step_seconds is a table of members, and the plan has no [family]: it takes a "
            'number of seconds, or "measure"'
        )
    elif isinstance(seconds, dict) and {*seconds} != {*family}:
        yield (
            f"compute.step_seconds has {', '.join(sorted(seconds)) or 'nothing'}; it takes the "
            f"seconds of each member of the plan's [family]: {', '.join(family)}"
        )
    if family and all(each == NO_MEMBER for row in members_of_tiers(scenario) for each in row):
        asked = "; ".join(f"{name} {_conditions(member)}" for name, member in family.items())
        yield (
            "plan.family: no tier has devices that fit a member, so that none could train. "
            f"{asked}. Give tiers the keys memory (in MiB) and tags"
        )


def _conditions(member: FamilyMember) -> str:
    """Return what a member asks of devices. A member that asks nothing fits all."""
    memory = [] if member.memory is None else [f"{member.memory / 2**20:.6g} MiB of RAM"]
    return f"asks for {' and '.join([*memory, *(f'the tag {tag}' for tag in member.tags)])}"
