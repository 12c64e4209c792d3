"""A finished update: masked where it must be, uploaded when the coordinator has room, and forgotten
once it is accepted."""

from __future__ import annotations

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    Grant,
    TaskFinished,
    TaskWeighing,
    Waiting,
)

from fleetlearn_device.session.commands import (
    Commands,
    MaskPending,
    Note,
    Send,
    SendUpdate,
    StopUpdate,
)
from fleetlearn_device.session.secure_demands import factor_refusal
from fleetlearn_device.session.session_state import SessionState, tag
from fleetlearn_device.session.states import (
    AnswerReady,
    Finished,
    Holding,
    Masking,
    Online,
    Sent,
    Unmasked,
    Uploading,
)


def ask_what_it_counts(session: SessionState) -> Commands:
    """Ask what the saved update counts, before it is masked."""
    assert isinstance(session.work, Unmasked)
    return session.send_if_online(TaskFinished(session.work.task_id))


def weigh(session: SessionState, weighing: TaskWeighing) -> Commands:
    """Mask the update, as it is known now what it counts."""
    work = session.work
    if not isinstance(work, Unmasked) or isinstance(work, Masking) or weighing.task != work.task_id:
        return session.ignore(weighing, weighing.task)
    if refused := factor_refusal(work.least_factor, weighing.factor):
        return session.fail_task(work, *refused)
    session.work = Masking(work.task_id, work.round, work.least_factor)
    session.running_task_id = work.task_id
    text = f"task {work.task_id}: the update counts for {weighing.factor:.4g} of itself"
    return [
        Note(f"{text}; it is masked now", event="masking"),
        MaskPending(work.task_id, weighing.factor),
    ]


def upload(session: SessionState, grant: Grant) -> Commands:
    """Send the update from the grant's offset on."""
    check_reported(session, grant, grant.task)
    work = session.work
    if not isinstance(work, Finished) or grant.task != work.task_id:
        return session.ignore(grant, grant.task)
    if isinstance(work, Uploading | Sent) and grant.transfer == work.transfer:
        return [Note(f"task {grant.task}: a second grant {grant.transfer} is ignored")]
    size = work.report.size
    if grant.offset > size:
        text = (
            f"the grant for task {grant.task} begins at {grant.offset}; the update has {size} bytes"
        )
        raise ProtocolError(Code.WRONG_OFFSET, text)
    assert isinstance(session.link, Online)
    session.work = Uploading(work.report, work.reported_again, grant.transfer)
    rest = f", from byte {grant.offset} on" if grant.offset else ""
    text = f"task {grant.task}: uploading the update of {size} bytes{rest}"
    return [
        Note(text, event="uploading"),
        SendUpdate(work.task_id, grant.transfer, grant.offset, session.link.chunk_bytes),
    ]


def wait_for_turn(session: SessionState, waiting: Waiting) -> Commands:
    """A transfer lost its turn, or has none yet. For a fetch, the message alone starts the
    patience again."""
    if waiting.task is None:
        return [Note("what is fetched waits for its turn")]
    work = session.work
    if not isinstance(work, Uploading | Sent) or waiting.task != work.task_id:
        return session.ignore(waiting, waiting.task)
    # The report comes after the last chunk, so the next grant's offset counts all chunks.
    session.work = Holding(work.report, work.reported_again)
    return [
        Note(f"task {waiting.task}: the upload waits for its turn"),
        StopUpdate(),
        Send(work.report),
    ]


def check_reported(session: SessionState, message: Accepted | Grant, task_id: str) -> None:
    """Raise ProtocolError where the coordinator answers to a report that it never had."""
    if task_id == session.task_id and not isinstance(session.work, Finished | AnswerReady):
        text = (
            f"{tag(message)} came for task {task_id}, which was not reported (it is "
            f"{type(session.work).__name__.lower()})"
        )
        raise ProtocolError(Code.OUT_OF_TURN, text)


def accept(session: SessionState, accepted: Accepted) -> Commands:
    """Forget what was reported: the coordinator has it."""
    # An unmasked update may be back on the disk after a power cut.
    if not isinstance(session.work, Unmasked):
        check_reported(session, accepted, accepted.task)
    if accepted.task != session.task_id:
        return session.ignore(accepted, accepted.task)
    session.faults = 0
    begin = f"task {accepted.task}:"
    if isinstance(session.work, AnswerReady):
        text = f"{begin} answer accepted ({session.work.message.kind})"
        return [Note(text, event="answer-accepted"), *session.drop_task("answered")]
    dropped = session.drop_task("accepted")
    text = f"{begin} update accepted; the coordinator has it for the next model"
    text = f"{text} ({session.history.accepted} accepted so far)"
    return [Note(text, event="update-accepted"), *dropped]


def cancel(session: SessionState, message: Cancel) -> Commands:
    """Drop the task that the coordinator no longer wants."""
    if message.task != session.task_id:
        return session.ignore(message, message.task)
    why = message.text or message.code.value
    text = f"task {message.task} is cancelled, and its work does not count: {why}"
    note = Note(text, event="task-uncounted")
    return [note, *session.drop_task("uncounted", why)]
