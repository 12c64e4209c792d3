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

from collections.abc import Sequence
from dataclasses import replace

from fleetlearn_protocol.encodings import FAMILIES, MASKED_NAMES, OWN_FAMILY, UINT32
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    CheckIn,
    Failed,
    FailureCode,
    Heartbeat,
    Held,
    Question,
    Reply,
    Report,
    Task,
    Uploaded,
    decode_from_coordinator,
)

from fleetlearn_device.session.commands import (
    Commands,
    DropPending,
    Note,
    SavePending,
    Send,
    StartAnswer,
    StartTraining,
    StopTraining,
    Wanted,
)
from fleetlearn_device.session.contents import (
    HTTP_REST,
    end_http,
    fetch,
    receive_chunk,
    receive_http,
)
from fleetlearn_device.session.demands_of_tasks import offered_exchanges, said_of_privacy
from fleetlearn_device.session.incoming import handle, say_quiet
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.pausing import give_back, shorten
from fleetlearn_device.session.session_state import SessionState
from fleetlearn_device.session.statement import NOTHING_STATED, Statement
from fleetlearn_device.session.states import (
    AnswerReady,
    CheckingIn,
    Closing,
    Fetching,
    Finished,
    Holding,
    Idle,
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
)
from fleetlearn_device.session.updates import ask_what_it_counts

PATIENCE = 60.0
"""Seconds to wait for an answer to a check-in, a fetch or a finished upload before the connection
is closed."""
UPLOAD_MARGIN = 0.1, 60.0
"""Part of the deadline that is kept for the upload, and the most seconds it can be."""
SHORT_PAUSE = Pause((), "a condition did not hold for a moment")


