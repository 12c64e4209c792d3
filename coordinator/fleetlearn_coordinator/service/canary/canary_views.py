"""The canaries of a host, from the database of its runs alone: while the host runs or not."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlearn_coordinator.service.canary.about import about_of, state_of
from fleetlearn_coordinator.service.canary.arms import Arm
from fleetlearn_coordinator.service.canary.decision import CanaryState, bounds, compared, decide
from fleetlearn_coordinator.service.views.records import ArmView, BoundView, CanaryView
from fleetlearn_coordinator.storage.canaries import CanaryRow
from fleetlearn_coordinator.storage.runs import Runs


def canary_views(runs: Runs, name: str | None = None) -> list[CanaryView]:
    """Return the canaries, the oldest first. ``name``: only those of the run of this name, or whose
    run has it."""
    names = {run.number: run.name for run in runs.runs()}
    found = [
        canary_view(row, names)
        for row in runs.canaries.rows()
        if row.run in names and row.of in names
    ]
    return [each for each in found if name in (None, each.name, each.of)]


def canary_view(
    row: CanaryRow, names: Mapping[int, str], state: CanaryState | None = None
) -> CanaryView:
    """Return one canary. ``names``: of the runs, by number. ``state``: where it is, if more is
    known than what is written."""
    about, state = about_of(row), state or state_of(row)
    settings = about.settings
    return CanaryView(
        name=names[row.run],
        of=names[row.of],
        phase=row.phase,
        step=state.step + 1,
        steps=[*settings.steps],
        share=row.share,
        tags=[*row.tags],
        model=about.first.words,
        take_over=about.first.take_over,
        began=about.began,
        who=about.who,
        seconds=round(state.seconds, 1),
        next=state.why or decide(state, settings).why,
        canary=_arm(state.canary),
        control=_arm(compared(state)),
        bounds=[BoundView(*bound) for bound in bounds(state, settings)],
    )


def _arm(arm: Arm) -> ArmView:
    counts = arm.given, arm.done, arm.causes, arm.interrupted, arm.devices
    return ArmView(*counts, arm.median)
