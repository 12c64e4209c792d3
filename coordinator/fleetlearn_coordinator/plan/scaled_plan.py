"""A plan for a share of the devices that it was written for: a canary's first steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

from fleetlearn_protocol.errors import Code
from msgspec.structs import replace

from fleetlearn_coordinator.plan.contradictions import contradictions
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.regions_section import RegionsSection, numbers_of_round


def scale_plan(plan: Plan, share: float) -> Plan:
    """Return the plan with every number that counts devices multiplied by ``share``, rounded up and
    at least 1: ``round.goal``, ``minimum`` and ``concurrency``, each region's ``goal`` and
    ``minimum``, ``evaluation.devices`` and ``minimum``, ``pace.connected`` and ``server.devices``.
    Where so few devices contradict the rest of the plan (Krum needs three, for example), it is the
    fewest that do not.

    Raises PlanError where only the whole plan is free of contradictions: it is for all devices.
    """
    if share >= 1:
        return plan
    for goal in _goals(plan.round.goal, share):
        found = _with_goal(plan, goal, share)
        if next(iter(contradictions(found)), None) is None:
            return found
    problem = next(iter(contradictions(_with_goal(plan, _part(plan.round.goal, share), share))))
    raise PlanError(
        Code.BAD_MESSAGE,
        f"{plan.file}: it cannot be made smaller for some of the devices: {problem}",
    )


def _goals(goal: int, share: float) -> Iterator[int]:
    """Yield the goals that are tried, from the smallest one up to the plan's."""
    tried = _part(goal, share)
    while tried < goal:
        yield tried
        tried += max(1, tried // 10)
    yield goal


def _with_goal(plan: Plan, goal: int, share: float) -> Plan:
    rule, pace, measures = plan.round, plan.pace, plan.evaluation
    # A larger goal than the share's needs as many more devices everywhere.
    share = share if goal == _part(rule.goal, share) else goal / rule.goal
    tasks = None if rule.concurrency is None else max(goal, _part(rule.concurrency, share))
    round_ = replace(rule, goal=goal, minimum=_part(rule.minimum, share), concurrency=tasks)
    regions = None if plan.regions is None else _smaller_regions(plan.regions, share)
    if regions is not None:
        rows = [(each.goal, each.over_selection, each.minimum) for each in regions.named.values()]
        round_ = replace(round_, **numbers_of_round(rows, regions.minimum))
    connected = pace.connected
    if connected is not None:
        connected = max(round_.cohort, _part(connected, share))
    devices = plan.server.devices
    return replace(
        plan,
        round=round_,
        regions=regions,
        pace=replace(pace, connected=connected),
        evaluation=replace(
            measures,
            devices=_part(measures.devices, share),
            minimum=_part(measures.minimum, share),
        ),
        server=replace(
            plan.server,
            devices=None if devices is None else max(round_.cohort, _part(devices, share)),
        ),
    )


def _smaller_regions(regions: RegionsSection, share: float) -> RegionsSection:
    named = {
        name: replace(each, goal=_part(each.goal, share), minimum=_part(each.minimum, share))
        for name, each in regions.named.items()
    }
    return replace(regions, named=named)


def _part(count: int, share: float) -> int:
    """Return this share of a count, rounded up."""
    return math.ceil(count * Decimal(str(share)))
