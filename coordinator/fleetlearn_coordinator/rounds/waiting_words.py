"""What a run waits for, in one sentence for people."""

from __future__ import annotations

from collections.abc import Collection
from heapq import nsmallest
from math import inf

from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.exchange import ExchangeSeries
from fleetlearn_coordinator.rounds.regional_rounds import RegionalRounds, RegionNow
from fleetlearn_coordinator.rounds.round_state import EngineState
from fleetlearn_coordinator.rounds.selection import SECOND_CHANCES
from fleetlearn_coordinator.rounds.settings import Phase

NAMED = 5
"""Devices that a sentence, or a line of the log, names at most."""


def waits_for(state: EngineState, now: float) -> str:
    """Return what the run waits for. ``now``: seconds on the engine's clock."""
    if state.paused:
        return "; ".join(filter(None, ["the run is paused", state.waits_on]))
    beside = state.round_exchanges
    if beside is not None and beside.series.is_open:
        return _for_answers(state.round, beside.series, now)
    match state.phase:
        case Phase.GATHERING:
            return _for_devices(state, now)
        case Phase.COMMITTING:
            return state.waits_on or f"the model of round {state.round} is being made"
        case Phase.OPEN:
            return _for_reports(state, now)
    return _for_last_exchanges(state) if state.ends_with_exchanges else ""


def waits_for_in_general(state: EngineState) -> str:
    """Return why there is no task for another device now, without naming any device: for the owners
    of devices, who are told nothing of each other. Empty: there may be one."""
    if state.paused:
        return "the run is paused"
    match state.phase:
        case Phase.GATHERING if state.draining:
            return "the run is drained: no other round opens"
        case Phase.GATHERING:
            return f"round {state.round + 1} begins when enough devices are there"
        case Phase.COMMITTING:
            return f"the model of round {state.round} is being made"
        case Phase.OPEN if not state.settings.asynchronous:
            return f"round {state.round} has its devices"
    return ""


def _for_last_exchanges(state: EngineState) -> str:
    """Return which exchanges come before the run's end."""
    others = [kind for kind, series in state.exchanges.items() if series.is_open]
    if others and EVALUATION not in others:
        return f"the training is over, and its {' and its '.join(others)} goes on"
    return "the training is over, and its last model is being measured"


def _for_answers(round: int, series: ExchangeSeries, now: float) -> str:
    """Return whose answers the round waits for, in the open exchange that goes with it."""
    book, left = series.book, max(0.0, series.deadline - now)
    asked = len(book.accepted) + len(book.tasks) + len(series.chosen)
    return (
        f"phase {series.phase} of round {round}'s {series.policy.kind} has {len(book.accepted)} "
        f"answers of {asked} devices, for {left:.0f} s more at most"
    )


def _for_regions(regional: RegionalRounds, until: float | None, now: float) -> str:
    """Return which regions a round needs to open, and how many devices each has."""
    regions = regional.in_numbers(inf, now)
    have = "; ".join(
        f"{each.name} has {each.waiting} of {each.minimum} to {each.goal}" for each in regions
    )
    if until is not None:
        left = max(0.0, until - now)
        begins = f"a round begins in {left:.0f} s, or when each region has devices for its goal"
        return f"{begins}: {have}"
    regions_needed = "region" if regional.minimum == 1 else "regions"
    return (
        f"a round needs {regional.minimum} {regions_needed} (regions.minimum) with a minimum of "
        f"devices: {have}"
    )


def _for_devices(state: EngineState, now: float) -> str:
    if state.draining:
        return "the run is drained: no other round opens"
    if state.regional is not None:
        return _for_regions(state.regional, state.participation.gather_until, now)
    rule, until = state.settings, state.participation.gather_until
    there = state.waiting() + len(state.book.tasks) + len(state.book.early)
    if until is not None:
        left = max(0.0, until - now)
        if rule.share is not None:
            return (
                f"a round begins in {left:.0f} s with {rule.share.share:g} (round.goal_share) of "
                f"the devices that are there then; {there} are{_limited(state)}"
            )
        return (
            f"a round begins in {left:.0f} s, or when {rule.goal} devices (round.goal) are there; "
            f"{there} are{_limited(state)}"
        )
    needed = 1 if rule.asynchronous else rule.minimum
    devices = "device" if needed == 1 else "devices (round.minimum)"
    count = there or "none"
    return f"a round needs {needed} {devices}, and {count} can take part{_limited(state)}"


def _limited(state: EngineState) -> str:
    """Return how many connected devices may not take part in the next release of a private run, and
    why; empty if all may."""
    limited, rule = state.selection.limited, state.settings
    if not limited and not state.selection.held:
        return ""
    done = limited.done()
    later, parts = len(limited) - done, list[str]()
    if held := len(state.selection.held):
        parts.append(
            f"{held} had their updates of this very model in a sum before, and can be in no "
            "other sum of it ([secure])"
        )
    if later:
        parts.append(f"{later} took part lately (privacy.separation = {rule.separation})")
    if done:
        most = rule.participations
        parts.append(f"{done} took part as often as they may (privacy.participations = {most})")
    new_run = ", or a new run begins from the model (`export-model --bundle`)" if held else ""
    return f"; of the connected devices, {', '.join(parts)}. Others have to connect{new_run}"


def _for_reports(state: EngineState, now: float) -> str:
    """Return whose reports the open round waits for, or who could give one."""
    rule, book = state.settings, state.book
    said = f"round {state.round} has {len(book.accepted)} of {rule.goal} reports"
    left = f"for {max(0.0, state.deadline - now):.0f} s more at most"
    if state.regional is not None:
        regions = state.regional.in_numbers(state.deadline, now)
        return f"{said} ({', '.join(map(_region_now, regions))}), {left}"
    if book.tasks:
        gone = len(book.absent)
        away = f" ({gone} of them not connected)" if gone else ""
        return f"{said}, and waits for {named(book.tasks)}{away}, {left}"
    failures = state.selection.failures
    back = [device for device, count in failures.items() if count <= SECOND_CHANCES]
    if back:
        return (
            f"{said}, and waits until another device, or one whose task failed ({named(back)}), "
            f"connects, {left}"
        )
    failed = (
        f"; {named(failures)} failed {1 + SECOND_CHANCES} times in this round" if failures else ""
    )
    return f"{said}, and waits until another device connects, {left}{failed}{_limited(state)}"


def _region_now(region: RegionNow) -> str:
    """Return how many reports a region has, or how its part of the round ended."""
    if region.done is not None:
        return f"{region.name} {'is done' if region.done else 'has failed'}"
    waits = f"{region.reports} of {region.goal}"
    return f"{region.name} {waits}, for {region.seconds or 0.0:.0f} s more"


def named(devices: Collection[str]) -> str:
    """Return the first devices by name, and how many more there are."""
    first = ", ".join(nsmallest(NAMED, devices))
    return first if len(devices) <= NAMED else f"{first} and {len(devices) - NAMED} more"
