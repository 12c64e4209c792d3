"""For tests of uploads: a state machine of devices that come, go, are replaced and train again, of
places that are lost, of answers that come later, and of a coordinator that is killed or stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from conversing import Device, Room
from fleetlearn_coordinator.conversation.begun import BegunUploads
from fleetlearn_coordinator.conversation.effects import CloseConnection, End, SendMessage
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
    Refused,
    Report,
    Task,
    Uploaded,
    Waiting,
    encode,
)
from fleetlearn_protocol.vector import Vector
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from late_port import LateRoom
from peers import report_of

ELEMENTS = 128
LARGEST_CHUNK = 64
CHECKPOINT = 32
PLACES = 2
NAMES = ("a", "b", "c", "d")
OVER = {Code.STALE_ROUND, Code.NOT_WANTED, Code.UNKNOWN_TASK}
Draw = Callable[[st.SearchStrategy[Any]], Any]


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
        self.reported = False
        """On this connection."""
        self.first = 0
        """How often it had trained when it was given its task."""

    def __repr__(self) -> str:
        return self.name

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

    @initialize(late=st.sampled_from([True, True, False]))
    def begin(self, late: bool) -> None:
        made = FarRoom if late else PromptRoom
        self.room: Any = made(
            uploads=PLACES, goal=3, cohort=4, minimum=1, stall=1e9, deadline=500.0, grace=200.0
        )
        self.room.elements, self.room.files, self.late = ELEMENTS, {}, late
        self.senders = [Sender(name, number) for number, name in enumerate(NAMES)]
        for sender in self.senders:
            self._connect(sender)

    @rule(data=st.data())
    def happen(self, data: st.DataObject) -> None:
        """One thing that can happen now. It is one rule, as Hypothesis leaves out some rules in
        most examples: an upload that is lost and goes on needs nearly all. What can do nothing is
        left out here: else most steps did nothing, and no upload came far between two ends of the
        coordinator."""
        possible: list[str] = []
        for what, (often, can) in self.CAN.items():
            if can(self):
                possible += [what] * often
        getattr(self, data.draw(st.sampled_from(possible)))(data.draw)

    # What devices do

    def _away(self) -> list[Sender]:
        return [sender for sender in self.senders if sender.connection is None]

    def _connected(self) -> list[Sender]:
        return [sender for sender in self.senders if sender.connection is not None]

    def _with_task(self) -> list[Sender]:
        return [sender for sender in self._connected() if sender.task is not None]

    def _granted(self) -> list[Sender]:
        return [sender for sender in self._connected() if sender.grant is not None]

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

    def _connect(self, sender: Sender) -> None:
        held = None if sender.task is None else Held(sender.task.task, sender.task.round)
        before, sender.connection = sender.connection, Device(self.room, sender.name)
        sender.grant, sender.reported = None, False
        self._say(sender, CheckIn(1, sender.name, 10, held=held))
        self._go_on(10**6)
        if before is not None:
            before.disconnect()

    def connect(self, draw: Draw) -> None:
        """All devices that are away connect."""
        for sender in self._away():
            self._connect(sender)

    def connect_again(self, draw: Draw) -> None:
        """A device connects, and the coordinator believes that it is connected."""
        self._connect(draw(st.sampled_from(self._connected())))

    def lose(self, draw: Draw) -> None:
        """A connection breaks, most often one that waits for an answer of the run."""
        connected = self._connected()
        asking = [each for each in connected if each.connection.conversation.asks]
        self._break(draw(st.sampled_from([*connected, *3 * asking])))
        self._hear()

    def report(self, draw: Draw) -> None:
        """A device reports. It may have trained again, with other bytes. Where the run answers
        later, it has not reported on this connection before: a grant, which names the task alone,
        could be of the first report."""
        sender = draw(st.sampled_from(self._with_task()))
        again = draw(st.booleans())
        self._report(sender, again and not (self.late and sender.reported))

    def _report(self, sender: Sender, again: bool) -> None:
        assert sender.task is not None
        sender.reported = True
        if again:
            sender.trained += 1
            sender.grant = None
        self._say(sender, report_of(sender.task, sender.update))

    def send(self, draw: Draw) -> None:
        """A device sends a chunk, and seldom leaves four bytes out."""
        size = draw(st.integers(1, LARGEST_CHUNK // 4))
        gap = draw(st.sampled_from([False, False, False, True]))
        self._send(draw(st.sampled_from(self._granted())), size, gap)

    def _send(self, sender: Sender, size: int, gap: bool) -> None:
        assert sender.grant is not None
        content, begin = sender.update.tobytes(), sender.sent
        if gap and begin + 4 < len(content):
            begin += 4
        chunk = content[begin : begin + 4 * size]
        if chunk:
            transfer = sender.grant.transfer
            if begin == sender.sent:
                sender.sent += len(chunk)
            self._say(sender, pack_chunk(transfer, begin, chunk))

    def finish(self, draw: Draw) -> None:
        """A device sends the rest."""
        self._finish(draw(st.sampled_from(self._granted())))

    def _finish(self, sender: Sender) -> None:
        assert sender.task is not None
        content, task = sender.update.tobytes(), sender.task.task
        while sender.grant is not None and sender.sent < len(content):
            self._send(sender, LARGEST_CHUNK // 4, False)
        if sender.grant is not None:
            sender.grant = None
            self._say(sender, Uploaded(task))

    # What happens to the coordinator

    def go_on(self, draw: Draw) -> None:
        """The run hears some of what waits for it."""
        self._go_on(draw(st.integers(1, 6)))

    def _go_on(self, most: int) -> None:
        if self.late:
            while self.room.far.waiting and most:
                self.room.far.go_on(1)
                self._hear()
                most -= 1

    def let_time_pass(self, draw: Draw) -> None:
        self.room.now += draw(st.sampled_from([0.0, WINDOW, WINDOW, 30.0, 300.0]))
        self.room.uploads.places.measure(self.room.now)
        self.room.tick(self.room.now)
        self._hear()

    def end(self, draw: Draw) -> None:
        """The process is killed, or stopped in an orderly way, and begins again."""
        room, stopped = self.room, draw(st.booleans())
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
        some_are_dropped = len(room.spool.checkpoints) > PLACES
        self._take_up()
        for task, offset in came.items():
            if some_are_dropped or task not in room.engine.leases.values():
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

    CAN: ClassVar[dict[str, tuple[int, Callable[[AnyOrder], Any]]]] = {
        "connect": (2, _away),
        "connect_again": (1, _connected),
        "lose": (2, _connected),
        "report": (3, _with_task),
        "send": (6, _granted),
        "finish": (2, _granted),
        "go_on": (2, lambda self: self.late and self.room.far.waiting),
        "let_time_pass": (1, lambda self: True),
        "end": (2, lambda self: self._uploads() or self.room.begun._kept),
    }
    """What can happen -> how often of all, and whether it would do something now."""

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
        for sender in self.senders:
            self._connect(sender)
            if sender.task is not None:
                task = sender.task.task
                self._report(sender, False)
                self._go_on(10**6)
                if sender.grant is not None:
                    self._finish(sender)
                self._go_on(10**6)
                waits = self.room.uploads.waiting or sender.task is None
                assert waits or sender.task.task != task, "an update cannot be delivered"
        self.each_spool_file_is_somebody_s()
