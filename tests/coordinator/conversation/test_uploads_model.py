"""Uploads in any order: devices that come, go, are replaced and train again, places that are lost,
answers that come later, and a coordinator that is killed or stopped. What is accepted is what the
device sent, no spool file is lost or used twice, and a death costs a checkpoint at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from conversing import Device, Room
from fleetlearn_coordinator.conversation import uploads as uploads_module
from fleetlearn_coordinator.conversation.begun import BegunUpload, BegunUploads
from fleetlearn_coordinator.conversation.conversation import Conversation
from fleetlearn_coordinator.conversation.effects import CloseConnection, End, SendMessage
from fleetlearn_coordinator.conversation.pending import Pending, ask
from fleetlearn_coordinator.conversation.places import WINDOW, Places, Proven
from fleetlearn_coordinator.conversation.uploads import Upload, Uploads
from fleetlearn_protocol import Code
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    CheckIn,
    FromCoordinator,
    Grant,
    Held,
    Part,
    Refused,
    Report,
    Task,
    Uploaded,
    Waiting,
    encode,
)
from fleetlearn_protocol.vector import Vector
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Generate
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from late_port import LateRoom
from peers import report_of

ELEMENTS = 64
LARGEST_CHUNK = 96
CHECKPOINT = 100
PLACES = 2
NAMES = ("a", "b", "c", "d")
OVER = {Code.STALE_ROUND, Code.NOT_WANTED, Code.UNKNOWN_TASK}
USUAL = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[*HealthCheck],
)
LONG = settings(USUAL, max_examples=500, stateful_step_count=80)
SEARCH = settings(USUAL, max_examples=400, stateful_step_count=60, phases=[Generate.generate])


class Remembering:
    """A room that remembers which spool files have saved updates."""

    files: dict[str, int]

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> None:
        super().save_update(device, report, spool, largest)  # type: ignore[misc]
        self.files[report.task] = spool


class PromptRoom(Remembering, Room):
    pass


class FarRoom(Remembering, LateRoom):
    pass


class Sender:
    """A device: what it has trained, and how far it sent it."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.connection: Device | None = None
        self.task: Task | None = None
        self.grant: Grant | None = None
        self.trained = self.sent = 0
        self.first = 0
        """How often it had trained when it was given its task."""

    @property
    def update(self) -> Vector:
        return self.made_by(self.trained)

    def made_by(self, training: int) -> Vector:
        assert self.task is not None
        seed = [self.number, training, *self.task.task.encode()]
        return np.random.default_rng(seed).standard_normal(ELEMENTS).astype(np.float32)

    def heard(self, room: Room, message: FromCoordinator) -> None:
        task = None if self.task is None else self.task.task
        match message:
            case Task() if message.task != task:
                self.task, self.grant = message, None
                self.first = self.trained = self.trained + 1
            case Cancel() if message.task == task:
                self.task = self.grant = None
            case Grant() if message.task == task:
                self.grant, self.sent = message, message.offset
            case Waiting() if message.task == task:
                self.grant = None
            case Accepted() if message.task == task:
                saved = room.saved[message.task]
                trainings = range(self.first, self.trained + 1)
                assert any(np.array_equal(saved, self.made_by(each)) for each in trainings)
                self.task = self.grant = None
            case Refused(Code.WRONG_OFFSET | Code.REPLACED):
                pass
            case Refused() if message.code in OVER:
                if message.task == task:
                    self.task = self.grant = None
            case Refused():
                raise AssertionError(f"{message} came, and {self.name} did nothing wrong")


