"""A task or a question that arrives: taken on, or given back."""

from __future__ import annotations

from dataclasses import replace

from fleetlearn_protocol.computations.settings import KIND_NAMES
from fleetlearn_protocol.errors import Code, ProtocolError, clip, many
from fleetlearn_protocol.messages import Failed, Question, Signed, Task, Trust

from fleetlearn_device.session.commands import Commands, Note, SaveTrusted, Send
from fleetlearn_device.session.demands_of_tasks import why_given_back
from fleetlearn_device.session.pausing import give_back_at_once
from fleetlearn_device.session.secure_demands import GivenBack
from fleetlearn_device.session.session_state import SessionState
from fleetlearn_device.session.states import Assignment, Locating, UnfinishedTask
from fleetlearn_device.session.trust import Trusted, message_in


def assign(session: SessionState, task: Task | Question, now: float) -> Commands:
    """Take on a task or a question, or give it back."""
    deadline = now + task.deadline
    if task.task in (session.task_id, session.ended_task_id):
        if isinstance(session.work, UnfinishedTask) and task.task == session.task_id:
            # A coordinator that was restarted gives the round its time again.
            session.work = replace(
                session.work, assignment=replace(session.work.assignment, deadline=deadline)
            )
        return [Note(f"task {task.task} was given again; the device has it")]
    if session.pause is not None:
        return give_back_at_once(session, task, session.pause)
    commands: Commands = []
    if session.task_id is not None:
        # A coordinator that gives another task no longer waits for the first (it lost it in a
        # restart).
        why = f"the coordinator gave task {task.task} in its place"
        commands = [
            Note(f"task {session.task_id} is dropped: {why}", True),
            *session.drop_task("uncounted", why),
        ]
    session.work, session.history = (
        Locating(Assignment(task, deadline)),
        session.history.begun(task),
    )
    session.waits = ""  # what was so at the check-in is over
    what = _described(task) if isinstance(task, Task) else task.kind
    text = f"task {task.task}: {what}, {task.deadline:.4g} s to the deadline"
    if isinstance(task, Task) and task.secure is not None:
        text = f"{text}; masked, for a sum of at least {task.secure.minimum} devices' updates"
    note = Note(text, event="task-given")
    refused = why_not(session, task)
    if refused is not None:
        return [*commands, note, *session.fail_task(session.work, *refused)]
    return [*commands, note, *session.look_up()]


def _described(task: Task) -> str:
    """Return what a task is, for the log."""
    computes = task.algorithm in KIND_NAMES
    return f"round {task.round}, {task.algorithm if computes else many(task.epochs, 'epoch')}"


def distrust(session: SessionState, task: Task | Question, why: str) -> Commands:
    """Give back a task that is not to be believed. What the device works on stays as it is."""
    text = clip(f"task {task.task} is not trained: {why}")
    # a forged message must not end the real task
    named = task.task in (session.task_id, session.ended_task_id)
    failed: Commands = [] if named else [Send(Failed(task.task, "untrusted", text))]
    return [Note(text, True), *failed, *session.close_for_fault("a task is not trusted")]


def open_signed(
    session: SessionState, signed: Signed, trusted: Trusted | None, now: float
) -> Commands:
    """Do what a signed message says, if the signature is good."""
    if trusted is None:
        raise ProtocolError(
            Code.OUT_OF_TURN,
            "a signed message came, and this device has no keys to check it with",
        )
    message = message_in(signed)
    why = trusted.why_not(signed, session.challenge, session.device)
    match message:
        case Task() | Question():
            return assign(session, message, now) if why is None else distrust(session, message, why)
        case Trust(keys=keys):
            if why is not None:
                return session.close_for_fault(f"new keys to trust are refused: {why}")
            session.trusted = trusted._replace(keys=keys)
            return [
                Note(f"the coordinator's keys are now {', '.join(keys)}"),
                SaveTrusted(keys),
            ]


def why_not(session: SessionState, task: Task | Question) -> GivenBack | None:
    """Return why the device does not do a task; None if it does."""
    return why_given_back(
        task,
        session.demands,
        session.secure_demands,
        session.took_part(task.task),
        known=(session.algorithms, session.exchanges, session.can_mask),
        made=session.was_made(task.task),
    )
