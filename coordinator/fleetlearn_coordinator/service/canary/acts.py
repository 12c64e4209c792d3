"""What people, and the host itself, do with a canary that was begun. Each is one transaction of the
database of runs, with its row of the audit log; ``begin.py`` begins one."""

from __future__ import annotations

from collections.abc import Mapping

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.service.canary.about import about_of, encoded, state_of
from fleetlearn_coordinator.service.canary.decision import (
    Action,
    CanaryState,
    finished,
    gone_back,
    is_last,
    widened,
)
from fleetlearn_coordinator.service.several.operations import Operations
from fleetlearn_coordinator.storage.canaries import CanaryRow
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.runs import Runs

BEFORE = ".before"
"""What the old run's name ends with once a canary has taken its place."""
DONE: Mapping[Action, str] = {
    "widen": "canary widened",
    "back": "canary went back",
    "finish": "canary finished",
}
"""What was done -> its name in the audit log."""


def find_canary(runs: Runs, name: str) -> CanaryRow:
    """Return the newest canary of this run, or the one whose run has this name. Raises
    StoreError."""
    numbers = {run.name: run.number for run in runs.runs()}
    for row in reversed(runs.canaries.rows()):
        if numbers.get(name) in (row.run, row.of):
            return row
    there = ", ".join(numbers) or "none"
    text = f"there is no run called {name}; there are: {there}"
    if name in numbers:
        text = f"the run {name} has no canary: `fleetlearn-coordinator canary start` begins one"
    raise StoreError(Code.UNKNOWN_CONTENT, text)


def act_on(operations: Operations, name: str, action: Action) -> str:
    """Widen a canary, send it back, or finish it, because somebody asks for it. ``name``: of either
    of its runs. Returns the name of the canary's run before that. Raises StoreError."""
    row = find_canary(operations.runs, name)
    state, settings = state_of(row), about_of(row).settings
    canary = _names(operations.runs)[row.run]
    if state.phase != "running":
        how = "went back" if state.phase == "back" else "has taken the old run's place"
        text = f"the canary {canary} {how}: {state.why}. Nothing more can be done with it"
        raise StoreError(Code.OUT_OF_TURN, text)
    last = is_last(state, settings)
    if action == "widen" and last:
        text = f"all devices have the canary {canary} already: `canary finish` ends it"
        raise StoreError(Code.OUT_OF_TURN, text)
    if action == "finish" and not (last and state.canary.given):
        where = (
            "no device has had a task of it in its last step"
            if last
            else f"{100 * row.share:g} % of the devices have it: `canary widen` goes a step further"
        )
        raise StoreError(Code.OUT_OF_TURN, f"the canary {canary} cannot be finished: {where}")
    act(operations, row, state, action, f"asked by {operations.who}")
    return canary


def act(
    operations: Operations, row: CanaryRow, state: CanaryState, action: Action, why: str
) -> None:
    """Do what was decided of a canary that is in this state. Raises StoreError where somebody has
    changed it since the row was read; nothing changes then."""
    runs, settings, names = operations.runs, about_of(row).settings, _names(operations.runs)
    canary, of = names[row.run], names[row.of]
    match action:
        case "widen":
            state = widened(state, settings)
            row = row._replace(share=settings.steps[state.step])
        case "back":
            state, row = gone_back(state, why), row._replace(phase="back")
        case "finish":
            state, row = finished(state, why), row._replace(phase="finished")
    about = {"of": of, "share": row.share, "why": why}
    with operations.logged(DONE[action], canary, **about):
        runs.canaries.change(row._replace(state=encoded(state)))
        if action == "finish":
            runs.canaries.take_place(row, free_name(f"{of}{BEFORE}", names.values()))


def free_name(wanted: str, taken: object) -> str:
    """Return the name, or the first of NAME-2, NAME-3 ... that no run has."""
    names, number = {*taken}, 1  # type: ignore[misc]
    found = wanted
    while found in names:
        number += 1
        found = f"{wanted}-{number}"
    return found


def _names(runs: Runs) -> dict[int, str]:
    return {run.number: run.name for run in runs.runs()}