class AnyOrder(RuleBasedStateMachine):
    late: bool

    @initialize(late=st.booleans())
    def begin(self, late: bool) -> None:
        made = FarRoom if late else PromptRoom
        self.room: Any = made(
            uploads=PLACES, goal=3, cohort=4, minimum=1, stall=1e9, deadline=500.0, grace=200.0
        )
        self.room.elements, self.room.files, self.late = ELEMENTS, {}, late
        self.senders = [Sender(name, number) for number, name in enumerate(NAMES)]

    # What devices do

    def _say(self, sender: Sender, *messages: Any) -> None:
        assert sender.connection is not None
        for message in messages:
            frame = message if isinstance(message, bytes) else encode(message)
            sender.connection.conversation.received(frame, self.room.now)
        self._hear()

    def _hear(self) -> None:
        heard = True
        while heard:
            heard = False
            for sender in self.senders:
                connection = sender.connection
                for effect in [] if connection is None else connection.did():
                    heard = True
                    if isinstance(effect, SendMessage):
                        sender.heard(self.room, effect.message)
                    elif isinstance(effect, CloseConnection | End):
                        self._break(sender)

    def _break(self, sender: Sender) -> None:
        connection, sender.connection, sender.grant = sender.connection, None, None
        if connection is not None:
            connection.disconnect()

    @rule(number=st.integers(0, 3))
    def connect(self, number: int) -> None:
        """The device connects, also where the coordinator believes that it is connected."""
        sender = self.senders[number]
        held = None if sender.task is None else Held(sender.task.task, sender.task.round)
        before, sender.connection = sender.connection, Device(self.room, sender.name)
        sender.grant = None
        self._say(sender, CheckIn(1, sender.name, 10, held=held))
        self.go_on(10**6)
        if before is not None:
            before.disconnect()

    @rule(number=st.integers(0, 3))
    def lose(self, number: int) -> None:
        self._break(self.senders[number])
        self._hear()

    @rule(number=st.integers(0, 3), again=st.booleans())
    def report(self, number: int, again: bool) -> None:
        """The device reports; ``again``: it trained again, with other bytes."""
        sender = self.senders[number]
        if sender.task is None or sender.connection is None:
            return
        if again:
            sender.trained += 1
            sender.grant = None
        self._say(sender, report_of(sender.task, sender.update))

    @rule(number=st.integers(0, 3), size=st.integers(1, LARGEST_CHUNK // 4), gap=st.booleans())
    def send(self, number: int, size: int, gap: bool) -> None:
        """The device sends a chunk; ``gap``: it leaves four bytes out."""
        sender = self.senders[number]
        if sender.grant is None or sender.connection is None:
            return
        content, begin = sender.update.tobytes(), sender.sent
        if gap and begin + 4 < len(content):
            begin += 4
        chunk = content[begin : begin + 4 * size]
        if chunk:
            transfer = sender.grant.transfer
            if begin == sender.sent:
                sender.sent += len(chunk)
            self._say(sender, pack_chunk(transfer, begin, chunk))

    @rule(number=st.integers(0, 3))
    def finish(self, number: int) -> None:
        """The device sends the rest."""
        sender = self.senders[number]
        if sender.grant is None or sender.connection is None:
            return
        assert sender.task is not None
        content, task = sender.update.tobytes(), sender.task.task
        while sender.grant is not None and sender.sent < len(content):
            self.send(number, LARGEST_CHUNK // 4, False)
        if sender.grant is not None:
            sender.grant = None
            self._say(sender, Uploaded(task))

    # What happens to the coordinator

    @precondition(lambda self: self.late)
    @rule(most=st.integers(1, 6))
    def go_on(self, most: int) -> None:
        """The run hears some of what waits for it."""
        if self.late:
            while self.room.far.waiting and most:
                self.room.far.go_on(1)
                self._hear()
                most -= 1

    @rule(seconds=st.sampled_from([0.0, WINDOW, 30.0, 300.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.room.now += seconds
        self.room.uploads.places.measure(self.room.now)
        self.room.tick(self.room.now)
        self._hear()

    @rule(stopped=st.booleans())
    def end(self, stopped: bool) -> None:
        """The process is killed, or stopped in an orderly way, and begins again."""
        room = self.room
        places = room.uploads.places
        came = {upload.report.task: upload.offset for upload in self._uploads()}
        if stopped:
            room.uploads.write_checkpoints(room.now)
        granted = {upload.report.task for upload in places.held}
        connected = list(room.devices)
        room.devices.clear()
        for sender in self.senders:
            sender.connection = sender.grant = None
        if self.late:
            room.far.waiting.clear()
        room.uploads = Uploads(Places[Upload](PLACES, 1000.0, Proven(100)))
        self._take_up()
        for task, offset in came.items():
            if task not in room.engine.leases.values() or len(room.spool.checkpoints) > PLACES:
                continue
            kept = room.begun._kept.get(task)
            here = 0 if kept is None else kept.offset
            lost = 0 if stopped and task in granted else CHECKPOINT + LARGEST_CHUNK
            assert here >= offset - lost, f"{offset} bytes came, and {here} are here"
        for device in connected:
            room.carry_out(room.engine.disconnect(device, room.now))

    def _take_up(self) -> None:
        """As take_up_uploads.py does at a start."""
        spool, leases = self.room.spool, self.room.engine.leases
        saved = {*self.room.files.values()}
        self.room.begun = kept = BegunUploads(PLACES, spool.free_spool_file)
        for number in [*spool.files.keys() - saved]:
            begun = spool.checkpoints.get(number)
            if begun is not None and leases.get(begun.device) == begun.task:
                kept.keep(begun)
            else:
                spool.free_spool_file(number)

    # What always holds

    def _uploads(self) -> list[Upload]:
        places = self.room.uploads.places
        found = {*places.held, *places.waiting, *self.room.uploads._without_place}
        return [upload for upload in found if upload.spool_file is not None]

    @invariant()
    def each_spool_file_is_somebody_s(self) -> None:
        room = self.room
        files = [upload.spool_file for upload in self._uploads()]
        files += [begun.spool_file for begun in room.begun._kept.values()]
        files += room.files.values()
        assert len({*files}) == len(files), "a spool file is of two uploads"
        assert {*files} <= {*room.spool.files}
        if not self.late or not room.far.waiting:  # else the run may be asked to save some
            assert {*files} == {*room.spool.files}, "a spool file is nobody's"
        assert len(room.begun._kept) <= PLACES
        assert room.spool.checkpoints.keys() <= room.spool.files.keys()

    @invariant()
    def what_was_saved_is_what_was_announced(self) -> None:
        assert self.room.engine.accepted.keys() <= self.room.saved.keys()

    def teardown(self) -> None:
        """All who have a task come back and deliver it."""
        if not hasattr(self, "room"):
            return
        for number, sender in enumerate(self.senders):
            self.connect(number)
            if sender.task is not None:
                task = sender.task.task
                self.report(number, False)
                self.go_on(10**6)
                self.finish(number)
                self.go_on(10**6)
                waits = self.room.uploads.waiting or sender.task is None
                assert waits or sender.task.task != task, "an update cannot be delivered"
        self.each_spool_file_is_somebody_s()


@pytest.fixture(autouse=True)
def small_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_module, "CHECKPOINT_BYTES", CHECKPOINT)


def test_any_order() -> None:
    run_state_machine_as_test(AnyOrder, settings=USUAL)


@pytest.mark.slow
def test_any_order_for_long() -> None:
    run_state_machine_as_test(AnyOrder, settings=LONG)


# Mistakes that each must be found


def _no_checkpoint(upload: Upload, now: float) -> bool:
    return False


def _forgets_checksums(upload: Upload, begun: BegunUpload) -> None:
    upload.went_on, upload.spool_file, upload.offset = True, begun.spool_file, begun.offset


def _goes_on_at_the_beginning(upload: Upload, begun: BegunUpload) -> None:
    upload.spool_file, upload.crc32 = begun.spool_file, {**begun.crc32}


def _keeps_its_file(uploads: Uploads, upload: Upload, now: float) -> BegunUpload | None:
    begun = upload.write_checkpoint(now) if upload.offset else None
    uploads.drop(upload)
    return begun


def _hands_out_other_bytes(
    kept: BegunUploads, task: str, parts: tuple[Part, ...]
) -> BegunUpload | None:
    return kept._kept.pop(task, None)


def _drops_without_freeing(kept: BegunUploads, task: str) -> None:
    kept._kept.pop(task, None)


def _lets_go(conversation: Conversation, answer: Pending[Any]) -> Any:
    return ask(answer)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "no checkpoint is written": (Upload, "needs_checkpoint", _no_checkpoint),
    "checksums are forgotten": (Upload, "go_on", _forgets_checksums),
    "the offset is forgotten": (Upload, "go_on", _goes_on_at_the_beginning),
    "a kept file is freed": (Uploads, "part", _keeps_its_file),
    "other bytes are handed out": (BegunUploads, "take", _hands_out_other_bytes),
    "a dropped file is not freed": (BegunUploads, "_drop", _drops_without_freeing),
    "what must end is dropped": (Conversation, "_to_its_end", _lets_go),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(AnyOrder, settings=SEARCH)
