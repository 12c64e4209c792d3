"""What of a plan's [regions] a simulation cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetlearn_simulator.scenario.scenario import Scenario


def region_contradictions(scenario: Scenario) -> Iterator[str]:
    """Yield why the scenario cannot have the plan's regions."""
    plan = scenario.plan
    if plan.regions is None:
        return
    if plan.tied:
        yield (
            f"plan.regions and what devices keep ({', '.join(plan.tied)}): what the devices of a "
            "failed region keep is not simulated. It takes an algorithm and an encoding that keep "
            "nothing, such as recipe fedavg and encoding.up = float32"
        )
    alone = [name for name, each in plan.regions.named.items() if not (each.tags or each.devices)]
    if alone:
        yield (
            f"plan.regions.named.{alone[0]} has neither tags nor devices, and a simulation has no "
            "gateways: give it a tag of a tier, or with failures.regions the tag region-N"
        )
