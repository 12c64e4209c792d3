"""What a device's owner demands of a run for the sake of privacy, whatever the coordinator says."""

from __future__ import annotations

from typing import NamedTuple

from fleetlearn_protocol.messages import SUMS, UPDATE, Question, Task
from fleetlearn_protocol.task_names import run_of

from fleetlearn_device.session.secure_demands import HARMLESS_KINDS, MASKED_ONCE, is_masked


class PrivacyDemands(NamedTuple):
    """The owner's demands."""

    require: bool = False
    """Take part only in runs with differential privacy: do no task that does not bound the update,
    says nothing of the run's privacy, or asks for more than the update; answer no question, whose
    answer has no noise."""
    participations: int | None = None
    """Most updates that the device makes in one run, whether or not they count there. None: any
    number."""


NO_DEMANDS = PrivacyDemands()
NOISED_ONCE = (
    "the device made an update with its own noise for this task already, and it is lost: of two, "
    "whoever has both could take the mean, which has less noise"
)
"""Why a task is given back whose update was made before."""

NOT_TOLD = "why is not told: the device adds its own noise, and the reason may tell of its data"
"""What the coordinator is told of a task with noise that failed, in place of the reason."""
MASKED_NOT_TOLD = "why is not told: the update is masked, and the reason may tell of its data"
"""The same of a task with secure aggregation."""
TELL_OF_DATA = frozenset(
    ["diverged", "bad-data", "runtime-error", "out-of-memory", "out-of-time", "killed", "disk-full"]
)
"""Codes of failures whose text may say what the data are, or what was trained."""


def is_noised(task: Task | Question | None) -> bool:
    """Return whether the device is to add its own noise to the update of a task."""
    return isinstance(task, Task) and task.local_noise is not None


def why_once(task: Task | Question) -> str | None:
    """Return why the device may make only one update of a task, for people. None: it may make the
    same one once more, where the first is lost."""
    if is_noised(task):
        return NOISED_ONCE
    return MASKED_ONCE if is_masked(task) else None


def told_of_failure(task: Task | Question | None, code: str, text: str) -> str:
    """Return what the coordinator is told of a task that failed. ``text``: the reason, for the
    device's owner. ``task``: None where it is not known any more."""
    if code not in TELL_OF_DATA:
        return text
    if is_noised(task):
        return NOT_TOLD
    return MASKED_NOT_TOLD if is_masked(task) else text


def check_demands(demands: PrivacyDemands) -> None:
    """Raise ValueError where they make no sense."""
    most = demands.participations
    if most is not None and most < 1:
        raise ValueError(f"privacy.participations is {most}; expected at least 1, or None")


def is_counted(demands: PrivacyDemands, task: Task) -> bool:
    """Return whether the device counts its update of this task: in private runs it always does."""
    return task.clip is not None or task.privacy is not None or demands.participations is not None


def refusal(demands: PrivacyDemands, task: Task | Question, took_part: int) -> str | None:
    """Return why the owner's demands forbid this, for people; None if they do not. ``took_part``:
    how often the device took part in the run before."""
    if demands.require and (lacking := _not_private(task)):
        return (
            "this device's owner lets it take part only in runs with differential privacy "
            f"(privacy.require), and {lacking}"
        )
    most = demands.participations
    if isinstance(task, Task) and most is not None and took_part >= most:
        return (
            f"this device has made {took_part} updates in the run {run_of(task.task)}, and its "
            f"owner allows {most} (privacy.participations)"
        )
    return None


def _not_private(task: Task | Question) -> str | None:
    if isinstance(task, Question):
        if task.kind in HARMLESS_KINDS:
            return None
        return f"its answer to the question {task.kind} would have no noise"
    if task.clip is None:
        return "the task does not bound the update (`clip`)"
    if task.privacy is None:
        return "the task does not say what the run has spent of its privacy (`privacy`)"
    if [*task.parts] == [SUMS]:
        return None  # the clip norm is theirs
    if others := [name for name in task.parts if name != UPDATE]:
        return f"the task asks for the part {others[0]}, which is neither bounded nor hidden"
    return None
