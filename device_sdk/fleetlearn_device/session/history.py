"""What became of a device's tasks: numbers and sentences for its owner."""

from __future__ import annotations

from typing import Literal

import msgspec
from fleetlearn_protocol.messages import PrivacyNote, Question, SecureTask, Task

Outcome = Literal["accepted", "answered", "uncounted", "failed"]
"""How a task ended: its update was accepted, its answer was; it does not count; the device gave it
back."""


class History(msgspec.Struct, frozen=True):
    """What became of the tasks, over all processes that used the state directory."""

    accepted: int = 0
    """Updates that the coordinator accepted."""
    answered: int = 0
    """Answers in exchanges, such as measurements, that the coordinator accepted."""
    uncounted: int = 0
    """Tasks whose work does not count: the round was over, or the update was refused."""
    failed: int = 0
    """Tasks that the device gave back because it could not do them."""
    task: str = ""
    """The last task. Empty: there was none."""
    what: str = ""
    """What the task was: ``round 3``, or a kind of exchange, such as ``evaluation``."""
    round: int | None = None
    """The last round of which a task was to train. None: there was none."""
    end: str = ""
    """How the task ended, as a sentence without its subject. Empty: it goes on."""
    reason: str = ""
    """Why the last task that failed, or did not count, did so."""
    privacy: PrivacyNote | None = None
    """What the coordinator said of its run's privacy with the last task to train. None: nothing."""
    secure: SecureTask | None = None
    """How the update of the last task to train is masked. None: it is not."""

    def warned(self, text: str) -> History:
        """Return the history after the coordinator said why the last update does not count, though
        it was accepted."""
        return msgspec.structs.replace(self, reason=text)

    def begun(self, task: Task | Question) -> History:
        """Return the history after the device has taken a task."""
        begun = msgspec.structs.replace(self, task=task.task, end="")
        if isinstance(task, Task):
            return msgspec.structs.replace(
                begun,
                what=f"round {task.round}",
                round=task.round,
                privacy=task.privacy,
                secure=task.secure,
            )
        return msgspec.structs.replace(begun, what=task.kind)

    def ended(self, task_id: str, outcome: Outcome, why: str) -> History:
        """Return the history after the task has ended. ``why``: for tasks that failed or do not
        count."""
        ends = {
            "accepted": "its update was accepted",
            "answered": "its answer was accepted",
            "uncounted": f"does not count: {why}",
            "failed": f"failed: {why}",
        }
        count = {outcome: getattr(self, outcome) + 1}
        reason = f"task {task_id} {ends[outcome]}" if why else self.reason
        what = self.what if task_id == self.task else ""
        return msgspec.structs.replace(
            self, task=task_id, what=what, end=ends[outcome], reason=reason, **count
        )
