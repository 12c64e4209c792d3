"""The device's side of the conversation, without I/O: events in, commands out.

A ``Session`` opens no socket and no file, starts no thread, reads no clock and draws no random number. Its owner
(driver.py, or a test) tells it what happened and carries out the commands it answers with, in order; times are
seconds on any clock that never goes back. Two states describe it: ``link``, the connection, and ``work``, the task.
Work outlives the connection: training goes on while the device is offline, and what is finished is reported later.

A message that a well-behaved coordinator can send late or twice (it crossed with ours, or tells what we know) is
ignored with a note. One that breaks the protocol closes the connection; the work stays, and the owner connects
again after a back-off that grows with ``faults``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from fleetlearn_protocol.encodings import ENCODINGS
from fleetlearn_protocol.errors import Code, ProtocolError, clip
from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer, unpack_chunk
from fleetlearn_protocol.messages import (
    MODEL,
    PROTOCOL_VERSION,
    UPDATE,
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
    Refused,
    Report,
    Task,
    Uploaded,
    Waiting,
    Welcome,
    decode_from_coordinator,
)

from fleetlearn_device.session.commands import (
    Close,
    Commands,
    DropPending,
    FinishContent,
    Locate,
    Note,
    SavePending,
    Send,
    SendUpdate,
    StartTraining,
    StopTraining,
    StopUpdate,
    StoreChunk,
    Wanted,
)

PATIENCE = 60.0
"""Seconds to wait for an answer to a check-in, a fetch or a finished upload before the connection is given up."""
BEAT = 0.8
"""Heartbeats are sent at this part of the interval that the coordinator allows."""
UPLOAD_MARGIN = 0.1, 60.0
"""Part of the deadline that is kept for the upload, and the most seconds it can be."""


class Link(StrEnum):
    """The connection."""

    OFFLINE = "offline"
    CHECKING_IN = "checking-in"
    """Connected and checked in; the welcome has not come."""
    ONLINE = "online"
    CLOSING = "closing"
    """Close was commanded; whatever still arrives is ignored."""


class Work(StrEnum):
    """The task."""

    IDLE = "idle"
    LOCATING = "locating"
    """Waiting to know what of the bundle and the model is lacking, or to be online or free to go on with it."""
    FETCHING = "fetching"
    STORING = "storing"
    """A content is complete; its hash is being checked."""
    TRAINING = "training"
    SAVING = "saving"
    """Trained; the update is being made durable."""
    HOLDING = "holding"
    """The update is durable. It was reported, if the device is online; the upload is not granted."""
    UPLOADING = "uploading"
    UPLOADED = "uploaded"
    """All bytes were sent; the acknowledgement has not come."""


UNFINISHED = frozenset({Work.LOCATING, Work.FETCHING, Work.STORING, Work.TRAINING})
FINISHED = frozenset({Work.HOLDING, Work.UPLOADING, Work.UPLOADED})


class Session:
    """One device's conversation, over any number of connections. ``held`` is an update saved by an earlier process."""

    def __init__(
        self,
        device: str,
        examples: int,
        *,
        runtime: str = "",
        software: str = "",
        held: Report | None = None,
        until_finished: bool = False,
    ) -> None:
        self.device, self.examples, self.runtime, self.software = device, examples, runtime, software
        self.until_finished = until_finished
        self.link = Link.OFFLINE
        self.work = Work.IDLE if held is None else Work.HOLDING
        self.task: Task | None = None
        """The task being worked on, until its update is saved."""
        self.report: Report | None = held
        """What is reported, from the end of training to the acknowledgement."""
        self.running: str | None = None
        """The task whose training or saving has not ended, wanted or not: there is never a second."""
        self.faults = 0
        """Failed tasks and broken protocol since the last accepted update."""
        self.steps = 0
        self.stopping = False
        self.finished = False
        """The coordinator said that the training is finished, and ``until_finished`` is set."""
        self.error: Exception | None = None
        """Why the device cannot go on at all."""
        self._ended: str | None = None
        """The task that ended on this connection, or whose failure is yet to be told: it is not begun anew."""
        self._failure: Failed | None = None
        self._deadline = self._heard = self._beat = 0.0
        self._interval = 0.0
        self._chunk_bytes = CHUNK_BYTES
        self._wanted: list[Wanted] = []
        self._fetched: Counter[str] = Counter()
        self._content: Content | None = None
        self._place = 0
        self._transfer = 0
        self._reported_again = False

    @property
    def current(self) -> str | None:
        """The task that the device works on or whose update it holds."""
        if self.report is not None:
            return self.report.task
        return self.task.task if self.task is not None else None

    @property
    def over(self) -> bool:
        """It was to stop, and nothing is left to be done."""
        return self.stopping and self.link is Link.OFFLINE and self.running is None

    # The connection

    def connected(self, now: float) -> Commands:
        """The connection is open."""
        self.link, self._heard = Link.CHECKING_IN, now
        if self.stopping:
            return self._close("stopping")
        held = None
        if self.work is Work.HOLDING and self.report is not None:
            held = Held(self.report.task, self.report.round)
        return [
            Send(CheckIn(PROTOCOL_VERSION, self.device, self.examples, self.runtime, self.software, held)),
        ]

    def disconnected(self) -> Commands:
        """The connection is gone, or could not be opened."""
        self._park()
        self.link = Link.OFFLINE
        self._ended = self._failure.task if self._failure is not None else None
        return []

    def received(self, text: str | bytes, now: float) -> Commands:
        """A text frame arrived."""
        if self.link in (Link.OFFLINE, Link.CLOSING):
            return []
        self._heard = now
        try:
            return self._handle(decode_from_coordinator(text), now)
        except ProtocolError as error:
            return self._fault(f"the coordinator broke the protocol: {error}", code=1002)

    def received_chunk(self, frame: Buffer, now: float) -> Commands:
        """A binary frame arrived."""
        if self.link in (Link.OFFLINE, Link.CLOSING):
            return []
        self._heard = now
        try:
            if self.link is Link.CHECKING_IN:
                raise ProtocolError(Code.OUT_OF_TURN, "a chunk came before the welcome")
            chunk = unpack_chunk(frame)
            content = self._content
            if self.work is not Work.FETCHING or content is None or chunk.transfer != content.transfer:
                return []  # the rest of an earlier fetch, whose task was cancelled
            wanted = self._wanted[0]
            if chunk.offset != self._place:
                text = f"a chunk of {wanted.name} begins at {chunk.offset}; expected {self._place}"
                raise ProtocolError(Code.WRONG_OFFSET, text)
            if chunk.offset + len(chunk.payload) > content.size:
                text = f"a chunk of {wanted.name} ends behind its {content.size} bytes"
                raise ProtocolError(Code.WRONG_LENGTH, text)
        except ProtocolError as error:
            return self._fault(f"the coordinator broke the protocol: {error}", code=1002)
        self._place += len(chunk.payload)
        store = StoreChunk(wanted, chunk.offset, chunk.payload)
        return [store, *self._finish()] if self._place == content.size else [store]

    # Answers to commands

    def located(self, task: str, lacking: Sequence[Wanted], now: float) -> Commands:
        """What the task lacks was looked up; nothing lacking starts its training."""
        if self.task is None or self.task.task != task or self.work is not Work.LOCATING:
            return []
        if lacking:
            self._wanted = list(lacking)
            return self._fetch(now)
        if self.running is not None:
            return []  # the training that this task replaced has yet to notice; its end asks again
        part, most = UPLOAD_MARGIN
        seconds = self._deadline - now - min(part * self.task.deadline, most)
        if self.task.time_budget is not None:
            seconds = min(seconds, self.task.time_budget)
        if seconds <= 0:
            return self._give_up("out-of-time", "the bundle and the model came too late to train before the deadline")
        self.work, self.running, self.steps = Work.TRAINING, task, 0
        return [StartTraining(self.task, seconds)]

    def unusable(self, task: str, text: str, code: FailureCode = "bad-bundle") -> Commands:
        """The task's bundle cannot be used here."""
        if self.current != task or self.work is not Work.LOCATING:
            return []
        return self._give_up(code, text)

    def stored(self, sha256: str, good: bool, now: float) -> Commands:
        """A complete content was filed (``good``), or deleted because its hash was another."""
        if self.work is not Work.STORING or self.task is None or self._wanted[0].sha256 != sha256:
            return []
        wanted = self._wanted.pop(0)
        if not good:
            self._wanted.insert(0, replace(wanted, have=0))
            return [Note(f"{wanted.name} arrived with another SHA-256 than {sha256}", True), *self._fetch(now)]
        if self._wanted:
            return self._fetch(now)
        self.work = Work.LOCATING
        return self._go_on()

    def trained(self, report: Report) -> Commands:
        """Training ended well; ``report`` describes its update."""
        if self.work is not Work.TRAINING or self.current != report.task:
            return self.ended(report.task)
        self.work, self.report = Work.SAVING, report
        return [SavePending(report)]

    def saved(self, task: str) -> Commands:
        """The update is durable. Only now may it be reported."""
        self.running = None
        if self.work is not Work.SAVING or self.report is None or self.report.task != task:
            return [DropPending(task), *self._go_on()]
        self.work, self.task = Work.HOLDING, None
        return self._tell(self.report)

    def ended(self, task: str, code: FailureCode | None = None, text: str = "") -> Commands:
        """Training or saving ended without an update: it was stopped (``code`` None) or failed."""
        self.running = None
        if self.current != task or self.work not in (Work.TRAINING, Work.SAVING):
            return self._go_on()
        return self._give_up(code or "stopping", text)

    def update_sent(self, transfer: int, now: float) -> Commands:
        """All chunks of the upload under this transfer number were sent."""
        if self.work is not Work.UPLOADING or self.report is None or transfer != self._transfer:
            return []
        self.work, self._heard = Work.UPLOADED, now
        return [Send(Uploaded(self.report.task))]

    # Time and the owner

    def due(self) -> float | None:
        """When ``tick`` is wanted; None: not before something happens."""
        times = []
        if self.link is Link.ONLINE:
            times.append(self._beat)
        if self._waiting():
            times.append(self._heard + PATIENCE)
        if self.work in (Work.LOCATING, Work.FETCHING):
            times.append(self._deadline)
        return min(times, default=None)

    def tick(self, now: float, steps: int = 0) -> Commands:
        """Time passed; ``steps`` is how far training is: batches evaluated, and steps."""
        self.steps = 0 if self.work in (Work.IDLE, Work.LOCATING, Work.FETCHING, Work.STORING) else steps
        if self.work in (Work.LOCATING, Work.FETCHING) and now >= self._deadline:
            return self._give_up("out-of-time", "the deadline passed before training began")
        if self._waiting() and now >= self._heard + PATIENCE:
            return self._close(f"no answer for {PATIENCE:g} s")
        if self.link is Link.ONLINE and now >= self._beat:
            self._beat = now + self._interval
            return [Send(Heartbeat(self.current, self.steps))]
        return []

    def stop(self) -> Commands:
        """The owner wants to end. An unfinished task is given back; a finished update stays saved."""
        self.stopping = True
        commands: Commands = []
        if self.work in UNFINISHED and self.current is not None:
            commands = [*self._tell(Failed(self.current, "stopping", "the device is stopping")), *self._forget()]
        return [*commands, *self._close("stopping")]

    def abandon(self, error: Exception, code: FailureCode) -> Commands:
        """The device cannot go on at all (its data do not fit, its disk is full): say so and end with ``error``."""
        self.error, self.stopping = error, True
        if self.work in UNFINISHED or self.work is Work.SAVING:
            return self._give_up(code, str(error))
        return self._close(str(error))

    # Messages

    def _handle(self, message: FromCoordinator, now: float) -> Commands:
        if self.link is Link.CHECKING_IN and not isinstance(message, Welcome | ComeBack | Refused):
            raise ProtocolError(Code.OUT_OF_TURN, f"{_tag(message)} came before the welcome")
        match message:
            case Welcome():
                return self._welcome(message, now)
            case ComeBack(after=after, reason=reason):
                if reason == "finished" and self.until_finished:
                    self.finished = self.stopping = True
                    forget = self._forget() if self.work in UNFINISHED else []
                    return [*forget, *self._close("the training is finished", after)]
                return self._close(f"told to come back in {after:g} s ({reason})", after)
            case Task():
                return self._assign(message, now)
            case Content():
                return self._begin(message)
            case Grant():
                return self._upload(message)
            case Waiting():
                return self._wait(message)
            case Accepted(task=task):
                self._check_turn(message, task)
                if task != self.current:
                    return self._ignore(message, task)
                self.faults = 0
                return [Note(f"task {task}: update accepted"), *self._forget()]
            case Cancel(task=task, code=code, text=text):
                if task != self.current:
                    return self._ignore(message, task)
                return [Note(f"task {task} is cancelled: {text or code.value}"), *self._forget()]
            case _:  # refused
                return self._refusal(message, now)

    def _welcome(self, message: Welcome, now: float) -> Commands:
        if self.link is Link.ONLINE:
            return [Note("a second welcome is ignored")]
        self.link, self._chunk_bytes = Link.ONLINE, min(message.chunk_bytes, CHUNK_BYTES)
        self._interval = max(BEAT * message.heartbeat, 0.01)
        self._beat = now + self._interval
        commands: Commands = [Note(f"checked in with {message.coordinator or 'the coordinator'} as {self.device}")]
        if self._failure is not None:
            commands.append(Send(self._failure))
            self._failure = None
        if self.work is Work.HOLDING and self.report is not None:
            commands.append(Send(self.report))
        elif self.current is not None:
            commands.append(Send(Heartbeat(self.current, self.steps)))  # so that the lease is known to be alive
        return [*commands, *self._go_on()]

    def _assign(self, task: Task, now: float) -> Commands:
        if task.task in (self.current, self._ended):
            if self.task is not None and task.task == self.current:
                self._deadline = now + task.deadline  # a coordinator that was restarted gives the round its time again
            return [Note(f"task {task.task} was given again; the device has it")]
        commands: Commands = []
        if self.current is not None:
            # A coordinator that gives another task no longer waits for the first (it lost it in a restart).
            commands = [Note(f"task {self.current} is dropped for task {task.task}", True), *self._forget()]
        self.task, self.work, self._deadline = task, Work.LOCATING, now + task.deadline
        self._reported_again = False
        self._fetched.clear()
        text = f"task {task.task}: round {task.round}, {task.epochs} epochs, {task.deadline:g} s to the deadline"
        unknown = _unsupported(task)
        if unknown is not None:
            return [*commands, Note(text), *self._give_up("unsupported", unknown)]
        return [*commands, Note(text), *self._go_on()]

    def _begin(self, content: Content) -> Commands:
        # The answer to an earlier fetch, whose task was cancelled, may still come; the later fetch replaces it.
        if self.work is not Work.FETCHING or content.sha256 != self._wanted[0].sha256:
            return [Note(f"content {content.sha256} is not awaited; ignored")]
        wanted = self._wanted[0]
        if content.offset != wanted.have:
            return [Note(f"{wanted.name} from byte {content.offset} is ignored; {wanted.have} was asked for")]
        if content.size > wanted.limit or (wanted.size is not None and content.size != wanted.size):
            expected = f"at most {wanted.limit}" if wanted.size is None else wanted.size
            return self._give_up("bad-bundle", f"{wanted.name} has {content.size} bytes; expected {expected}")
        if content.offset > content.size:
            raise ProtocolError(Code.WRONG_OFFSET, f"{wanted.name} begins at {content.offset}, behind its end")
        self._content, self._place = content, content.offset
        return self._finish() if content.offset == content.size else []

    def _upload(self, grant: Grant) -> Commands:
        self._check_turn(grant, grant.task)
        report = self.report
        if report is None or grant.task != report.task:
            return self._ignore(grant, grant.task)
        if self.work is not Work.HOLDING and grant.transfer == self._transfer:
            return [Note(f"task {grant.task}: a second grant {grant.transfer} is ignored")]
        if grant.offset > report.size:
            text = f"the grant for task {grant.task} begins at {grant.offset}; the update has {report.size} bytes"
            raise ProtocolError(Code.WRONG_OFFSET, text)
        self.work, self._transfer = Work.UPLOADING, grant.transfer
        text = f"task {grant.task}: uploading {report.size - grant.offset} bytes from {grant.offset}"
        return [Note(text), SendUpdate(report.task, grant.transfer, grant.offset, self._chunk_bytes)]

    def _wait(self, waiting: Waiting) -> Commands:
        """A transfer lost its place, or has none yet. That it came is enough for a fetch: patience begins again."""
        if waiting.task is None:
            return [Note("what is fetched waits for its turn")]
        if waiting.task != self.current or self.report is None or self.work not in (Work.UPLOADING, Work.UPLOADED):
            return self._ignore(waiting, waiting.task)
        self.work = Work.HOLDING  # the report comes after the last chunk, so the next grant's offset counts them all
        return [Note(f"task {waiting.task}: the upload waits for its turn"), StopUpdate(), Send(self.report)]

    def _refusal(self, refused: Refused, now: float) -> Commands:
        said = f"{refused.text} [{refused.code.value}]"
        if refused.code is Code.REPLACED and refused.task is None and refused.sha256 is None:
            return self._replaced(said)
        if self.link is Link.CHECKING_IN:
            if refused.code in (Code.BAD_VERSION, Code.BAD_MESSAGE, Code.UNKNOWN_TYPE, Code.TOO_LARGE):
                self.error = ProtocolError(refused.code, f"the coordinator refuses the check-in: {refused.text}")
                self.stopping = True
            return self._fault(f"the check-in is refused: {said}")
        if refused.sha256 is not None:
            if self.work is not Work.FETCHING or refused.sha256 != self._wanted[0].sha256:
                return self._ignore(refused, refused.sha256)
            wanted = self._wanted[0]
            if refused.code is Code.WRONG_OFFSET and wanted.have:
                self._wanted[0] = replace(wanted, have=0)
                return [Note(f"{wanted.name} is fetched from its beginning: {said}", True), *self._fetch(now)]
            return self._give_up("bad-bundle", f"fetching {wanted.name} was refused: {said}")
        if refused.task is not None:
            if refused.task != self.current or refused.code is Code.DUPLICATE:
                return self._ignore(refused, refused.task)
            if refused.code is Code.BUSY:
                return self._close(f"task {refused.task}: {said}")
            if refused.code is Code.WRONG_OFFSET and self.work in FINISHED:
                self.work = Work.HOLDING
                return [Note(f"task {refused.task} waits for another grant: {said}", True), StopUpdate()]
            wrong_bytes = refused.code in (Code.WRONG_HASH, Code.WRONG_LENGTH)
            if self.report is not None and self.work in FINISHED and wrong_bytes and not self._reported_again:
                self._reported_again, self.work = True, Work.HOLDING
                return [Note(f"task {refused.task} is reported again: {said}", True), Send(self.report)]
            return [Note(f"task {refused.task} is forgotten: {said}", True), *self._forget()]
        return self._fault(f"something was refused: {said}")

    def _replaced(self, said: str) -> Commands:
        """This is the session's only connection, so another process speaks for the device, and has its task. The two
        would replace each other for ever."""
        text = (
            f"another process connected to the coordinator as device {self.device}, so this one ends ({said}). Each "
            "device needs a state directory of its own, which holds its name: where one was copied, as with a card, "
            "delete identity.json in the copy"
        )
        self.error, self.stopping = ProtocolError(Code.REPLACED, text), True
        forget = self._forget() if self.work in UNFINISHED else []
        return [*forget, *self._close("another process speaks for this device")]

    # Shared steps

    def _fetch(self, now: float) -> Commands:
        """Ask for the first wanted content, unless it arrived twice in vain."""
        wanted = self._wanted[0]
        if self._fetched[wanted.place] >= 2:
            return self._give_up("bad-bundle", f"{wanted.name} arrived twice with another SHA-256 than its name")
        if wanted.have == wanted.size:
            return self._finish()
        if self.link is not Link.ONLINE:
            self.work = Work.LOCATING  # the next welcome asks again
            return []
        self.work, self._heard, self._content = Work.FETCHING, now, None
        size = "" if wanted.size is None else f" of {wanted.size}"
        return [
            Note(f"fetching {wanted.name} ({wanted.sha256[:12]}) from byte {wanted.have}{size}"),
            Send(Fetch(wanted.sha256, wanted.have)),
        ]

    def _finish(self) -> Commands:
        self.work = Work.STORING
        self._fetched[self._wanted[0].place] += 1
        return [FinishContent(self._wanted[0])]

    def _forget(self) -> Commands:
        """End the current task, whatever its state."""
        task, work = self.current, self.work
        self._ended, self.task, self.report, self.work = task, None, None, Work.IDLE
        self._wanted = []
        if task is not None and work is Work.TRAINING and self.running == task:
            return [StopTraining(task)]
        if task is not None and work in FINISHED:
            return [DropPending(task)]
        return []  # an update being saved is dropped by ``saved``, which finds it unwanted

    def _give_up(self, code: FailureCode, text: str) -> Commands:
        task = self.current or ""
        failed = Failed(task, code, clip(text))
        told = self._tell(failed)
        self._failure = None if told else failed
        note = Note(f"task {task} failed: {failed.text} [{code}]", True)
        return [note, *told, *self._forget(), *self._fault(f"task {task} failed")]

    def _go_on(self) -> Commands:
        """Look up what is lacking, if a task waits for that."""
        return [Locate(self.task)] if self.work is Work.LOCATING and self.task is not None else []

    def _tell(self, message: FromDevice) -> Commands:
        return [Send(message)] if self.link is Link.ONLINE else []

    def _fault(self, reason: str, code: int = 1000) -> Commands:
        self.faults += 1
        return self._close(reason, code=code)

    def _close(self, reason: str, after: float | None = None, code: int = 1000) -> Commands:
        if self.link in (Link.OFFLINE, Link.CLOSING):
            return []
        self._park()
        self.link = Link.CLOSING
        return [Close(reason, after, code)]

    def _park(self) -> None:
        """Without a connection, a fetch begins again at its partial content, an upload at its report."""
        if self.work is Work.FETCHING:
            self.work = Work.LOCATING
        elif self.work in (Work.UPLOADING, Work.UPLOADED):
            self.work = Work.HOLDING

    def _waiting(self) -> bool:
        return self.link is Link.CHECKING_IN or self.work in (Work.FETCHING, Work.UPLOADED)

    def _check_turn(self, message: Accepted | Grant, task: str) -> None:
        if task == self.current and self.work not in FINISHED:
            text = f"{_tag(message)} came for task {task}, which was not reported (it is {self.work.value})"
            raise ProtocolError(Code.OUT_OF_TURN, text)

    def _ignore(self, message: FromCoordinator, about: str) -> Commands:
        return [Note(f"{_tag(message)} about {about[:64]} is ignored: it is not what the device works on")]


def _unsupported(task: Task) -> str | None:
    """What of the task this version cannot do, for people. It works with the model alone, and reports an update."""
    vectors = [(vector.name, vector.encoding) for vector in task.vectors]
    for what, given, name in (
        ("sends the vectors", vectors, MODEL),
        ("asks for the parts", [*task.parts.items()], UPDATE),
    ):
        if given not in [[(name, encoding)] for encoding in ENCODINGS]:
            listed = ", ".join(f"{each} ({encoding})" for each, encoding in given)
            return f"the task {what} {listed}; this device knows {name} ({', '.join(ENCODINGS)})"
    return None


def _tag(message: FromCoordinator) -> str:
    return str(type(message).__struct_config__.tag)
