"""What a device's session knows, and the steps that its parts share: send, close, drop a task.

``session.py`` has the events; each file beside it has what one kind of message or event does, as
functions of this state.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_protocol.errors import clip
from fleetlearn_protocol.messages import (
    Content,
    Failed,
    FailureCode,
    FromCoordinator,
    FromDevice,
    Report,
)
from fleetlearn_protocol.task_names import run_of

from fleetlearn_device.session.commands import (
    Close,
    Commands,
    DropPending,
    Locate,
    Note,
    Send,
    StopHttp,
    StopTraining,
)
from fleetlearn_device.session.history import History, Outcome
from fleetlearn_device.session.http_sources import NO_SOURCES, HttpSources
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.privacy_demands import NO_DEMANDS, PrivacyDemands, told_of_failure
from fleetlearn_device.session.secure_demands import NO_SECURE_DEMANDS, SecureDemands
from fleetlearn_device.session.states import (
    CheckingIn,
    Closing,
    Fetching,
    Finished,
    Holding,
    Idle,
    Link,
    Locating,
    Masking,
    Offline,
    Online,
    Saving,
    Sent,
    Training,
    UnfinishedTask,
    Unmasked,
    Uploading,
    Work,
)
from fleetlearn_device.session.trust import Trusted

QUIET, QUIET_AT_MOST = 600.0, 86400.0
"""Seconds without a task after which the log says so, and most seconds until it says so again."""


class SessionState:
    """What a session knows; ``Session`` has its events.

    held: an update saved by an earlier process; unmasked: one that is to be masked yet. algorithms:
    those that the device can do beside ``plain``. functions: those that its owner lets it compute
    by. exchanges: the kinds of questions that it can answer. trusted: the device's keys, where it
    does only what one of them signed. demands, secure_demands: its owner's. can_mask: whether it
    has what secure aggregation needs. can_choose_rows: whether its runtime trains sub-models, of
    some rows of tables. took_part: run -> how many updates the device made in it. was_made: task ->
    whether the device made its update already. sources: from where it fetches by HTTP.
    """

    def __init__(
        self,
        device: str,
        examples: int,
        *,
        runtime: str = "",
        software: str = "",
        algorithms: tuple[str, ...] = (),
        functions: tuple[str, ...] = (),
        exchanges: tuple[str, ...] = (),
        held: Report | None = None,
        unmasked: Unmasked | None = None,
        trusted: Trusted | None = None,
        until_finished: bool = False,
        demands: PrivacyDemands = NO_DEMANDS,
        secure_demands: SecureDemands = NO_SECURE_DEMANDS,
        can_mask: bool = False,
        can_choose_rows: bool = False,
        took_part: Callable[[str], int] = lambda run: 0,
        was_made: Callable[[str], bool] = lambda task: False,
        sources: HttpSources = NO_SOURCES,
    ) -> None:
        self.device, self.examples = device, examples
        self.runtime, self.software = runtime, software
        self.algorithms, self.exchanges, self.trusted = algorithms, exchanges, trusted
        self.functions = functions
        self.until_finished = until_finished
        self.demands, self._took_part, self.was_made = demands, took_part, was_made
        self.secure_demands, self.can_mask = secure_demands, can_mask
        # Which rows it fetches tells what its data are.
        self.can_choose_rows = can_choose_rows and not (demands.require or secure_demands.require)
        self.sources = sources
        self.no_http_until = 0.0
        """Until then all is fetched by the WebSocket: HTTP brought nothing, or wrong bytes."""
        self.link: Link = Offline()
        self.work: Work = unmasked or Idle()
        if held is not None:
            self.work = Holding(held, reported_again=False)
        self.running_task_id: str | None = None
        """The task whose training or saving has not ended, wanted or not. There is never a
        second."""
        self.faults = 0
        """Failed tasks and broken protocol since the last accepted update."""
        self.steps = 0
        """How far training was at the last ``tick``."""
        self.stopping = False
        self.finished = False
        """The coordinator said that the training is finished, and ``until_finished`` is set."""
        self.error: Exception | None = None
        """Why the device cannot go on at all."""
        self.history = History()
        """What became of the tasks. The owner may set the history of an earlier process."""
        self.pause: Pause | None = None
        """Why the device must not work now. While there is such a reason it takes no task."""
        self.last_progress = 0.0
        """When the last frame arrived, or the device last began to wait for an answer."""
        self.ended_task_id: str | None = None
        """The task that ended on this connection, or whose failure is not sent yet. It is not begun
        again."""
        self.unsent_failure: Failed | None = None
        """It is sent with the next welcome."""
        self.ineligible = ""
        """Why the coordinator gives this device no task, as it said at the last check-in. Empty: it
        may get one."""
        self.waits = ""
        """Why there was no task for anybody at the last check-in, as the coordinator said. Empty
        from the next task on."""
        self.quiet = 0.0, 0.0
        """Since when the device has waited for a task, and when that is to be said next."""
        self.challenge = ""
        """What a signature on this connection must have, where the device trusts keys."""

    @property
    def task_id(self) -> str | None:
        """The task that the device works on or whose update it holds."""
        return self.work.task_id

    def took_part(self, task_id: str) -> int:
        """Return how many updates the device made in the run that a task belongs to."""
        return self._took_part(run_of(task_id))

    @property
    def over(self) -> bool:
        """The session was to stop, and nothing is left to be done."""
        return self.stopping and isinstance(self.link, Offline) and self.running_task_id is None

    def look_up(self) -> Commands:
        """Look up what is lacking, if that is the task's next step."""
        if self.stopping or not isinstance(self.work, Locating):
            return []
        return [Locate(self.work.assignment.task)]

    def drop_task(self, outcome: Outcome, why: str = "", *, keep: bool = False) -> Commands:
        """End the current task, whatever its state. ``why``: for a task that fails or does not
        count. ``keep``: save how far its training is."""
        work, self.work = self.work, Idle()
        self.ended_task_id = work.task_id
        self.quiet = self.last_progress, self.last_progress + QUIET
        assert work.task_id is not None
        self.history = self.history.ended(work.task_id, outcome, why)
        commands: Commands = []
        match work:
            case Fetching(content=Content(url=str())):
                commands.append(StopHttp())
            case Training() if self.running_task_id is not None:  # it has not ended by itself
                commands.append(StopTraining(work.task_id, keep))
            case Masking() if self.running_task_id is not None:
                pass  # it is dropped by ``masked``, which finds it unwanted
            case Unmasked() | Finished():
                commands.append(DropPending(work.task_id))
        # An update that is being saved is dropped by ``saved``, which finds it unwanted.
        if self.pause is not None:
            commands += self.close_paused(self.pause)
        return commands

    def drop_unfinished_task(self, why: str) -> Commands:
        """End the current task, if no update came of it yet."""
        return self.drop_task("uncounted", why) if isinstance(self.work, UnfinishedTask) else []

    def fail_task(
        self, work: UnfinishedTask | Saving | Unmasked, code: FailureCode, text: str
    ) -> Commands:
        """Give the task back to the coordinator, now or with the next welcome."""
        task = work.assignment.task if isinstance(work, UnfinishedTask) else None
        failed = Failed(work.task_id, code, clip(told_of_failure(task, code, text)))
        sent = self.send_if_online(failed)
        self.unsent_failure = None if sent else failed
        why = clip(text) or code
        note = Note(f"task {work.task_id} failed: {why}", True, "task-failed")
        dropped = self.drop_task("failed", why)
        return [note, *sent, *dropped, *self.close_for_fault(f"task {work.task_id} failed")]

    def send_if_online(self, message: FromDevice) -> Commands:
        """Send a message if the coordinator has welcomed the device on this connection."""
        return [Send(message)] if isinstance(self.link, Online) else []

    def close_for_fault(self, reason: str, code: int = 1000) -> Commands:
        """Close the connection, and have the owner wait longer before the next one."""
        self.faults += 1
        return self.close(reason, code=code)

    def close_paused(self, pause: Pause) -> Commands:
        """Close the connection until the pause is over."""
        return self.close(pause.in_words, after=0.0)

    def close(self, reason: str, after: float | None = None, code: int = 1000) -> Commands:
        """Close the connection, if there is one. ``after``: seconds until the next; None: the owner
        decides. ``code``: of the WebSocket's close frame."""
        if isinstance(self.link, Offline | Closing):
            return []
        self.interrupt_transfer()
        self.link = Closing()
        return [Close(reason, after, code)]

    def interrupt_transfer(self) -> None:
        """Go back to where the next connection begins: a fetch at its partial content, an upload at
        its report."""
        work = self.work
        if isinstance(work, Fetching):
            self.work = Locating(work.assignment)
        elif isinstance(work, Uploading | Sent):
            self.work = Holding(work.report, work.reported_again)

    def awaits_answer(self) -> bool:
        """Return whether the coordinator owes the device an answer."""
        return isinstance(self.link, CheckingIn) or isinstance(self.work, Fetching | Sent)

    def ignore(self, message: FromCoordinator, about: str) -> Commands:
        """Leave a message alone that came late or twice."""
        text = f"{tag(message)} about {about[:64]} is ignored: it is not what the device works on"
        return [Note(text)]


def tag(message: FromCoordinator) -> str:
    """Return the message's tag, as PROTOCOL.md has it."""
    return str(type(message).__struct_config__.tag)
