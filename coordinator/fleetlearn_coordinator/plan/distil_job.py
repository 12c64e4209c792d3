"""What a distillation of a plan's models depends on, for the server and the simulator alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from fleetlearn_protocol.distillation import DistillationJob, Distilled

from fleetlearn_coordinator.plan.distil_section import DistilSection

SEEDS = 2**53
DISTILLED = "distilled"
"""The key of a round's summary."""


def is_due(distil: DistilSection, version: int) -> bool:
    """Return whether the models of this version are distilled."""
    return version % distil.every == 0


def job_of(
    distil: DistilSection,
    seed: int,
    version: int,
    students: Iterable[int],
    teachers: Iterable[int],
) -> DistillationJob:
    """Return the job that makes a version's models. ``seed``: the plan's. ``students``,
    ``teachers``: the place of each teacher's member in the plan."""
    return DistillationJob(
        seed=(seed + version) % SEEDS,
        steps=distil.steps,
        batch_size=distil.batch_size,
        lr=distil.lr,
        temperature=distil.temperature,
        students=tuple(students),
        teachers=tuple(teachers),
    )


def summary_of(
    job: DistillationJob, found: Sequence[Distilled], names: Sequence[str]
) -> dict[str, Any]:
    """Return what a round's summary has of its distillation. ``names``: of the run's members; one
    that has no name is the only one."""
    about: dict[str, Any] = {"teachers": len(job.teachers), "steps": job.steps}
    losses = [msgspec.to_builtins(each) for each in found]
    if [*names] == [""]:
        return {DISTILLED: about | losses[0]}
    students = (names[place] for place in job.students)
    return {DISTILLED: about | {"members": dict(zip(students, losses, strict=True))}}


def failed_summary(why: str) -> dict[str, Any]:
    """Return what a round's summary has of a distillation that came to nothing."""
    return {DISTILLED: {"error": why}}
