"""For tests of conversations: a port around a real engine, and devices that speak through it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from engine_port import EnginePort, SpoolInMemory
from fleetlearn_coordinator.conversation.begun import Announced, BegunUpload, BegunUploads
from fleetlearn_coordinator.conversation.conversation import (
    Conversation,
)
from fleetlearn_coordinator.conversation.effects import (
    CheckedIn,
    Effect,
    LogNote,
    SendMessage,
)
from fleetlearn_coordinator.conversation.places import Places, Proven
from fleetlearn_coordinator.conversation.port import Admitted
from fleetlearn_coordinator.conversation.uploads import Uploads, check_parts
from fleetlearn_coordinator.rounds.commands import (
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    Finish,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import Settings
from fleetlearn_protocol import Code, ProtocolError
from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.frames import CHUNK_BYTES, pack_chunks
from fleetlearn_protocol.messages import (
    Cancel,
    CheckIn,
    ComeBack,
    Evaluation,
    FromCoordinator,
    FromDevice,
    Grant,
    Held,
    Question,
    Reply,
    Report,
    Task,
    VectorReference,
    Welcome,
    encode,
)
from fleetlearn_protocol.vector import Vector
from peers import report_of

SIZE = 70_000
"""Elements of the model: two full chunks and a part of one."""
MODEL = "a" * 64
ASKED = {"update": "float32"}
WELCOME = Welcome("test", 60.0, CHUNK_BYTES)


class Room(EnginePort):
    """A port around an engine, and the devices that speak through it."""

    def __init__(self, *, uploads: int = 16, **settings: Any) -> None:
        values = {
            "goal": 2,
            "cohort": 2,
            "minimum": 1,
            "deadline": 600.0,
            "grace": 30.0,
            "gather": 0.0,
        }
        self.engine = Engine(Settings(**(values | settings)))
        self.spool, self.elements = SpoolInMemory(4 * SIZE), SIZE
        self.uploads = Uploads(Places(uploads, 1000.0, Proven(100)))
        self.begun = BegunUploads(uploads, self.spool.free_spool_file)
        self.devices: dict[str, Device] = {}
        self.contents = {MODEL: 4 * SIZE}
        self.saved: dict[str, Vector] = {}
        self.measured: dict[str, Evaluation] = {}
        self.sent_away: ComeBack | None = None
        self.now = 0.0
        self.moved = 0

    def carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Assign(device, task, round, seed):
                    vectors = (VectorReference("model", MODEL, 4 * SIZE, "float32"),)
                    message: FromCoordinator = Task(
                        task, round, "b" * 64, vectors, ASKED, {}, 1, 10, seed, 600.0
                    )
                case Ask(device, task):
                    model = VectorReference("model", MODEL, 4 * SIZE, "float32")
                    message = Question(task, "evaluation", 600.0, bundle="b" * 64, vectors=(model,))
                case CancelTask(device, task, code, text):
                    message = Cancel(task, code, text)
                case Commit():
                    self.uploads.forget_tasks(self.spool, unless=self.engine.leases.values())
                    self.begun.forget(unless=self.engine.leases.values())
                    self.carry_out(self.engine.committed(self.now, change=1.0, metrics={}))
                    continue
                case Finish():
                    for finished in self.devices.values():
                        finished.conversation.tell(ComeBack(5.0, "finished"))
                    continue
                case _:
                    continue
            if device in self.devices:
                self.devices[device].conversation.tell(message)

    def tick(self, now: float) -> None:
        self.now = now
        self.carry_out(self.engine.tick(now))
        self.uploads.grant(now)

    # The port

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack:
        return self.sent_away or Admitted(self, WELCOME, 1000, 2000)

    def leave(self, device: str, now: float) -> None:
        del self.devices[device]
        super().leave(device, now)

    def announce(self, device: str, report: Report, now: float) -> Announced:
        if self.has_counted(device, report.task):
            return Announced(wanted=False)
        self.carry_out(self.engine.announce(device, report.task, report.round, now))
        check_parts(report, ASKED, partial(self.elements_of, report.task))
        return Announced(wanted=True, begun=self.begun.take(report.task, report.parts))

    def keep_upload(self, device: str, begun: BegunUpload) -> None:
        self.begun.keep(begun)

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> None:
        if not self.engine.takes_report(device, report.task):
            raise ProtocolError(Code.STALE_ROUND, "too late")
        self.engine.check_participation(device)
        self.saved[report.task] = np.frombuffer(self.spool.files[spool], np.float32)
        assert largest == {"update": np.abs(self.saved[report.task]).max()}

    def save_answer(self, device: str, message: Reply) -> bool:
        new = super().save_answer(device, message)
        if new:
            self.measured[message.task] = content_of(message)
        return new

    def received(self, device: str, task: str, end: int, size: int, now: float) -> None:
        super().received(device, task, end, size, now)
        self.moved += size


class Device:
    """One connection of a device, and the effects that its conversation asked for."""

    def __init__(self, room: Room, name: str = "a") -> None:
        self.room, self.name = room, name
        self.effects: list[Effect] = []
        self.conversation = Conversation(room.uploads, self, room.now)

    def perform(self, effect: Effect) -> None:
        self.effects.append(effect)
        if isinstance(effect, CheckedIn):
            if effect.device in self.room.devices:
                self.room.devices[effect.device].conversation.replaced()
            self.room.devices[effect.device] = self

    def confirm(self, check_in: CheckIn) -> CheckIn:
        return check_in

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack:
        return self.room.admit(check_in)

    def arriving(self) -> int:
        return 0

    def say(self, *messages: FromDevice | str | bytes) -> list[FromCoordinator]:
        """Say these, and return what is answered."""
        self.did()
        for message in messages:
            frame = message if isinstance(message, str | bytes) else encode(message)
            self.conversation.received(frame, self.room.now)
        return self.heard()

    def did(self) -> list[Effect]:
        """The effects since the last look, without the log's."""
        effects: list[Effect] = [
            effect for effect in self.effects if not isinstance(effect, LogNote)
        ]
        self.effects = []
        return effects

    def heard(self) -> list[FromCoordinator]:
        """The messages since the last look."""
        return [effect.message for effect in self.did() if isinstance(effect, SendMessage)]

    def check_in(self, held: Held | None = None) -> list[FromCoordinator]:
        return self.say(CheckIn(1, self.name, 10, held=held))

    def disconnect(self) -> None:
        self.conversation.disconnected(self.room.now)

    @property
    def task(self) -> Task:
        """The task that it was given last."""
        (*_, task) = [effect.message for effect in self.effects if isinstance(effect, SendMessage)]
        assert isinstance(task, Task)
        return task


def begun(room: Room, *names: str) -> list[tuple[Device, Task]]:
    """Devices that checked in and were given a task."""
    devices = [Device(room, name) for name in names]
    for device in devices:
        device.conversation.received(encode(CheckIn(1, device.name, 10)), room.now)
    room.tick(room.now)
    found = [(device, device.task) for device in devices]
    for device in devices:
        device.did()
    return found


def one(messages: list[FromCoordinator], kind: type[Any]) -> Any:
    (message,) = messages
    assert isinstance(message, kind)
    return message


def chunks(grant: Grant, update: Vector) -> list[bytes]:
    return list(pack_chunks(grant.transfer, update.tobytes(), grant.offset))


def granted(device: Device, task: Task, update: Vector) -> Grant:
    grant: Grant = one(device.say(report_of(task, update)), Grant)
    return grant


UPDATE = np.linspace(-3, 2, SIZE, dtype=np.float32)
