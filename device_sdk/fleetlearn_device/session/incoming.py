"""What each message of the coordinator does."""

from __future__ import annotations

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    ComeBack,
    Content,
    FromCoordinator,
    Grant,
    Heartbeat,
    Question,
    Refused,
    Signed,
    Task,
    TaskWeighing,
    Trust,
    Waiting,
    Welcome,
)
from fleetlearn_protocol.versions import check_chosen

from fleetlearn_device.session.commands import Commands, Note, Send
from fleetlearn_device.session.contents import receive_content
from fleetlearn_device.session.refusals import handle_refusal
from fleetlearn_device.session.session_state import QUIET, QUIET_AT_MOST, SessionState, tag
from fleetlearn_device.session.states import (
    AnswerReady,
    CheckingIn,
    Holding,
    Masking,
    Online,
    Unmasked,
)
from fleetlearn_device.session.tasks import assign, distrust, open_signed
from fleetlearn_device.session.updates import (
    accept,
    ask_what_it_counts,
    cancel,
    upload,
    wait_for_turn,
    weigh,
)

BEAT = 0.8
"""Heartbeats are sent at this part of the interval that the coordinator allows."""
COME_BACK = {
    "no-task": "the coordinator has no task for this device now",
    "busy": "the coordinator is busy",
    "stopping": "the coordinator is stopping",
    "finished": "the training is finished, and may be continued later",
}
"""Why the coordinator sends a device away, for people."""


def handle(session: SessionState, message: FromCoordinator, now: float) -> Commands:
    """Do what a message asks for. Raises ProtocolError where it breaks the protocol."""
    if isinstance(session.link, CheckingIn) and not isinstance(
        message, Welcome | ComeBack | Refused
    ):
        raise ProtocolError(Code.OUT_OF_TURN, f"{tag(message)} came before the welcome")
    match message:
        case Welcome():
            return welcome(session, message, now)
        case ComeBack():
            return come_back(session, message)
        case Task() | Question():
            if session.trusted is not None:
                return distrust(
                    session, message, "it is not signed, and this device does only what is"
                )
            return assign(session, message, now)
        case Signed():
            return open_signed(session, message, session.trusted, now)
        case Trust():
            raise ProtocolError(Code.OUT_OF_TURN, "keys to trust came without a signature")
        case Content():
            return receive_content(session, message, now)
        case TaskWeighing():
            return weigh(session, message)
        case Grant():
            return upload(session, message)
        case Waiting():
            return wait_for_turn(session, message)
        case Accepted():
            return accept(session, message)
        case Cancel():
            return cancel(session, message)
        case _:  # refused
            return handle_refusal(session, message, now)


def come_back(session: SessionState, message: ComeBack) -> Commands:
    """Leave, and return when the coordinator says; where training is finished, perhaps never."""
    after, reason = message.after, message.reason
    if reason == "finished" and session.until_finished:
        session.finished = session.stopping = True
        dropped = session.drop_unfinished_task("the training is finished")
        return [*dropped, *session.close("the training is finished", after)]
    text = f"{COME_BACK[reason]}; the device comes back in about {after:g} s ({reason})"
    return session.close(text, after)


def welcome(session: SessionState, message: Welcome, now: float) -> Commands:
    """Go on with what the device has, or wait for a task."""
    if isinstance(session.link, Online):
        return [Note("a second welcome is ignored")]
    check_chosen(message.protocol)
    interval = max(BEAT * message.heartbeat, 0.01)
    session.link = Online(interval, now + interval, min(message.chunk_bytes, CHUNK_BYTES))
    session.ineligible, session.quiet = message.ineligible, (now, now + QUIET)
    session.waits = message.waits
    goes_on = (
        "waiting for a task" if session.task_id is None else f"going on with task {session.task_id}"
    )
    coordinator = message.coordinator or "the coordinator"
    text = f"checked in with {coordinator} as {session.device}; {goes_on}"
    commands: Commands = [Note(text, event="checked-in")]
    if message.ineligible:
        text = f"there will be no task for this device: {message.ineligible}"
        commands.append(Note(text, warning=True, event="not-eligible"))
    if message.warning:
        session.history = session.history.warned(message.warning)
        text = f"the coordinator warns: {message.warning}"
        commands.append(Note(text, warning=True, event="warned"))
    if session.unsent_failure is not None:
        commands.append(Send(session.unsent_failure))
        session.unsent_failure = None
    if isinstance(session.work, Holding):
        commands.append(Send(session.work.report))
    elif isinstance(session.work, Unmasked) and not isinstance(session.work, Masking):
        commands += ask_what_it_counts(session)
    elif isinstance(session.work, AnswerReady):
        commands.append(Send(session.work.message))
    elif session.task_id is not None:
        # so that the lease is known to be alive
        commands.append(Send(Heartbeat(session.task_id, session.steps)))
    return [*commands, *session.look_up()]


def say_quiet(session: SessionState, now: float) -> Commands:
    """Say that there was no task for a while: after 10 minutes, 20, 40 and so on, and once a day
    from then on."""
    since, _ = session.quiet
    waited = now - since
    session.quiet = since, now + min(max(waited, QUIET), QUIET_AT_MOST)
    why = session.ineligible or "the coordinator has not chosen it for a round since then"
    if session.waits and not session.ineligible:
        why = f"{why}; at the check-in: {session.waits}"
    text = f"no task for {waited / 60:.0f} min; the device is connected and ready: {why}"
    return [Note(text, event="no-task")]
