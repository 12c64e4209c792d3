"""[local.schedule] and [local.step_schedule] of a plan: how the learning rate changes from round to
round, and from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fleetlearn_protocol.learning_rates import factor_at
from fleetlearn_protocol.messages import StepSchedule
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Positive, Section

Share = Annotated[float, Meta(gt=0, le=1)]
WarmUp = Annotated[int, Meta(ge=0, le=2**31)]
Kind = Literal["constant", "step", "exponential", "linear", "cosine", "one-cycle"]
FALLING = ("linear", "cosine", "one-cycle")
"""Kinds that reach ``least`` after so many rounds or steps."""
NEEDED: Mapping[str, Mapping[str, float]] = {
    "step": {"every": 30},
    "exponential": {"factor": 0.98},
}
"""Kind -> the keys that have no default, each with an example."""


class ScheduleSection(Section, frozen=True, kw_only=True):
    """[local.schedule]: what the learning rate is multiplied by in each round. A round's number
    here is the version of the model that its tasks begin from: 0 in the first one. An abandoned
    round does not count, a roll back does. Devices are told the product: they know no schedule."""

    kind: Kind = "constant"
    """After the warm-up: the same; ``factor`` after each ``every`` rounds; ``factor`` after each
    round; a straight line or half a cosine wave down to ``least``, which it has after ``rounds``
    rounds; one-cycle: as cosine, and the warm-up is half a cosine wave too."""
    warm_up: WarmUp = 0
    """Rounds in which the learning rate rises, from ``start`` on: in equal steps, except of
    one-cycle."""
    start: Share = 1 / 3
    """The factor of the first round of the warm-up."""
    every: Positive | None = None
    """step: rounds from one change to the next. It has no default."""
    factor: Share | None = None
    """step: default 0.1. exponential: it has no default."""
    rounds: Positive | None = None
    """linear, cosine, one-cycle: rounds from the end of the warm-up to ``least``. Default: as many
    as are left until stop.rounds."""
    least: Share = 1e-4
    """No factor after the warm-up is smaller. It is above 0: SCAFFOLD divides by the learning
    rate."""

    def factor_of(self, version: int) -> float:
        """Return what the learning rate of tasks that begin from this version is multiplied by."""
        return factor_at(_formula(self, self.rounds, 0), version)


class StepScheduleSection(Section, frozen=True, kw_only=True):
    """[local.step_schedule]: what the learning rate is multiplied by at each step of a task. Its
    first step is step 0, or with ``steps_per_round`` the round's number times that. Together with
    [local.schedule] the two factors are multiplied."""

    kind: Kind = "constant"
    """As of [local.schedule], with steps for rounds."""
    warm_up: WarmUp = 0
    """Steps in which the learning rate rises, from ``start`` on."""
    start: Share = 1 / 3
    """The factor of the first step of the warm-up."""
    every: Positive | None = None
    """step: steps from one change to the next. It has no default."""
    factor: Share | None = None
    """step: default 0.1. exponential: it has no default."""
    steps: Positive | None = None
    """linear, cosine, one-cycle: steps from the end of the warm-up to ``least``. Default: as many
    as each task has; with ``steps_per_round``, as many as are left until stop.rounds."""
    least: Share = 1e-4
    """No factor after the warm-up is smaller."""
    steps_per_round: Positive | None = None
    """How many steps further each round begins than the one before. Default: each task begins at
    step 0."""

    def of_task(self, version: int) -> StepSchedule:
        """Return the schedule of tasks that begin from this version."""
        return _formula(self, self.steps, version * (self.steps_per_round or 0))


def _formula(
    section: ScheduleSection | StepScheduleSection, length: int | None, first: int
) -> StepSchedule:
    return StepSchedule(
        kind=section.kind,
        warm_up=section.warm_up,
        start=section.start,
        every=section.every or 1,
        factor=1.0 if section.factor is None else section.factor,
        steps=length,
        least=section.least,
        first=first,
    )


def fill_schedules(local: dict[str, Any], rounds: object) -> None:
    """Put in what depends on the kind. ``rounds``: stop.rounds, as the author gave it. Raises
    ValueError on a key of another kind, on one that is missing, and on a warm-up that leaves
    nothing of the run."""
    if isinstance(given := local.get("schedule"), dict):
        schedule = local["schedule"] = {**given}
        _fill(schedule, "schedule", "rounds")
        _fill_length(schedule, "schedule", "rounds", rounds, 1)
    if isinstance(given := local.get("step_schedule"), dict):
        schedule = local["step_schedule"] = {**given}
        _fill(schedule, "step_schedule", "steps")
        if "steps_per_round" in schedule:
            _fill_length(schedule, "step_schedule", "steps", rounds, schedule["steps_per_round"])


def _fill(schedule: dict[str, Any], table: str, length: str) -> None:
    kind = str(schedule.get("kind", "constant"))
    of_kind = {"every": ("step",), "factor": ("step", "exponential"), length: FALLING}
    for key, kinds in of_kind.items():
        if key in schedule and kind not in kinds:
            raise ValueError(
                f"local.{table}.{key} = {schedule[key]!r} is of kind = "
                f"{' and '.join(map(repr, kinds))}; here it is {kind!r}"
            )
    if kind == "step":
        schedule.setdefault("factor", 0.1)
    for key in NEEDED.get(kind, ()):
        if key not in schedule:
            example = f"{key} = {NEEDED[kind][key]}"
            raise ValueError(
                f'local.{table}.{key} is missing: kind = "{kind}" needs it, such as {example}'
            )
    if "start" in schedule and not schedule.get("warm_up"):
        raise ValueError(
            f"local.{table}.start = {schedule['start']!r} is the first factor of a warm-up, and "
            f"there is none. Set local.{table}.warm_up, or leave start out"
        )


def _fill_length(
    schedule: dict[str, Any], table: str, length: str, rounds: object, each: object
) -> None:
    """Put in how long the schedule falls: until the end of the run. each: how many rounds or steps
    a round counts."""
    warm_up = schedule.get("warm_up", 0)
    if not (isinstance(rounds, int) and isinstance(each, int) and isinstance(warm_up, int)):
        return  # the types are checked later
    if schedule.get("kind") not in FALLING or length in schedule:
        return
    if rounds * each <= warm_up:
        raise ValueError(
            f"local.{table}.warm_up = {warm_up} and stop.rounds = {rounds}: no {length[:-1]} is "
            f"left for kind = {schedule['kind']!r}. Expected a shorter warm-up, or "
            f"local.{table}.{length}"
        )
    schedule[length] = rounds * each - warm_up


def schedule_remarks(
    schedule: ScheduleSection | None, steps: StepScheduleSection | None, rounds: int
) -> list[str]:
    """Say which values change nothing before the run is over."""
    texts = []
    if schedule is not None:
        texts += _late(schedule, "schedule", rounds, f"stop.rounds = {rounds}")
    if steps is not None and steps.steps_per_round is not None:
        whole = rounds * steps.steps_per_round
        run = f"stop.rounds = {rounds} of steps_per_round = {steps.steps_per_round}"
        texts += _late(steps, "step_schedule", whole, run)
    return texts


def _late(
    section: ScheduleSection | StepScheduleSection, table: str, whole: int, run: str
) -> list[str]:
    if section.warm_up and whole <= section.warm_up:
        return [
            f"local.{table}.warm_up = {section.warm_up} and {run}: the run is over before the "
            "warm-up is, and the learning rate never reaches local.lr"
        ]
    if section.every is not None and section.warm_up + section.every >= whole:
        return [
            f"local.{table}.every = {section.every} and {run}: the run is over before the learning "
            "rate falls for the first time"
        ]
    return []
