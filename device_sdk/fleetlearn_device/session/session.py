"""The device's side of the conversation, without I/O: events in, commands out.

A ``Session`` opens no socket and no file, starts no thread, reads no clock and draws no random
number. Its owner (the driver, or a test) tells it what happened, and carries out the commands with
which it answers, in order. Times are seconds on any clock that never goes back. Two states describe
the session: ``link``, the connection, and ``work``, the task. Work outlives the connection:
training goes on while the device is offline, and what is finished is reported later.

A well-behaved coordinator can send a message late or twice: it crossed with ours, or it tells what
we know. The session ignores such a message with a note. A message that breaks the protocol closes
the connection; the work stays, and the owner connects again after a back-off that grows with
``faults``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fleetlearn_protocol.encodings import FAMILIES, MASKED_NAMES
from fleetlearn_protocol.errors import Code, ProtocolError, clip
from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer, unpack_chunk
from fleetlearn_protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Content,
    Failed,
    FailureCode,
    Fetch,
    FromCoordinator,
    FromDevice,
    Grant,
    Heartbeat,
    Held,
    Question,
    Refused,
    Reply,
    Report,
    Signed,
    Task,
    TaskFinished,
    TaskWeighing,
    Trust,
    Uploaded,
    Waiting,
    Welcome,
    decode_from_coordinator,
)
from fleetlearn_protocol.task_names import run_of
from fleetlearn_protocol.versions import check_chosen

from fleetlearn_device.session.commands import (
    Close,
    Commands,
    DropPending,
    FinishContent,
    FinishEarly,
    Locate,
    MaskPending,
    Note,
    SavePending,
    SaveTrusted,
    Send,
    SendUpdate,
    StartAnswer,
    StartTraining,
    StopTraining,
    StopUpdate,
    StoreChunk,
    Wanted,
)
from fleetlearn_device.session.demands_of_tasks import (
    offered_exchanges,
    said_of_privacy,
    why_given_back,
)
from fleetlearn_device.session.history import History, Outcome
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.privacy_demands import (
    NO_DEMANDS,
    PrivacyDemands,
    told_of_failure,
)
from fleetlearn_device.session.secure_demands import (
    NO_SECURE_DEMANDS,
    GivenBack,
    SecureDemands,
    factor_refusal,
)
from fleetlearn_device.session.statement import NOTHING_STATED, Statement
from fleetlearn_device.session.states import (
    AnswerReady,
    Assignment,
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
    Storing,
    Training,
    UnfinishedTask,
    Unmasked,
    Uploading,
    Work,
)
from fleetlearn_device.session.trust import Trusted, message_in

PATIENCE = 60.0
"""Seconds to wait for an answer to a check-in, a fetch or a finished upload before the connection
is closed."""
BEAT = 0.8
"""Heartbeats are sent at this part of the interval that the coordinator allows."""
UPLOAD_MARGIN = 0.1, 60.0
"""Part of the deadline that is kept for the upload, and the most seconds it can be."""
VERSION_WAIT = 600.0
"""Seconds, about, until the device checks in again with a coordinator that speaks another version
of the protocol."""
QUIET, QUIET_AT_MOST = 600.0, 86400.0
"""Seconds without a task after which the log says so, and most seconds until it says so again."""
COME_BACK = {
    "no-task": "the coordinator has no task for this device now",
    "busy": "the coordinator is busy",
    "stopping": "the coordinator is stopping",
    "finished": "the training is finished, and may be continued later",
}
"""Why the coordinator sends a device away, for people."""
SHORT_PAUSE = Pause((), "a condition did not hold for a moment")
MAX_ARRIVALS = 2
"""How often one content may arrive for a task: a second time where its SHA-256 was wrong the first
time."""


class Session:
    """One device's conversation, over any number of connections.

    held: an update saved by an earlier process; unmasked: one that is to be masked yet. algorithms:
    those that the device can do beside ``plain``. exchanges: the kinds of questions that it can
    answer. trusted: the device's keys, where it does only what one of them signed. demands,
    secure_demands: its owner's. can_mask: whether it has what secure aggregation needs. took_part:
    run -> how many updates the device made in it. was_made: task -> whether the device made its
    update already.
    """

    def __init__(
        self,
        device: str,
        examples: int,
        *,
        runtime: str = "",
        software: str = "",
        algorithms: tuple[str, ...] = (),
        exchanges: tuple[str, ...] = (),
        held: Report | None = None,
        unmasked: Unmasked | None = None,
        trusted: Trusted | None = None,
        until_finished: bool = False,
        demands: PrivacyDemands = NO_DEMANDS,
        secure_demands: SecureDemands = NO_SECURE_DEMANDS,
        can_mask: bool = False,
        took_part: Callable[[str], int] = lambda run: 0,
        was_made: Callable[[str], bool] = lambda task: False,
    ) -> None:
        self.device, self.examples, self.runtime, self.software = (
            device,
            examples,
            runtime,
            software,
        )
        self.algorithms, self.exchanges, self.trusted = algorithms, exchanges, trusted
        self.until_finished = until_finished
        self.demands, self._took_part, self._was_made = demands, took_part, was_made
        self.secure_demands, self.can_mask = secure_demands, can_mask
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
        self._last_progress = 0.0
        """When the last frame arrived, or the device last began to wait for an answer."""
        self._ended_task_id: str | None = None
        """The task that ended on this connection, or whose failure is not sent yet. It is not begun
        again."""
        self._unsent_failure: Failed | None = None
        """It is sent with the next welcome."""
        self.ineligible = ""
        """Why the coordinator gives this device no task, as it said at the last check-in. Empty: it
        may get one."""
        self.waits = ""
        """Why there was no task for anybody at the last check-in, as the coordinator said. Empty
        from the next task on."""
        self._quiet = 0.0, 0.0
        """Since when the device has waited for a task, and when that is to be said next."""
        self._challenge = ""
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

    # The connection

    def connected(self, now: float, stated: Statement = NOTHING_STATED) -> Commands:
        """The connection is open. ``stated``: what the device is now."""
        self.link, self._last_progress = CheckingIn(), now
        if self.stopping:
            return self._close("stopping")
        if self.pause is not None:  # it began while the connection was being opened
            return self._close_paused(self.pause)
        held = None
        if isinstance(self.work, Holding):
            held = Held(self.work.report.task, self.work.report.round)
        elif isinstance(self.work, Unmasked):
            held = Held(self.work.task_id, self.work.round)
        known = self.device, self.examples, self.runtime, self.software
        check_in = CheckIn(
            OLDEST_PROTOCOL_VERSION,
            *known,
            held,
            **stated._asdict(),
            exchanges=offered_exchanges(self.exchanges, self.demands, self.secure_demands),
            algorithms=self.algorithms,
            encodings=(*FAMILIES, *MASKED_NAMES) if self.can_mask else FAMILIES,
            trusts=() if self.trusted is None else self.trusted.keys,
            newest_protocol=PROTOCOL_VERSION,
            privacy=said_of_privacy(self.demands, self.secure_demands, can_mask=self.can_mask),
        )
        self._challenge = stated.challenge or ""
        return [Send(check_in)]

    def disconnected(self) -> Commands:
        """The connection is gone, or could not be opened."""
        self._interrupt_transfer()
        self.link = Offline()
        self._ended_task_id = (
            self._unsent_failure.task if self._unsent_failure is not None else None
        )
        return []

    def received(self, text: str | bytes, now: float) -> Commands:
        """A text frame arrived."""
        if isinstance(self.link, Offline | Closing):
            return []
        self._last_progress = now
        try:
            return self._handle(decode_from_coordinator(text), now)
        except ProtocolError as error:
            return self._close_for_fault(f"the coordinator broke the protocol: {error}", code=1002)

    def received_chunk(self, frame: Buffer, now: float) -> Commands:
        """A binary frame arrived."""
        if isinstance(self.link, Offline | Closing):
            return []
        self._last_progress = now
        try:
            if isinstance(self.link, CheckingIn):
                raise ProtocolError(Code.OUT_OF_TURN, "a chunk came before the welcome")
            chunk = unpack_chunk(frame)
            work = self.work
            if (
                not isinstance(work, Fetching)
                or work.content is None
                or chunk.transfer != work.content.transfer
            ):
                return []  # the rest of an earlier fetch, whose task was cancelled
            wanted, size, end = work.wanted[0], work.content.size, chunk.offset + len(chunk.payload)
            if chunk.offset != work.end:
                text = f"a chunk of {wanted.name} begins at {chunk.offset}; expected {work.end}"
                raise ProtocolError(Code.WRONG_OFFSET, text)
            if end > size:
                text = f"a chunk of {wanted.name} ends behind its {size} bytes"
                raise ProtocolError(Code.WRONG_LENGTH, text)
        except ProtocolError as error:
            return self._close_for_fault(f"the coordinator broke the protocol: {error}", code=1002)
        self.work = replace(work, end=end)
        store = StoreChunk(wanted, chunk.offset, chunk.payload)
        return [store, *self._store(work, work.wanted)] if end == size else [store]

    # Answers to commands

    def located(self, task_id: str, lacking: Sequence[Wanted], now: float) -> Commands:
        """What the task lacks was looked up. Its training starts where nothing is lacking."""
        work = self.work
        if not isinstance(work, Locating) or work.task_id != task_id:
            return []
        if lacking:
            return self._fetch(work, tuple(lacking), now)
        if self.running_task_id is not None:
            return []  # the training that this task replaced has not ended yet; its end asks again
        task = work.assignment.task
        part, most = UPLOAD_MARGIN
        seconds = work.assignment.deadline - now - min(part * task.deadline, most)
        if isinstance(task, Task) and task.time_budget is not None:
            seconds = min(seconds, task.time_budget)
        if seconds <= 0:
            text = "the bundle and the model came too late to train before the deadline"
            return self._fail_task(work, "out-of-time", text)
        self.work, self.running_task_id, self.steps = Training(work.assignment), task_id, 0
        if isinstance(task, Question):
            return [StartAnswer(task, seconds)]
        return [StartTraining(task, seconds)]

    def unusable(self, task_id: str, text: str, code: FailureCode = "bad-bundle") -> Commands:
        """The task's bundle cannot be used here."""
        if not isinstance(self.work, Locating) or self.work.task_id != task_id:
            return []
        return self._fail_task(self.work, code, text)

    def stored(self, sha256: str, good: bool, now: float) -> Commands:
        """A complete content was filed (``good``), or deleted because its hash was another."""
        work = self.work
        if not isinstance(work, Storing) or work.wanted[0].sha256 != sha256:
            return []
        wanted, *others = work.wanted
        if not good and wanted.instead is not None:
            note = Note(f"{wanted.name} does not give the vector that it should", True)
            return [note, *self._fetch(work, (wanted.instead, *others), now)]
        if not good:
            note = Note(f"{wanted.name} arrived with another SHA-256 than {sha256}", True)
            return [note, *self._fetch(work, (replace(wanted, have=0), *others), now)]
        if others:
            return self._fetch(work, tuple(others), now)
        self.work = Locating(work.assignment)
        return self._locate()

    def trained(
        self, report: Report, examples: int | None = None, least_factor: float | None = None
    ) -> Commands:
        """Training ended well; ``report`` describes its update. ``examples``: how many the device's
        data gave. None: as many as the report says. ``least_factor``: of an update that is not
        masked yet."""
        # A task that was to be kept by a device that stops may have ended in that moment.
        kept = self.stopping and isinstance(self.work, Locating)
        if not (kept or isinstance(self.work, Training)) or self.work.task_id != report.task:
            return self.ended(report.task)
        # what the passes gave may be another number than what was stated
        self.examples = report.examples if examples is None else examples
        self.work = Saving(report, least_factor)
        return [SavePending(report)]

    def answered(self, message: Reply, examples: int | None = None) -> Commands:
        """The question is answered. ``examples``: how many the device's data gave, if they were
        counted."""
        if not isinstance(self.work, Training) or self.work.task_id != message.task:
            return self.ended(message.task)
        if examples is not None:
            self.examples = examples
        self.work, self.running_task_id = AnswerReady(message), None
        return self._send_if_online(message)

    def saved(self, task_id: str) -> Commands:
        """The update is durable. Only now may it be reported."""
        self.running_task_id = None
        work = self.work
        if not isinstance(work, Saving) or work.task_id != task_id:
            return [DropPending(task_id), *self._locate()]
        if work.least_factor is not None:
            self.work = Unmasked(task_id, work.report.round, work.least_factor)
            return self._ask_what_it_counts()
        self.work = Holding(work.report, reported_again=False)
        return self._send_if_online(work.report)

    def masked(self, report: Report) -> Commands:
        """The update that ``report`` describes is masked, and durable so. Only now may it be
        reported."""
        self.running_task_id = None
        if not isinstance(self.work, Masking) or self.work.task_id != report.task:
            return [DropPending(report.task), *self._locate()]
        self.work = Holding(report, reported_again=False)
        return self._send_if_online(report)

    def ended(self, task_id: str, code: FailureCode | None = None, text: str = "") -> Commands:
        """Training or saving ended without an update: it was stopped (``code`` None) or failed."""
        self.running_task_id = None
        if not isinstance(self.work, Training | Saving | Masking) or self.work.task_id != task_id:
            return self._locate()
        if code is None and isinstance(self.work, Training):  # paused before its first step
            return self._give_back(self.work, self.pause or SHORT_PAUSE)
        return self._fail_task(self.work, code or "stopping", text)

    def update_sent(self, transfer: int, now: float) -> Commands:
        """All chunks of the upload under this transfer number were sent."""
        work = self.work
        if not isinstance(work, Uploading) or transfer != work.transfer:
            return []
        self.work, self._last_progress = Sent(work.report, work.reported_again, work.transfer), now
        return [Send(Uploaded(work.task_id))]

    # Time and the owner

    def due(self) -> float | None:
        """When ``tick`` is wanted. None: not before something happens."""
        times = []
        if isinstance(self.link, Online):
            times.append(self.link.next_heartbeat)
            if isinstance(self.work, Idle):
                times.append(self._quiet[1])
        if self._awaits_answer():
            times.append(self._last_progress + PATIENCE)
        if isinstance(self.work, Locating | Fetching):
            times.append(self.work.assignment.deadline)
        return min(times, default=None)

    def tick(self, now: float, steps: int = 0) -> Commands:
        """Time passed; ``steps`` is how far training is: batches evaluated, and steps."""
        self.steps = 0 if isinstance(self.work, Idle | Locating | Fetching | Storing) else steps
        if isinstance(self.work, Locating | Fetching) and now >= self.work.assignment.deadline:
            return self._fail_task(
                self.work, "out-of-time", "the deadline passed before training began"
            )
        if self._awaits_answer() and now >= self._last_progress + PATIENCE:
            return self._close(f"no answer for {PATIENCE:g} s")
        if isinstance(self.link, Online) and now >= self.link.next_heartbeat:
            self.link = replace(self.link, next_heartbeat=now + self.link.heartbeat_interval)
            return [Send(Heartbeat(self.task_id, self.steps))]
        if isinstance(self.link, Online) and isinstance(self.work, Idle) and now >= self._quiet[1]:
            return self._say_quiet(now)
        return []

    def stop(self, keep: bool = False) -> Commands:
        """The owner wants to end. An unfinished task is given back; a finished update stays saved.

        ``keep``: a task in training is kept, and a later process goes on with it if the coordinator
        still wants it then.
        """
        self.stopping = True
        commands: Commands = []
        if keep and isinstance(self.work, Training) and isinstance(self.work.assignment.task, Task):
            text = f"task {self.work.task_id} is kept: the next start goes on with its training"
            commands = [Note(text), StopTraining(self.work.task_id, keep=True)]
            self.work = Locating(self.work.assignment)
        elif isinstance(self.work, UnfinishedTask):
            failed = Failed(self.work.task_id, "stopping", "the device is stopping")
            commands = [
                *self._send_if_online(failed),
                *self._drop_task("uncounted", "the device was stopped"),
            ]
        return [*commands, *self._close("stopping")]

    def begin_pause(self, pause: Pause) -> Commands:
        """The device must not work now. An unfinished task is given back; where the plan wants
        partial work (a time budget), a training reports what it has done. A finished update is
        sent, if the pause allows it, and else stays saved; then the connection is closed until
        ``end_pause``.

        Called again while the device is paused, with what is so then.
        """
        before, self.pause = self.pause, pause
        if before is not None and (before.names, before.sends) == (pause.names, pause.sends):
            return []
        note = Note(pause.in_words)
        work = self.work
        if isinstance(work, UnfinishedTask):
            return [note, *self._shorten(work, pause)]
        sends = pause.sends and isinstance(self.link, Online)
        if sends and isinstance(work, Saving | Unmasked | Finished | AnswerReady):
            return [note]  # the end of the task closes the connection
        return [note, *self._close_paused(pause)]

    def end_pause(self) -> Commands:
        """All conditions hold again. The owner may connect."""
        if self.pause is None:
            return []
        self.pause = None
        return [Note("no longer paused: all conditions hold")]

    def abandon(self, error: Exception, code: FailureCode) -> Commands:
        """The device cannot go on at all (its data do not fit, its disk is full): say so and end
        with ``error``."""
        self.error, self.stopping = error, True
        if isinstance(self.work, UnfinishedTask | Saving | Masking):
            return self._fail_task(self.work, code, str(error))
        return self._close(str(error))

    # Messages

    def _handle(self, message: FromCoordinator, now: float) -> Commands:
        if isinstance(self.link, CheckingIn) and not isinstance(
            message, Welcome | ComeBack | Refused
        ):
            raise ProtocolError(Code.OUT_OF_TURN, f"{_tag(message)} came before the welcome")
        match message:
            case Welcome():
                return self._welcome(message, now)
            case ComeBack(after=after, reason=reason):
                if reason == "finished" and self.until_finished:
                    self.finished = self.stopping = True
                    dropped = self._drop_unfinished_task("the training is finished")
                    return [*dropped, *self._close("the training is finished", after)]
                return self._close(
                    f"{COME_BACK[reason]}; the device comes back in about {after:g} s ({reason})",
                    after,
                )
            case Task() | Question():
                if self.trusted is not None:
                    return self._distrust(
                        message, "it is not signed, and this device does only what is"
                    )
                return self._assign(message, now)
            case Signed():
                return self._open(message, self.trusted, now)
            case Trust():
                raise ProtocolError(Code.OUT_OF_TURN, "keys to trust came without a signature")
            case Content():
                return self._receive(message)
            case TaskWeighing():
                return self._weigh(message)
            case Grant():
                return self._upload(message)
            case Waiting():
                return self._wait(message)
            case Accepted(task=task_id):
                # An unmasked one may be back on the disk after a power cut.
                if not isinstance(self.work, Unmasked):
                    self._check_reported(message, task_id)
                if task_id != self.task_id:
                    return self._ignore(message, task_id)
                self.faults = 0
                if isinstance(self.work, AnswerReady):
                    text = f"task {task_id}: answer accepted ({self.work.message.kind})"
                    note = Note(text, event="answer-accepted")
                    return [note, *self._drop_task("answered")]
                dropped = self._drop_task("accepted")
                text = f"task {task_id}: update accepted; the coordinator has it for the next model"
                text = f"{text} ({self.history.accepted} accepted so far)"
                return [Note(text, event="update-accepted"), *dropped]
            case Cancel(task=task_id, code=code, text=text):
                if task_id != self.task_id:
                    return self._ignore(message, task_id)
                why = text or code.value
                text = f"task {task_id} is cancelled, and its work does not count: {why}"
                note = Note(text, event="task-uncounted")
                return [note, *self._drop_task("uncounted", why)]
            case _:  # refused
                return self._refused(message, now)

    def _welcome(self, message: Welcome, now: float) -> Commands:
        if isinstance(self.link, Online):
            return [Note("a second welcome is ignored")]
        check_chosen(message.protocol)
        interval = max(BEAT * message.heartbeat, 0.01)
        self.link = Online(interval, now + interval, min(message.chunk_bytes, CHUNK_BYTES))
        self.ineligible, self._quiet = message.ineligible, (now, now + QUIET)
        self.waits = message.waits
        goes_on = (
            "waiting for a task" if self.task_id is None else f"going on with task {self.task_id}"
        )
        coordinator = message.coordinator or "the coordinator"
        text = f"checked in with {coordinator} as {self.device}; {goes_on}"
        commands: Commands = [Note(text, event="checked-in")]
        if message.ineligible:
            text = f"there will be no task for this device: {message.ineligible}"
            commands.append(Note(text, warning=True, event="not-eligible"))
        if message.warning:
            self.history = self.history.warned(message.warning)
            text = f"the coordinator warns: {message.warning}"
            commands.append(Note(text, warning=True, event="warned"))
        if self._unsent_failure is not None:
            commands.append(Send(self._unsent_failure))
            self._unsent_failure = None
        if isinstance(self.work, Holding):
            commands.append(Send(self.work.report))
        elif isinstance(self.work, Unmasked) and not isinstance(self.work, Masking):
            commands += self._ask_what_it_counts()
        elif isinstance(self.work, AnswerReady):
            commands.append(Send(self.work.message))
        elif self.task_id is not None:
            # so that the lease is known to be alive
            commands.append(Send(Heartbeat(self.task_id, self.steps)))
        return [*commands, *self._locate()]

    def _open(self, signed: Signed, trusted: Trusted | None, now: float) -> Commands:
        """Do what a signed message says, if the signature is good."""
        if trusted is None:
            raise ProtocolError(
                Code.OUT_OF_TURN,
                "a signed message came, and this device has no keys to check it with",
            )
        message = message_in(signed)
        why = trusted.why_not(signed, self._challenge, self.device)
        match message:
            case Task() | Question():
                return self._assign(message, now) if why is None else self._distrust(message, why)
            case Trust(keys=keys):
                if why is not None:
                    return self._close_for_fault(f"new keys to trust are refused: {why}")
                self.trusted = trusted._replace(keys=keys)
                return [
                    Note(f"the coordinator's keys are now {', '.join(keys)}"),
                    SaveTrusted(keys),
                ]

    def _distrust(self, task: Task | Question, why: str) -> Commands:
        """Give back a task that is not to be believed. What the device works on stays as it is."""
        text = clip(f"task {task.task} is not trained: {why}")
        # a forged message must not end the real task
        named = task.task in (self.task_id, self._ended_task_id)
        failed: Commands = [] if named else [Send(Failed(task.task, "untrusted", text))]
        return [Note(text, True), *failed, *self._close_for_fault("a task is not trusted")]

    def _assign(self, task: Task | Question, now: float) -> Commands:
        deadline = now + task.deadline
        if task.task in (self.task_id, self._ended_task_id):
            if isinstance(self.work, UnfinishedTask) and task.task == self.task_id:
                # A coordinator that was restarted gives the round its time again.
                self.work = replace(
                    self.work, assignment=replace(self.work.assignment, deadline=deadline)
                )
            return [Note(f"task {task.task} was given again; the device has it")]
        if self.pause is not None:
            return self._give_back_at_once(task, self.pause)
        commands: Commands = []
        if self.task_id is not None:
            # A coordinator that gives another task no longer waits for the first (it lost it in a
            # restart).
            why = f"the coordinator gave task {task.task} in its place"
            commands = [
                Note(f"task {self.task_id} is dropped: {why}", True),
                *self._drop_task("uncounted", why),
            ]
        self.work, self.history = Locating(Assignment(task, deadline)), self.history.begun(task)
        self.waits = ""  # what was so at the check-in is over
        what = f"round {task.round}, {task.epochs} epochs" if isinstance(task, Task) else task.kind
        text = f"task {task.task}: {what}, {task.deadline:.4g} s to the deadline"
        if isinstance(task, Task) and task.secure is not None:
            text = f"{text}; masked, for a sum of at least {task.secure.minimum} devices' updates"
        note = Note(text, event="task-given")
        refused = self._why_not(task)
        if refused is not None:
            return [*commands, note, *self._fail_task(self.work, *refused)]
        return [*commands, note, *self._locate()]

    def _why_not(self, task: Task | Question) -> GivenBack | None:
        """Return why the device does not do a task; None if it does."""
        return why_given_back(
            task,
            self.demands,
            self.secure_demands,
            self.took_part(task.task),
            known=(self.algorithms, self.exchanges, self.can_mask),
            made=self._was_made(task.task),
        )

    def _ask_what_it_counts(self) -> Commands:
        """Ask what the saved update counts, before it is masked."""
        assert isinstance(self.work, Unmasked)
        return self._send_if_online(TaskFinished(self.work.task_id))

    def _weigh(self, weighing: TaskWeighing) -> Commands:
        """Mask the update, as it is known now what it counts."""
        work = self.work
        if (
            not isinstance(work, Unmasked)
            or isinstance(work, Masking)
            or weighing.task != work.task_id
        ):
            return self._ignore(weighing, weighing.task)
        if refused := factor_refusal(work.least_factor, weighing.factor):
            return self._fail_task(work, *refused)
        self.work = Masking(work.task_id, work.round, work.least_factor)
        self.running_task_id = work.task_id
        text = f"task {work.task_id}: the update counts for {weighing.factor:.4g} of itself"
        return [
            Note(f"{text}; it is masked now", event="masking"),
            MaskPending(work.task_id, weighing.factor),
        ]

    def _receive(self, content: Content) -> Commands:
        """Expect the chunks of the content that was asked for."""
        work = self.work
        # The answer to an earlier fetch, whose task was cancelled, may still come; the later fetch
        # replaces it.
        if not isinstance(work, Fetching) or content.sha256 != work.wanted[0].sha256:
            return [Note(f"content {content.sha256} is not awaited; ignored")]
        wanted = work.wanted[0]
        if content.offset != wanted.have:
            return [
                Note(
                    f"{wanted.name} from byte {content.offset} is ignored; {wanted.have} was asked "
                    "for"
                )
            ]
        if content.size > wanted.limit or (wanted.size is not None and content.size != wanted.size):
            expected = f"at most {wanted.limit}" if wanted.size is None else wanted.size
            text = f"{wanted.name} has {content.size} bytes; expected {expected}"
            return self._fail_task(work, "bad-bundle", text)
        if content.offset > content.size:
            raise ProtocolError(
                Code.WRONG_OFFSET, f"{wanted.name} begins at {content.offset}, behind its end"
            )
        self.work = replace(work, content=content, end=content.offset)
        return self._store(work, work.wanted) if content.offset == content.size else []

    def _upload(self, grant: Grant) -> Commands:
        """Send the update from the grant's offset on."""
        self._check_reported(grant, grant.task)
        work = self.work
        if not isinstance(work, Finished) or grant.task != work.task_id:
            return self._ignore(grant, grant.task)
        if isinstance(work, Uploading | Sent) and grant.transfer == work.transfer:
            return [Note(f"task {grant.task}: a second grant {grant.transfer} is ignored")]
        size = work.report.size
        if grant.offset > size:
            text = (
                f"the grant for task {grant.task} begins at {grant.offset}; the update has {size} "
                "bytes"
            )
            raise ProtocolError(Code.WRONG_OFFSET, text)
        assert isinstance(self.link, Online)
        self.work = Uploading(work.report, work.reported_again, grant.transfer)
        rest = f", from byte {grant.offset} on" if grant.offset else ""
        text = f"task {grant.task}: uploading the update of {size} bytes{rest}"
        return [
            Note(text, event="uploading"),
            SendUpdate(work.task_id, grant.transfer, grant.offset, self.link.chunk_bytes),
        ]

    def _wait(self, waiting: Waiting) -> Commands:
        """A transfer lost its turn, or has none yet. For a fetch, the message alone starts the
        patience again."""
        if waiting.task is None:
            return [Note("what is fetched waits for its turn")]
        work = self.work
        if not isinstance(work, Uploading | Sent) or waiting.task != work.task_id:
            return self._ignore(waiting, waiting.task)
        # The report comes after the last chunk, so the next grant's offset counts all chunks.
        self.work = Holding(work.report, work.reported_again)
        return [
            Note(f"task {waiting.task}: the upload waits for its turn"),
            StopUpdate(),
            Send(work.report),
        ]

    def _refused(self, refused: Refused, now: float) -> Commands:
        said = f"{refused.text} [{refused.code.value}]"
        if refused.code is Code.REPLACED and refused.task is None and refused.sha256 is None:
            return self._end_replaced(said)
        if isinstance(self.link, CheckingIn):
            return self._check_in_refused(refused, said)
        if refused.sha256 is not None:
            return self._content_refused(refused, refused.sha256, said, now)
        if refused.task is not None:
            return self._task_refused(refused, refused.task, said)
        return self._close_for_fault(f"something was refused: {said}")

    def _check_in_refused(self, refused: Refused, said: str) -> Commands:
        if refused.code is Code.BAD_VERSION and not self.until_finished:
            # The coordinator may be given another version while nobody is near the device.
            text = f"the coordinator speaks another version of the protocol: {refused.text}"
            return [Note(text, True), *self._close("another version of the protocol", VERSION_WAIT)]
        if refused.code in (Code.BAD_VERSION, Code.BAD_MESSAGE, Code.UNKNOWN_TYPE, Code.TOO_LARGE):
            self.error = ProtocolError(
                refused.code, f"the coordinator refuses the check-in: {refused.text}"
            )
            self.stopping = True
        return self._close_for_fault(f"the check-in is refused: {said}")

    def _content_refused(self, refused: Refused, sha256: str, said: str, now: float) -> Commands:
        work = self.work
        if not isinstance(work, Fetching) or sha256 != work.wanted[0].sha256:
            return self._ignore(refused, sha256)
        wanted, *others = work.wanted
        if refused.code is Code.WRONG_OFFSET and wanted.have:
            note = Note(f"{wanted.name} is fetched from its beginning: {said}", True)
            return [note, *self._fetch(work, (replace(wanted, have=0), *others), now)]
        if wanted.instead is not None:
            note = Note(f"{wanted.name} cannot be had, so the whole content is fetched: {said}")
            return [note, *self._fetch(work, (wanted.instead, *others), now)]
        return self._fail_task(work, "bad-bundle", f"fetching {wanted.name} was refused: {said}")

    def _task_refused(self, refused: Refused, task_id: str, said: str) -> Commands:
        work = self.work
        if task_id != work.task_id or refused.code is Code.DUPLICATE:
            return self._ignore(refused, task_id)
        if refused.code is Code.BUSY:
            return self._close(f"task {task_id}: {said}")
        if isinstance(work, Finished):
            if refused.code is Code.WRONG_OFFSET:
                self.work = Holding(work.report, work.reported_again)
                return [Note(f"task {task_id} waits for another grant: {said}", True), StopUpdate()]
            if refused.code in (Code.WRONG_HASH, Code.WRONG_LENGTH) and not work.reported_again:
                self.work = Holding(work.report, reported_again=True)
                return [Note(f"task {task_id} is reported again: {said}", True), Send(work.report)]
        text = f"task {task_id} is forgotten, and its work does not count: {said}"
        note = Note(text, True, "task-uncounted")
        return [note, *self._drop_task("uncounted", said)]

    def _end_replaced(self, said: str) -> Commands:
        """End the device. This is the session's only connection, so another process speaks for the
        device, and has its task. The two would replace each other for ever."""
        text = (
            f"another process connected to the coordinator as device {self.device}, so this one "
            f"ends ({said}). Each device needs a state directory of its own, which holds its name: "
            "where one was copied, as with a card, delete identity.json and, if they are there, "
            "credential.json and device_key.json in the copy"
        )
        self.error, self.stopping = ProtocolError(Code.REPLACED, text), True
        why = "another process speaks for this device"
        return [*self._drop_unfinished_task(why), *self._close(why)]

    def _check_reported(self, message: Accepted | Grant, task_id: str) -> None:
        if task_id == self.task_id and not isinstance(self.work, Finished | AnswerReady):
            text = (
                f"{_tag(message)} came for task {task_id}, which was not reported (it is "
                f"{_name(self.work)})"
            )
            raise ProtocolError(Code.OUT_OF_TURN, text)

    def _ignore(self, message: FromCoordinator, about: str) -> Commands:
        return [
            Note(
                f"{_tag(message)} about {about[:64]} is ignored: it is not what the device works on"
            )
        ]

    # Pauses

    def _shorten(self, work: UnfinishedTask, pause: Pause) -> Commands:
        """End an unfinished task: with what was done, where that may be reported."""
        task = work.assignment.task
        wants_partial = (
            isinstance(task, Task) and task.time_budget is not None and task.secure is None
        )
        if isinstance(work, Training) and wants_partial and pause.sends and not pause.keeps:
            return [FinishEarly(work.task_id)]
        return self._give_back(work, pause)

    def _give_back(self, work: UnfinishedTask, pause: Pause) -> Commands:
        """Give the task back. Offline, or where the pause keeps it, it is dropped: if its lease
        lives when the device is back, the coordinator gives it again, and its training goes on
        where it was."""
        trains = isinstance(work, Training) and isinstance(work.assignment.task, Task)
        failed: Commands = []
        if not (trains and pause.keeps):
            failed = self._send_if_online(Failed(work.task_id, "paused", clip(pause.text)))
        keep = trains and not failed
        dropped = self._drop_task("uncounted", pause.in_words, keep=keep)
        if not failed:
            self._ended_task_id = None
        return [*failed, *dropped, *self._close_paused(pause)]

    def _give_back_at_once(self, task: Task | Question, pause: Pause) -> Commands:
        """Refuse a task that crossed with the pause. A coordinator that gives another task no
        longer waits for the one that the device has."""
        failed = Send(Failed(task.task, "paused", clip(pause.text)))
        dropped = [] if self.task_id is None else self._drop_task("uncounted", pause.in_words)
        note = Note(f"task {task.task} is given back: {pause.in_words}")
        return [note, failed, *dropped, *self._close_paused(pause)]

    def _close_paused(self, pause: Pause) -> Commands:
        return self._close(pause.in_words, after=0.0)

    # Shared steps

    def _say_quiet(self, now: float) -> Commands:
        """Say that there was no task for a while: after 10 minutes, 20, 40 and so on, and once a
        day from then on."""
        since, _ = self._quiet
        waited = now - since
        self._quiet = since, now + min(max(waited, QUIET), QUIET_AT_MOST)
        why = self.ineligible or "the coordinator has not chosen it for a round since then"
        if self.waits and not self.ineligible:
            why = f"{why}; at the check-in: {self.waits}"
        text = f"no task for {waited / 60:.0f} min; the device is connected and ready: {why}"
        return [Note(text, event="no-task")]

    def _locate(self) -> Commands:
        """Look up what is lacking, if that is the task's next step."""
        if self.stopping or not isinstance(self.work, Locating):
            return []
        return [Locate(self.work.assignment.task)]

    def _fetch(self, work: UnfinishedTask, wanted: tuple[Wanted, ...], now: float) -> Commands:
        """Ask for the first wanted content."""
        first = wanted[0]
        if work.assignment.arrived.count(first.place) >= MAX_ARRIVALS:
            text = f"{first.name} arrived twice with another SHA-256 than its name"
            return self._fail_task(work, "bad-bundle", text)
        if first.have == first.size:
            return self._store(work, wanted)
        if not isinstance(self.link, Online):
            self.work = Locating(work.assignment)  # the next welcome asks again
            return []
        self.work, self._last_progress = Fetching(work.assignment, wanted), now
        size = "" if first.size is None else f" of {first.size}"
        text = f"fetching {first.name} ({first.sha256[:12]}) from byte {first.have}{size}"
        return [
            Note(text, event="fetching"),
            Send(Fetch(first.sha256, first.have)),
        ]

    def _store(self, work: UnfinishedTask, wanted: tuple[Wanted, ...]) -> Commands:
        """Have the first wanted content checked, all of whose bytes are there."""
        arrived = (*work.assignment.arrived, wanted[0].place)
        self.work = Storing(replace(work.assignment, arrived=arrived), wanted)
        return [FinishContent(wanted[0])]

    def _drop_task(self, outcome: Outcome, why: str = "", *, keep: bool = False) -> Commands:
        """End the current task, whatever its state. ``why``: for a task that fails or does not
        count. ``keep``: save how far its training is."""
        work, self.work = self.work, Idle()
        self._ended_task_id = work.task_id
        self._quiet = self._last_progress, self._last_progress + QUIET
        assert work.task_id is not None
        self.history = self.history.ended(work.task_id, outcome, why)
        commands: Commands = []
        match work:
            case Training() if self.running_task_id is not None:  # it has not ended by itself
                commands.append(StopTraining(work.task_id, keep))
            case Masking() if self.running_task_id is not None:
                pass  # it is dropped by ``masked``, which finds it unwanted
            case Unmasked() | Finished():
                commands.append(DropPending(work.task_id))
        # An update that is being saved is dropped by ``saved``, which finds it unwanted.
        if self.pause is not None:
            commands += self._close_paused(self.pause)
        return commands

    def _drop_unfinished_task(self, why: str) -> Commands:
        return self._drop_task("uncounted", why) if isinstance(self.work, UnfinishedTask) else []

    def _fail_task(
        self, work: UnfinishedTask | Saving | Unmasked, code: FailureCode, text: str
    ) -> Commands:
        """Give the task back to the coordinator, now or with the next welcome."""
        task = work.assignment.task if isinstance(work, UnfinishedTask) else None
        failed = Failed(work.task_id, code, clip(told_of_failure(task, code, text)))
        sent = self._send_if_online(failed)
        self._unsent_failure = None if sent else failed
        why = clip(text) or code
        note = Note(f"task {work.task_id} failed: {why}", True, "task-failed")
        dropped = self._drop_task("failed", why)
        return [note, *sent, *dropped, *self._close_for_fault(f"task {work.task_id} failed")]

    def _send_if_online(self, message: FromDevice) -> Commands:
        return [Send(message)] if isinstance(self.link, Online) else []

    def _close_for_fault(self, reason: str, code: int = 1000) -> Commands:
        self.faults += 1
        return self._close(reason, code=code)

    def _close(self, reason: str, after: float | None = None, code: int = 1000) -> Commands:
        if isinstance(self.link, Offline | Closing):
            return []
        self._interrupt_transfer()
        self.link = Closing()
        return [Close(reason, after, code)]

    def _interrupt_transfer(self) -> None:
        """Go back to where the next connection begins: a fetch at its partial content, an upload at
        its report."""
        work = self.work
        if isinstance(work, Fetching):
            self.work = Locating(work.assignment)
        elif isinstance(work, Uploading | Sent):
            self.work = Holding(work.report, work.reported_again)

    def _awaits_answer(self) -> bool:
        return isinstance(self.link, CheckingIn) or isinstance(self.work, Fetching | Sent)


def _tag(message: FromCoordinator) -> str:
    return str(type(message).__struct_config__.tag)


def _name(state: Work) -> str:
    return type(state).__name__.lower()
