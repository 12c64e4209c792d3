"""What becomes of a task when the device must not work."""

from __future__ import annotations

from fleetlearn_protocol.errors import clip
from fleetlearn_protocol.messages import Failed, Question, Task

from fleetlearn_device.session.commands import Commands, FinishEarly, Note, Send
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.session_state import SessionState
from fleetlearn_device.session.states import Training, UnfinishedTask


def shorten(session: SessionState, work: UnfinishedTask, pause: Pause) -> Commands:
    """End an unfinished task: with what was done, where that may be reported."""
    task = work.assignment.task
    wants_partial = isinstance(task, Task) and task.time_budget is not None and task.secure is None
    if isinstance(work, Training) and wants_partial and pause.sends and not pause.keeps:
        return [FinishEarly(work.task_id)]
    return give_back(session, work, pause)


def give_back(session: SessionState, work: UnfinishedTask, pause: Pause) -> Commands:
    """Give the task back. Offline, or where the pause keeps it, it is dropped: if its lease
    lives when the device is back, the coordinator gives it again, and its training goes on
    where it was."""
    trains = isinstance(work, Training) and isinstance(work.assignment.task, Task)
    failed: Commands = []
    if not (trains and pause.keeps):
        failed = session.send_if_online(Failed(work.task_id, "paused", clip(pause.text)))
    keep = trains and not failed
    dropped = session.drop_task("uncounted", pause.in_words, keep=keep)
    if not failed:
        session.ended_task_id = None
    return [*failed, *dropped, *session.close_paused(pause)]


def give_back_at_once(session: SessionState, task: Task | Question, pause: Pause) -> Commands:
    """Refuse a task that crossed with the pause. A coordinator that gives another task no
    longer waits for the one that the device has."""
    failed = Send(Failed(task.task, "paused", clip(pause.text)))
    dropped = [] if session.task_id is None else session.drop_task("uncounted", pause.in_words)
    note = Note(f"task {task.task} is given back: {pause.in_words}")
    return [note, failed, *dropped, *session.close_paused(pause)]