class Session(SessionState):
    """One device's conversation, over any number of connections: what may happen to it."""

    # The connection

    def connected(self, now: float, stated: Statement = NOTHING_STATED) -> Commands:
        """The connection is open. ``stated``: what the device is now."""
        self.link, self.last_progress = CheckingIn(), now
        if self.stopping:
            return self.close("stopping")
        if self.pause is not None:  # it began while the connection was being opened
            return self.close_paused(self.pause)
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
            functions=self.functions,
            encodings=(
                *FAMILIES,
                *(MASKED_NAMES if self.can_mask else ()),
                *((UINT32.name,) if self.can_choose_rows else ()),
                *((OWN_FAMILY,) if self.functions else ()),
            ),
            trusts=() if self.trusted is None else self.trusted.keys,
            newest_protocol=PROTOCOL_VERSION,
            privacy=said_of_privacy(self.demands, self.secure_demands, can_mask=self.can_mask),
        )
        self.challenge = stated.challenge or ""
        return [Send(check_in)]

    def disconnected(self) -> Commands:
        """The connection is gone, or could not be opened."""
        self.interrupt_transfer()
        self.link = Offline()
        self.ended_task_id = self.unsent_failure.task if self.unsent_failure is not None else None
        return []

    def received(self, text: str | bytes, now: float) -> Commands:
        """A text frame arrived."""
        if isinstance(self.link, Offline | Closing):
            return []
        self.last_progress = now
        try:
            return handle(self, decode_from_coordinator(text), now)
        except ProtocolError as error:
            return self.close_for_fault(f"the coordinator broke the protocol: {error}", code=1002)

    def received_chunk(self, frame: Buffer, now: float) -> Commands:
        """A binary frame arrived."""
        if isinstance(self.link, Offline | Closing):
            return []
        self.last_progress = now
        try:
            if isinstance(self.link, CheckingIn):
                raise ProtocolError(Code.OUT_OF_TURN, "a chunk came before the welcome")
            return receive_chunk(self, frame)
        except ProtocolError as error:
            return self.close_for_fault(f"the coordinator broke the protocol: {error}", code=1002)

    def _fetched(self) -> int:
        """Return how many bytes the device has of what it fetches by HTTP; 0: it does not."""
        work = self.work
        by_http = isinstance(work, Fetching) and work.content is not None and work.content.url
        return work.end if isinstance(work, Fetching) and by_http else 0

    # Answers to commands

    def http_bytes(self, sha256: str, offset: int, payload: memoryview, now: float) -> Commands:
        """Bytes of a content came by HTTP."""
        return receive_http(self, sha256, offset, payload, now)

    def http_ended(self, sha256: str, why: str, now: float) -> Commands:
        """Fetching a content by HTTP ended before all of its bytes were there. ``why``: for
        people."""
        return end_http(self, sha256, why, now)

    def located(self, task_id: str, lacking: Sequence[Wanted], now: float) -> Commands:
        """What the task lacks was looked up. Its training starts where nothing is lacking."""
        work = self.work
        if not isinstance(work, Locating) or work.task_id != task_id:
            return []
        if lacking:
            return fetch(self, work, tuple(lacking), now)
        if self.running_task_id is not None:
            return []  # the training that this task replaced has not ended yet; its end asks again
        task = work.assignment.task
        part, most = UPLOAD_MARGIN
        seconds = work.assignment.deadline - now - min(part * task.deadline, most)
        if isinstance(task, Task) and task.time_budget is not None:
            seconds = min(seconds, task.time_budget)
        if seconds <= 0:
            text = "the bundle and the model came too late to train before the deadline"
            return self.fail_task(work, "out-of-time", text)
        self.work, self.running_task_id, self.steps = Training(work.assignment), task_id, 0
        if isinstance(task, Question):
            return [StartAnswer(task, seconds)]
        return [StartTraining(task, seconds)]

    def unusable(self, task_id: str, text: str, code: FailureCode = "bad-bundle") -> Commands:
        """The task's bundle cannot be used here."""
        if not isinstance(self.work, Locating) or self.work.task_id != task_id:
            return []
        return self.fail_task(self.work, code, text)

    def stored(self, sha256: str, good: bool, now: float) -> Commands:
        """A complete content was filed (``good``), or deleted because its hash was another."""
        work = self.work
        if not isinstance(work, Storing) or work.wanted[0].sha256 != sha256:
            return []
        wanted, *others = work.wanted
        if not good and wanted.instead is not None:
            note = Note(f"{wanted.name} does not give the vector that it should", True)
            return [note, *fetch(self, work, (wanted.instead, *others), now)]
        if not good:
            self.no_http_until = now + HTTP_REST  # a cache may have other bytes
            note = Note(f"{wanted.name} arrived with another SHA-256 than {sha256}", True)
            return [note, *fetch(self, work, (replace(wanted, have=0), *others), now)]
        if others:
            return fetch(self, work, tuple(others), now)
        self.work = Locating(work.assignment)
        return self.look_up()

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
        return self.send_if_online(message)

    def saved(self, task_id: str) -> Commands:
        """The update is durable. Only now may it be reported."""
        self.running_task_id = None
        work = self.work
        if not isinstance(work, Saving) or work.task_id != task_id:
            return [DropPending(task_id), *self.look_up()]
        if work.least_factor is not None:
            self.work = Unmasked(task_id, work.report.round, work.least_factor)
            return ask_what_it_counts(self)
        self.work = Holding(work.report, reported_again=False)
        return self.send_if_online(work.report)

    def masked(self, report: Report) -> Commands:
        """The update that ``report`` describes is masked, and durable so. Only now may it be
        reported."""
        self.running_task_id = None
        if not isinstance(self.work, Masking) or self.work.task_id != report.task:
            return [DropPending(report.task), *self.look_up()]
        self.work = Holding(report, reported_again=False)
        return self.send_if_online(report)

    def ended(self, task_id: str, code: FailureCode | None = None, text: str = "") -> Commands:
        """Training or saving ended without an update: it was stopped (``code`` None) or failed."""
        self.running_task_id = None
        if not isinstance(self.work, Training | Saving | Masking) or self.work.task_id != task_id:
            return self.look_up()
        if code is None and isinstance(self.work, Training):  # paused before its first step
            return give_back(self, self.work, self.pause or SHORT_PAUSE)
        return self.fail_task(self.work, code or "stopping", text)

    def update_sent(self, transfer: int, now: float) -> Commands:
        """All chunks of the upload under this transfer number were sent."""
        work = self.work
        if not isinstance(work, Uploading) or transfer != work.transfer:
            return []
        self.work, self.last_progress = Sent(work.report, work.reported_again, work.transfer), now
        return [Send(Uploaded(work.task_id))]

    # Time and the owner

    def due(self) -> float | None:
        """When ``tick`` is wanted. None: not before something happens."""
        times = []
        if isinstance(self.link, Online):
            times.append(self.link.next_heartbeat)
            if isinstance(self.work, Idle):
                times.append(self.quiet[1])
        if self.awaits_answer():
            times.append(self.last_progress + PATIENCE)
        if isinstance(self.work, Locating | Fetching):
            times.append(self.work.assignment.deadline)
        return min(times, default=None)

    def tick(self, now: float, steps: int = 0) -> Commands:
        """Time passed; ``steps`` is how far training is: batches evaluated, and steps."""
        self.steps = 0 if isinstance(self.work, Idle | Locating | Fetching | Storing) else steps
        if isinstance(self.work, Locating | Fetching) and now >= self.work.assignment.deadline:
            return self.fail_task(
                self.work, "out-of-time", "the deadline passed before training began"
            )
        if self.awaits_answer() and now >= self.last_progress + PATIENCE:
            return self.close(f"no answer for {PATIENCE:g} s")
        if isinstance(self.link, Online) and now >= self.link.next_heartbeat:
            self.link = replace(self.link, next_heartbeat=now + self.link.heartbeat_interval)
            return [Send(Heartbeat(self.task_id, self.steps, self._fetched()))]
        if isinstance(self.link, Online) and isinstance(self.work, Idle) and now >= self.quiet[1]:
            return say_quiet(self, now)
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
                *self.send_if_online(failed),
                *self.drop_task("uncounted", "the device was stopped"),
            ]
        return [*commands, *self.close("stopping")]

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
            return [note, *shorten(self, work, pause)]
        sends = pause.sends and isinstance(self.link, Online)
        if sends and isinstance(work, Saving | Unmasked | Finished | AnswerReady):
            return [note]  # the end of the task closes the connection
        return [note, *self.close_paused(pause)]

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
            return self.fail_task(self.work, code, str(error))
        return self.close(str(error))
