"""What a canary does next: a state machine without I/O and without a clock. What both arms did and
how much time passed go in; the next state comes out.

A canary begins in its first step. It goes on to the next one when enough of its tasks ended and
enough time passed, and after the last one it takes the old run's place. It goes back as soon as a
bound is exceeded: then the old run has all its devices again. ``back`` and ``finished`` are ends.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from fleetlearn_coordinator.plan.canary_settings import CanarySettings
from fleetlearn_coordinator.service.canary.arms import Arm
from fleetlearn_coordinator.service.canary.exact_tests import (
    least_share,
    most_are_above,
    share_rises,
)

FEWEST_BAD = 3
"""Bad tasks without which no share is beyond a bound: one device's accident is none."""
FEWEST_CONTROL = 10
"""Tasks of the old run's arm without which the arm before it is compared with, if there is one."""
Phase: TypeAlias = Literal["running", "back", "finished"]
Action: TypeAlias = Literal["hold", "widen", "back", "finish"]


class CanaryState(msgspec.Struct, frozen=True):
    """Where a canary is."""

    phase: Phase = "running"
    step: int = 0
    """Index into ``CanarySettings.steps``."""
    seconds: float = 0.0
    """For which this step has been served so far."""
    canary: Arm = Arm()
    """The canary's tasks since the step began."""
    control: Arm = Arm()
    """The old run's tasks in the same time."""
    before: Arm = Arm()
    """The old run's tasks in an earlier step. The last step has no others to compare with."""
    why: str = ""
    """Why it went back, or who finished it, for people."""


class CanaryBound(NamedTuple):
    """What a canary must not exceed, and where it is."""

    name: str
    canary: float | None
    """None: nothing to go by yet."""
    control: float | None
    """The old run's."""
    limit: float | None
    is_beyond: bool
    """Whether it is certain enough that the limit is exceeded."""
    text: str
    """For people."""


class Decision(NamedTuple):
    """What is to be done, and why."""

    action: Action
    why: str


def decide(state: CanaryState, settings: CanarySettings, trouble: str = "") -> Decision:
    """Return what a canary that is in this state does next. ``trouble``: why its run cannot go on;
    empty: it can."""
    if state.phase != "running":
        return Decision("hold", state.why)
    if trouble:
        return Decision("back", trouble)
    beyond = [bound for bound in bounds(state, settings) if bound.is_beyond]
    if beyond:
        return Decision("back", "; ".join(bound.text for bound in beyond))
    last = is_last(state, settings)
    least = 60 * (settings.probation if last else settings.hold)
    ended, minutes = state.canary.ended, state.seconds / 60
    missing = max(0, settings.tasks - ended)
    if not missing and state.seconds >= least:
        why = f"{ended} tasks ended in {minutes:.3g} minutes, and no bound was exceeded"
        return Decision("finish" if last else "widen", why)
    if missing and state.seconds >= max(least, 60 * settings.patience):
        why = f"no progress: {ended} of {settings.tasks} tasks ended in {minutes:.3g} minutes"
        return Decision("back", why)
    waits = [f"{missing} more tasks"] * bool(missing)
    if state.seconds < least:
        waits.append(f"{(least - state.seconds) / 60:.3g} more minutes")
    return Decision("hold", f"waits for {' and '.join(waits)}")


def is_last(state: CanaryState, settings: CanarySettings) -> bool:
    """Return whether all devices have the canary now."""
    return state.step == len(settings.steps) - 1


# Transitions. Each is harmless where it has happened.


def widened(state: CanaryState, settings: CanarySettings) -> CanaryState:
    """Return the state with the next step begun; the same after the last one, or at an end."""
    if state.phase != "running" or is_last(state, settings):
        return state
    return CanaryState(step=state.step + 1, before=compared(state))


def gone_back(state: CanaryState, why: str) -> CanaryState:
    """Return the state of a canary that went back, for this reason."""
    return state if state.phase != "running" else replace(state, phase="back", why=why)


def finished(state: CanaryState, why: str) -> CanaryState:
    """Return the state of a canary that has taken the old run's place."""
    return state if state.phase != "running" else replace(state, phase="finished", why=why)


# Bounds


def bounds(state: CanaryState, settings: CanarySettings) -> list[CanaryBound]:
    """Return all bounds, and where the canary is."""
    canary, control = state.canary, compared(state)
    shares = [
        ("failures", canary.ended - canary.done, control.ended - control.done),
        ("failed", canary.of("failed"), control.of("failed")),
        ("lost", canary.of("lost"), control.of("lost")),
        ("refused", canary.of("refused"), control.of("refused")),
    ]
    found = [
        _share(name, (bad, canary.ended), (bad_before, control.ended), settings)
        for name, bad, bad_before in shares
    ]
    given = (canary.interrupted, canary.given), (control.interrupted, control.given)
    found.append(_share("interrupted", *given, settings))
    return [*found, _time(canary, control, settings)]


def compared(state: CanaryState) -> Arm:
    """Return the old run's tasks that the canary's are compared with."""
    is_enough = state.control.ended >= FEWEST_CONTROL
    return state.control if is_enough or not state.before.ended else state.before


def _share(
    name: str, canary: tuple[int, int], control: tuple[int, int], settings: CanarySettings
) -> CanaryBound:
    """Return the bound of a share, of pairs (bad tasks, all of them)."""
    share, before = (None if not all_ else bad / all_ for bad, all_ in (canary, control))
    limit, is_beyond = settings.most_failures, False
    if before is not None:
        own = before + settings.margin
        limit = own if before > limit else min(limit, own)
    if share is not None and canary[0] >= FEWEST_BAD and share > limit:
        doubt = 1 - settings.certainty
        rises = before is not None and share > before + settings.margin
        is_beyond = (rises and share_rises(*canary, *control) < doubt) or _is_much(
            canary, control, settings
        )
    what = f"{name}: {canary[0]} of {canary[1]} tasks of the canary"
    old = f"{control[0]} of {control[1]} of the old run"
    return CanaryBound(name, share, before, limit, is_beyond, f"{what}, {old}; at most {limit:.3g}")


def _is_much(canary: tuple[int, int], control: tuple[int, int], settings: CanarySettings) -> bool:
    """Return whether the canary's share is beyond what is allowed whatever the old run's is. Where
    the old run's is, too, that says nothing about the canary."""
    least, much = least_share(*canary, settings.certainty), settings.most_failures
    return least > much >= least_share(*control, settings.certainty)


def _time(canary: Arm, control: Arm, settings: CanarySettings) -> CanaryBound:
    """Return the bound of the time that training takes: more than half of the canary's tasks take
    longer than ``slower`` times the old run's median."""
    median, before = canary.median, control.median
    limit = None if before is None else before * settings.slower
    is_beyond, text = False, "time: nothing to compare yet"
    if median is not None and before is not None and limit is not None:
        above, all_ = canary.slower_than(limit), canary.done
        enough = control.done >= FEWEST_CONTROL
        is_beyond = enough and most_are_above(above, all_) < 1 - settings.certainty
        text = (
            f"time: {above} of {all_} tasks of the canary took longer than {settings.slower:g} "
            f"times the old run's median of {before:.3g} s; its own is {median:.3g} s"
        )
    return CanaryBound("time", median, before, limit, is_beyond, text)
