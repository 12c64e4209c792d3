"""What the coordinator refuses, and what the device does then."""

from __future__ import annotations

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import Refused

from fleetlearn_device.session.commands import Commands, Note, Send, StopUpdate
from fleetlearn_device.session.contents import content_refused
from fleetlearn_device.session.session_state import SessionState
from fleetlearn_device.session.states import CheckingIn, Finished, Holding

VERSION_WAIT = 600.0
"""Seconds, about, until the device checks in again with a coordinator that speaks another version
of the protocol."""


def handle_refusal(session: SessionState, refused: Refused, now: float) -> Commands:
    """Do what follows from a refusal: of the check-in, of a content, of a task."""
    said = f"{refused.text} [{refused.code.value}]"
    if refused.code is Code.REPLACED and refused.task is None and refused.sha256 is None:
        return end_replaced(session, said)
    if isinstance(session.link, CheckingIn):
        return check_in_refused(session, refused, said)
    if refused.sha256 is not None:
        return content_refused(session, refused, refused.sha256, said, now)
    if refused.task is not None:
        return task_refused(session, refused, refused.task, said)
    return session.close_for_fault(f"something was refused: {said}")


def check_in_refused(session: SessionState, refused: Refused, said: str) -> Commands:
    """Close the connection, and end the device where another check-in would be refused too."""
    if refused.code is Code.BAD_VERSION and not session.until_finished:
        # The coordinator may be given another version while nobody is near the device.
        text = f"the coordinator speaks another version of the protocol: {refused.text}"
        return [Note(text, True), *session.close("another version of the protocol", VERSION_WAIT)]
    if refused.code in (Code.BAD_VERSION, Code.BAD_MESSAGE, Code.UNKNOWN_TYPE, Code.TOO_LARGE):
        session.error = ProtocolError(
            refused.code, f"the coordinator refuses the check-in: {refused.text}"
        )
        session.stopping = True
    return session.close_for_fault(f"the check-in is refused: {said}")


def task_refused(session: SessionState, refused: Refused, task_id: str, said: str) -> Commands:
    """Report a finished update once more where that can help; else drop the task."""
    work = session.work
    if task_id != work.task_id or refused.code is Code.DUPLICATE:
        return session.ignore(refused, task_id)
    if refused.code is Code.BUSY:
        return session.close(f"task {task_id}: {said}")
    if isinstance(work, Finished):
        if refused.code is Code.WRONG_OFFSET:
            session.work = Holding(work.report, work.reported_again)
            return [Note(f"task {task_id} waits for another grant: {said}", True), StopUpdate()]
        if refused.code in (Code.WRONG_HASH, Code.WRONG_LENGTH) and not work.reported_again:
            session.work = Holding(work.report, reported_again=True)
            return [Note(f"task {task_id} is reported again: {said}", True), Send(work.report)]
    text = f"task {task_id} is forgotten, and its work does not count: {said}"
    note = Note(text, True, "task-uncounted")
    return [note, *session.drop_task("uncounted", said)]


def end_replaced(session: SessionState, said: str) -> Commands:
    """End the device. This is the session's only connection, so another process speaks for the
    device, and has its task. The two would replace each other for ever."""
    text = (
        f"another process connected to the coordinator as device {session.device}, so this one "
        f"ends ({said}). Each device needs a state directory of its own, which holds its name: "
        "where one was copied, as with a card, delete identity.json and, if they are there, "
        "credential.json and device_key.json in the copy"
    )
    session.error, session.stopping = ProtocolError(Code.REPLACED, text), True
    why = "another process speaks for this device"
    return [*session.drop_unfinished_task(why), *session.close(why)]
