"""The session against a model of a coordinator that keeps to PROTOCOL.md, while connections,
processes, contents and both sides' patience fail in any order, and the conditions of the device's
owner come and go. Some tasks' updates are masked when the coordinator has said what they count: it
says another number each time, and one masked version of each leaves the device. Nothing here takes
time: every answer that a device's disk, thread or socket would give is a job that may be done at
any later step.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from fleetlearn_device.session import incoming
from fleetlearn_device.session.commands import (
    Close,
    Command,
    Commands,
    DropPending,
    FinishContent,
    FinishEarly,
    Locate,
    MaskPending,
    Note,
    SavePending,
    Send,
    SendUpdate,
    StartTraining,
    StopTraining,
    StoreChunk,
    Wanted,
)
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import (
    Closing,
    Fetching,
    Finished,
    Idle,
    Locating,
    Masking,
    Offline,
    Online,
    Saving,
    Storing,
    Training,
    Unmasked,
)
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.frames import pack_chunk, unpack_chunk
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Content,
    Failed,
    Fetch,
    FromCoordinator,
    FromDevice,
    Grant,
    Heartbeat,
    Part,
    Refused,
    Report,
    SecureTask,
    Task,
    TaskFinished,
    TaskWeighing,
    Uploaded,
    VectorReference,
    Welcome,
    decode_from_device,
    encode,
)
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

SIZE, CHUNK = 40, 16
CONTENTS = {hashlib.sha256(bytes([i]) * SIZE).hexdigest(): bytes([i]) * SIZE for i in range(2)}
MODELS = sorted(CONTENTS)
SECURE = SecureTask("helper", 2, 20, least_factor=0.1, helper="0a" * 32)
LUCK = st.integers(0, 4)
"""What begins everything again happens when this is 0, so that most runs come far."""


class Coordinator:
    """One device's coordinator: what it knows survives; what belongs to a connection does not."""

    def __init__(self) -> None:
        self.wire: deque[str | bytes] = deque()
        self.checked_in = False
        self.lease: Task | None = None
        self.accepted: set[str] = set()
        self.received: dict[str, int] = {}
        self.waiting: Report | None = None
        self.granted: tuple[str, int] | None = None
        self.past: set[int] = set()
        self.count = 0

    def tell(self, message: FromCoordinator) -> None:
        self.wire.append(encode(message))

    def disconnected(self) -> None:
        self.wire.clear()
        self.checked_in, self.waiting, self.granted = False, None, None
        self.past.clear()

    def assign(self, model: str, time_budget: float | None = None, late: bool = False) -> None:
        self.count += 1
        vector = VectorReference("model", model, SIZE, "float32")
        self.lease = Task(
            f"t{self.count}",
            1,
            "b" * 64,
            (vector,),
            {"update": "masked" if late else "float32"},
            {},
            1,
            8,
            0,
            1000.0,
            time_budget,
            clip=1.0 if late else None,
            secure=SECURE if late else None,
        )
        self.tell(self.lease)

    def end_lease(self) -> None:
        self.lease, self.waiting = None, None
        if self.granted is not None:
            self.past.add(self.granted[1])
            self.granted = None

    def grant(self) -> None:
        assert self.waiting is not None
        self.count += 1
        self.granted = self.waiting.task, self.count
        self.tell(
            Grant(self.waiting.task, self.count, self.received.setdefault(self.waiting.task, 0))
        )
        self.waiting = None

    def take(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes):
            chunk = unpack_chunk(frame)
            if self.granted is None or chunk.transfer != self.granted[1]:
                assert chunk.transfer in self.past, (
                    "a chunk that was never granted on this connection"
                )
                return
            assert chunk.offset == self.received[self.granted[0]], "a chunk out of order"
            self.received[self.granted[0]] += len(chunk.payload)
            return
        message = decode_from_device(frame)
        assert self.checked_in != isinstance(message, CheckIn)
        match message:
            case CheckIn(held=held):
                self.checked_in = True
                self.tell(Welcome("model", 10.0, CHUNK))
                if self.lease is not None and (held is None or held.task != self.lease.task):
                    self.tell(self.lease)
            case Fetch(sha256=sha256, offset=offset):
                # A later fetch replaces one that is being sent.
                self.wire = deque(frame for frame in self.wire if isinstance(frame, str))
                self.tell(Content(MODELS.index(sha256) + 1, sha256, SIZE, offset))
                for start in range(offset, SIZE, CHUNK):
                    part = CONTENTS[sha256][start : start + CHUNK]
                    self.wire.append(pack_chunk(MODELS.index(sha256) + 1, start, part))
            case TaskFinished(task=task):
                if task in self.accepted:
                    self.tell(Accepted(task))
                elif self.lease is None or task != self.lease.task:
                    self.tell(Refused(Code.STALE_ROUND, "over", task))
                else:
                    self.count += 1
                    self.tell(TaskWeighing(task, 0.1 + 0.9 / self.count))
            case Report(task=task):
                if task in self.accepted:
                    self.tell(Accepted(task))
                elif self.lease is None or task != self.lease.task:
                    self.tell(Refused(Code.STALE_ROUND, "over", task))
                else:
                    self.waiting = message
            case Uploaded(task=task):
                if self.granted is None or self.granted[0] != task:
                    assert self.past
                    return
                assert self.received[task] == SIZE, "uploaded, but not all of it"
                self.accepted.add(task)
                self.end_lease()
                self.tell(Accepted(task))
            case Failed(task=task):
                if self.lease is not None and task == self.lease.task:
                    self.end_lease()


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator()
        self.now = 0.0
        self.connected = False
        self.up: deque[str | bytes] = deque()
        # The device's disk: it survives the process.
        self.complete: set[str] = set()
        self.partial: dict[str, int] = {}
        self.pending: Report | None = None
        self.unmasked: Unmasked | None = None
        self.masks = 0
        self.late: set[str] = set()
        self.reported: dict[str, Report] = {}
        # What must hold.
        self.saved: set[str] = set()
        self.settled: set[str] = set()
        self.acknowledged: set[str] = set()
        self.boot()

    def boot(self) -> None:
        self.session = Session("dev", 7, held=self.pending, unmasked=self.unmasked, can_mask=True)
        self.masking: str | None = None
        self.jobs: list[Callable[[], None]] = []
        self.training: Task | None = None
        self.early = False
        """The training is to end after its next step."""
        self.upload: SendUpdate | None = None
        self.corrupt = False

    # The device's owner

    def perform(self, commands: Commands) -> None:
        for command in commands:
            self.do(command)

    def do(self, command: Command) -> None:
        match command:
            case Note():
                pass
            case Send(message=message):
                assert self.connected
                self.check_said(message)
                self.up.append(encode(message))
            case Locate(task=task):
                self.jobs.append(lambda: self.locate(task))
            case StoreChunk(wanted=wanted, offset=offset, payload=payload):
                assert offset == 0 or self.partial[wanted.sha256] >= offset
                assert payload == CONTENTS[wanted.sha256][offset : offset + len(payload)]
                self.partial[wanted.sha256] = offset + len(payload)
            case FinishContent(wanted=wanted):
                self.jobs.append(lambda: self.finish(wanted))
            case StartTraining(task=task, seconds=seconds):
                assert self.training is None, "two trainings at once"
                assert task.vector("model").sha256 in self.complete
                assert 0 < seconds <= task.deadline
                assert self.session.pause is None, "a task is begun while a condition fails"
                self.training, self.early = task, False
                if task.secure is not None:
                    self.late.add(task.task)
            case FinishEarly(task_id=name):
                assert self.training is not None
                assert (self.training.task, self.training.time_budget) == (name, 50.0)
                self.early = True
            case StopTraining(task_id=name):
                assert self.training is not None
                assert self.training.task == name
            case SavePending(report=report):
                self.jobs.append(lambda: self.save(report))
            case MaskPending(task_id=name):
                assert self.masking is None
                self.masking = name
                self.jobs.append(lambda: self.mask(name))
            case DropPending(task_id=name):
                self.upload = None
                assert self.masking is None, "a thread writes there"
                if self.unmasked is not None and self.unmasked.task_id == name:
                    self.unmasked = None
                if self.pending is not None and self.pending.task == name:
                    self.pending = None
            case SendUpdate():
                assert self.pending is not None
                assert self.pending.task == command.task_id
                assert command.task_id not in self.acknowledged
                self.upload = command
            case Close(code=code, reason=reason):
                assert code == 1000, reason
                assert self.session.pause is None or self.connected
                self.upload = None
                self.jobs.append(self.hang_up)

    def check_said(self, message: FromDevice) -> None:
        if isinstance(message, Report):
            assert self.pending == message, "reported before it was saved"
            assert self.reported.setdefault(message.task, message) == message, "another version"
        if isinstance(message, Report | Uploaded):
            assert message.task not in self.acknowledged, "said again after its acknowledgement"

    def locate(self, task: Task) -> None:
        model = task.vector("model").sha256
        wanted = Wanted(
            model, "the model", f"models/{model}", SIZE, SIZE, self.partial.get(model, 0)
        )
        self.perform(
            self.session.located(task.task, [] if model in self.complete else [wanted], self.now)
        )

    def finish(self, wanted: Wanted) -> None:
        good = self.partial.pop(wanted.sha256, 0) == SIZE and not self.corrupt
        self.corrupt = False
        if good:
            self.complete.add(wanted.sha256)
        self.perform(self.session.stored(wanted.sha256, good, self.now))

    def save(self, report: Report) -> None:
        self.training = None
        if report.task in self.late:
            self.unmasked, self.pending = Unmasked(report.task, report.round, 0.1), None
        else:
            self.pending, self.unmasked = report, None
        self.saved.add(report.task)
        self.perform(self.session.saved(report.task))

    def mask(self, name: str) -> None:
        """Put the masked update in the place of the unmasked one. Each mask is another one."""
        assert self.unmasked is not None
        assert self.unmasked.task_id == name
        self.masks += 1
        part = Part("update", "masked", SIZE, self.masks)
        self.masking, self.unmasked = None, None
        self.pending = Report(name, 1, (part,), 1, 1, 1.0, True, 0.0)
        self.perform(self.session.masked(self.pending))

    def hang_up(self) -> None:
        if self.connected and isinstance(self.session.link, Closing):
            while self.up:  # what was sent before goes out first
                self.coordinator.take(self.up.popleft())
            self.cut()

    # Anything, in any order

    @rule(which=st.sampled_from(["battery", "battery", "unmetered", "battery and unmetered"]))
    def a_condition_fails(self, which: str) -> None:
        pause = Pause(tuple(which.split(" and ")), which, sends="unmetered" not in which)
        self.perform(self.session.begin_pause(pause))
        if not isinstance(self.session.link, Offline | Closing):
            assert pause.sends, "connected while the network is metered"
            assert self.session.task_id is not None, "connected without a reason"

    @precondition(lambda self: self.session.pause is not None)
    @rule()
    def all_conditions_hold(self) -> None:
        self.perform(self.session.end_pause())

    @precondition(lambda self: not self.connected and self.session.pause is None)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.perform(self.session.connected(self.now))

    @precondition(lambda self: self.connected)
    @rule(luck=LUCK)
    def cable_breaks(self, luck: int) -> None:
        if not luck:
            self.cut()

    def cut(self) -> None:
        self.connected = False
        self.up.clear()
        self.upload = None
        self.coordinator.disconnected()
        self.perform(self.session.disconnected())

    @rule(luck=LUCK)
    def kill(self, luck: int) -> None:
        if luck:
            return
        if self.connected:
            self.connected = False
            self.up.clear()
            self.coordinator.disconnected()
        self.boot()

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 100))
    def job(self, which: int) -> None:
        self.jobs.pop(which % len(self.jobs))()

    @precondition(lambda self: self.up)
    @rule()
    def deliver_up(self) -> None:
        self.coordinator.take(self.up.popleft())

    @precondition(lambda self: self.coordinator.wire)
    @rule()
    def deliver_down(self) -> None:
        frame = self.coordinator.wire.popleft()
        if isinstance(frame, bytes):
            self.perform(self.session.received_chunk(frame, self.now))
            return
        if isinstance(self.session.link, Online):
            self.note(frame)
        self.perform(self.session.received(frame, self.now))

    def note(self, frame: str) -> None:
        """Which updates this message allows the device to forget."""
        from fleetlearn_protocol.messages import decode_from_coordinator

        message = decode_from_coordinator(frame)
        if isinstance(message, Task) and self.session.task_id not in (None, message.task):
            self.settled.add(str(self.session.task_id))
        if isinstance(message, Accepted):
            self.acknowledged.add(message.task)
        if isinstance(message, Accepted | Cancel | Refused) and message.task is not None:
            self.settled.add(message.task)

    @precondition(lambda self: self.coordinator.wire and isinstance(self.coordinator.wire[-1], str))
    @rule()
    def say_twice(self) -> None:
        if '"type":"content"' not in self.coordinator.wire[-1]:
            self.coordinator.wire.append(self.coordinator.wire[-1])

    @precondition(
        lambda self: self.training is not None and not isinstance(self.session.work, Saving)
    )
    @rule(how=st.sampled_from(["well", "well", "stopped", "diverged"]))
    def training_ends(self, how: str) -> None:
        assert self.training is not None
        task = self.training
        wanted = self.session.task_id == task.task and isinstance(self.session.work, Training)
        if how == "stopped" and wanted and not self.early:
            return  # it stops only when told to
        if how == "well":
            part = Part("update", "float32", SIZE, zlib.crc32(task.task.encode()))
            if not wanted:
                self.training = None
            report = Report(task.task, task.round, (part,), 7, 3, 1.0, True, 0.5)
            least = None if task.secure is None else task.secure.least_factor
            self.perform(self.session.trained(report, None, least))
            return
        self.training = None
        self.perform(
            self.session.ended(task.task, "diverged" if how == "diverged" else None, "nan")
        )

    @precondition(lambda self: self.upload is not None)
    @rule()
    def upload_a_chunk(self) -> None:
        assert self.upload is not None
        upload = self.upload
        if upload.offset >= SIZE:
            self.upload = None
            self.perform(self.session.update_sent(upload.transfer, self.now))
            return
        payload = bytes(SIZE)[upload.offset : upload.offset + upload.chunk_bytes]
        self.up.append(pack_chunk(upload.transfer, upload.offset, payload))
        self.upload = replace(upload, offset=upload.offset + len(payload))

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 70.0, 500.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = self.session.due()
        if due is not None and due <= self.now:
            self.perform(self.session.tick(self.now, 1))

    @rule()
    def corrupt_a_content(self) -> None:
        self.corrupt = True

    @precondition(lambda self: self.coordinator.checked_in and self.coordinator.lease is None)
    @rule(
        model=st.sampled_from(MODELS), time_budget=st.sampled_from([None, 50.0]), late=st.booleans()
    )
    def assign(self, model: str, time_budget: float | None, late: bool) -> None:
        self.coordinator.assign(model, time_budget, late)

    @precondition(lambda self: self.coordinator.checked_in and self.coordinator.lease is not None)
    @rule()
    def cancel(self) -> None:
        assert self.coordinator.lease is not None
        self.coordinator.tell(Cancel(self.coordinator.lease.task, Code.ROUND_OVER))
        self.coordinator.end_lease()

    @precondition(lambda self: self.coordinator.waiting is not None)
    @rule()
    def grant(self) -> None:
        self.coordinator.grant()

    @precondition(lambda self: self.coordinator.checked_in)
    @rule(luck=LUCK)
    def come_back(self, luck: int) -> None:
        if not luck:
            self.coordinator.tell(ComeBack(1.0, "no-task"))

    @rule(forgets=st.booleans(), luck=LUCK)
    def coordinator_restarts(self, forgets: bool, luck: int) -> None:
        if luck:
            return
        if self.connected:
            self.cut()
        self.coordinator.received.clear()
        if forgets:
            self.coordinator.lease = None

    @rule(
        steps=st.integers(1, 20),
        model=st.sampled_from(MODELS),
        slow=st.booleans(),
        twice=st.booleans(),
        time_budget=st.sampled_from([None, 50.0]),
        late=st.booleans(),
    )
    def all_is_well_for_a_while(
        self, steps: int, model: str, slow: bool, twice: bool, time_budget: float | None, late: bool
    ) -> None:
        """Let all go well for a while, so that faults happen everywhere and not only at the
        beginning of a round."""
        for _ in range(steps):
            if twice and self.coordinator.wire and isinstance(self.coordinator.wire[-1], str):
                self.say_twice()
            if not self.next_step(slow) and self.coordinator.lease is None:
                self.coordinator.assign(model, time_budget, late)

    def next_step(self, slow: bool = False) -> bool:
        """What happens next if nothing goes wrong, training last where it is ``slow``. False:
        nothing does."""
        trains = self.training is not None and not isinstance(self.session.work, Saving)
        if trains and not slow:
            self.train_to_the_end()
        elif self.jobs:
            self.job(0)
        elif self.upload is not None:
            self.upload_a_chunk()
        elif self.up:
            self.deliver_up()
        elif self.coordinator.wire:
            self.deliver_down()
        elif self.coordinator.waiting is not None:
            self.grant()
        elif self.session.pause is not None:
            self.all_conditions_hold()
        elif not self.connected:
            self.connect()
        elif trains:
            self.train_to_the_end()
        else:
            return False
        return True

    def train_to_the_end(self) -> None:
        assert self.training is not None
        self.training_ends("well" if self.session.task_id == self.training.task else "stopped")

    # What always holds

    @invariant()
    def no_update_is_lost(self) -> None:
        for name in self.saved - self.settled:
            held = self.pending.task if self.pending is not None else None
            waits = self.unmasked.task_id if self.unmasked is not None else None
            assert name in (held, waits), f"the update of {name} is gone"

    @invariant()
    def an_update_is_masked_or_not(self) -> None:
        assert self.pending is None or self.unmasked is None

    @invariant()
    def no_update_stays_that_nobody_will_send(self) -> None:
        if self.session.running_task_id is None and self.session.task_id is None:
            assert self.pending is None
            assert self.unmasked is None

    @invariant()
    def a_paused_device_works_on_nothing_new(self) -> None:
        """It sends what is finished, or makes a result of a training that was under way."""
        if self.session.pause is not None:
            work = self.session.work
            assert not isinstance(work, Locating | Fetching | Storing)
            assert self.early or not isinstance(work, Training)
            if isinstance(work, Idle):
                assert isinstance(self.session.link, Offline | Closing)

    @invariant()
    def training_is_known(self) -> None:
        running = self.training.task if self.training else self.masking
        assert running == self.session.running_task_id

    def teardown(self) -> None:
        """From every state a coordinator that does its part brings the device to rest."""
        self.corrupt = False
        for _ in range(400):
            if not self.next_step():
                break
        assert self.connected
        assert isinstance(self.session.link, Online)
        assert (self.session.work, self.session.running_task_id, self.pending) == (
            Idle(),
            None,
            None,
        )
        assert self.coordinator.lease is None
        assert self.session.tick(self.now + 10.0) == [Send(Heartbeat(None, 0))]


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def _masks_again(session: Session, weighing: TaskWeighing) -> Commands:
    """Each number that the coordinator says masks the update once more."""
    if not isinstance(session.work, Unmasked | Finished) or weighing.task != session.task_id:
        return []
    session.work = Masking(weighing.task, 1, 0.1)
    session.running_task_id = weighing.task
    return [MaskPending(weighing.task, weighing.factor)]


def test_a_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "weigh", _masks_again)
    generated = settings(
        max_examples=300,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Model, settings=generated)
