"""A run for conversations to speak to: a real engine behind a port with files in memory, and what
must hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from engine_port import EnginePort, SpoolInMemory
from fleetlearn_coordinator.conversation.begun import Announced, BegunUpload, BegunUploads
from fleetlearn_coordinator.conversation.conversation import Conversation
from fleetlearn_coordinator.conversation.effects import (
    CheckedIn,
    CloseConnection,
    Effect,
    End,
    SendMessage,
    StartDownload,
    StopDownload,
)
from fleetlearn_coordinator.conversation.limits import RACES_OF_A_TASK, REFUSAL_FORGOTTEN
from fleetlearn_coordinator.conversation.masked_reports import check_masked
from fleetlearn_coordinator.conversation.places import Places, Proven
from fleetlearn_coordinator.conversation.port import Admitted
from fleetlearn_coordinator.conversation.uploads import Upload, Uploads, check_parts
from fleetlearn_coordinator.rounds.commands import (
    Abandon,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    Finish,
    SendAway,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.settings import EvaluationSettings, PaceSettings, Phase, Settings
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import (
    MAX_REFUSALS,
    Cancel,
    CheckIn,
    ComeBack,
    FromCoordinator,
    Question,
    Refused,
    Report,
    SecureTask,
    Task,
    VectorReference,
    Welcome,
    encode,
)

from tests.fuzz.targets.good_device import GoodDevice

ELEMENTS = 11
BUNDLE, MODEL = "b" * 64, "a" * 64
ACTORS = ("a", "b", "c", "a")
"""Names that the actors check in under: two speak for the same device."""
PLACES = 2
PLAIN = {"update": "float32"}
MASKS = {"update": "masked"}
SECURE = SecureTask("helper", 2, 20, least_factor=0.5, helper="ab" * 32)
"""What tasks say where updates are masked."""
PACE = PaceSettings(2)
SYNCHRONOUS = Settings(
    goal=1, cohort=2, minimum=1, deadline=60.0, grace=10.0, gather=1.0, stall=20.0
)
ROUNDS: tuple[tuple[Settings, dict[str, str]], ...] = (
    (SYNCHRONOUS, PLAIN),
    (SYNCHRONOUS._replace(goal=2, cohort=3, minimum=2, rounds=3), {"update": "int8"}),
    (
        SYNCHRONOUS._replace(goal=2, cohort=2, asynchronous=True, max_staleness=1, max_updates=1),
        PLAIN,
    ),
    (
        SYNCHRONOUS._replace(goal=2, carry=True, max_staleness=2),
        {"update": "float32", "control": "float32"},
    ),
    (
        SYNCHRONOUS._replace(evaluation=EvaluationSettings(every=1, devices=2, minimum=1)),
        {"update": "topk-0.3-int8"},
    ),
    (SYNCHRONOUS._replace(pace=PACE, cohort=1), PLAIN),
    (
        SYNCHRONOUS._replace(
            goal=3,
            cohort=3,
            asynchronous=True,
            max_staleness=0,
            pace=PACE,
            evaluation=EvaluationSettings(every=2, devices=1),
        ),
        PLAIN,
    ),
    (
        SYNCHRONOUS._replace(goal=2, cohort=3, asynchronous=True, max_staleness=1, max_updates=1),
        MASKS,
    ),
)
UNCHANGED = {
    Code.BAD_MESSAGE,
    Code.UNKNOWN_TYPE,
    Code.TOO_LARGE,
    Code.BAD_FRAME,
    Code.OUT_OF_TURN,
    Code.DUPLICATE,
    Code.NOT_WANTED,
    Code.UNKNOWN_TASK,
    Code.UNKNOWN_CONTENT,
    Code.STALE_ROUND,
    Code.WRONG_OFFSET,
}
"""Codes of refusals that leave the tasks and the reports as they were."""


class Room(EnginePort):
    """A run in memory, and the connections of its devices. The port is as RunServer has it."""

    def __init__(self, settings: Settings, asked: dict[str, str]) -> None:
        self.engine, self._asked = Engine(settings), asked
        self._secure = SECURE if asked == MASKS else None
        self.spool, self.elements = SpoolInMemory(1000, 3 * PLACES + 1), ELEMENTS
        self.begun = BegunUploads(PLACES, self.spool.free_spool_file)
        self.uploads = Uploads(Places[Upload](PLACES, 100.0, Proven(2)))
        self.connections: dict[int, Peer] = {}
        """Actor -> its connection."""
        self.devices: dict[str, Peer] = {}
        self.contents = {BUNDLE: 100, MODEL: 4 * ELEMENTS}
        self.saved: set[tuple[str, str]] = set()
        """(device, task) of each update that was saved."""
        self.commits = 0
        self.now = 0.0
        self.good = [GoodDevice(name, ELEMENTS) for name in ACTORS]

    def carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Assign(device, task, round, seed):
                    vectors = (VectorReference("model", MODEL, 4 * ELEMENTS, "float32"),)
                    left = max(0.0, command.deadline - self.now)
                    self._tell(
                        device,
                        Task(
                            task,
                            round,
                            BUNDLE,
                            vectors,
                            self._asked,
                            {},
                            1,
                            10,
                            seed,
                            left,
                            secure=self._secure,
                        ),
                    )
                case Ask(device, task):
                    vectors = (VectorReference("model", MODEL, 4 * ELEMENTS, "float32"),)
                    left = max(0.0, command.deadline - self.now)
                    self._tell(
                        device, Question(task, "evaluation", left, bundle=BUNDLE, vectors=vectors)
                    )
                case CancelTask(device, task, code, text):
                    self._tell(device, Cancel(task, code, text))
                case SendAway(device, after):
                    self._tell(device, ComeBack(after, "no-task"))
                case Abandon():
                    self._forget_uploads()
                case Commit():
                    self.commits += 1
                    self._forget_uploads()
                    for task, device in self.engine.accepted.items():
                        assert (device, task) in self.saved, (
                            "a report counts whose update was not saved"
                        )
                    self.carry_out(self.engine.committed(self.now, change=1.0, metrics={}))
                case Finish():
                    for device in list(self.devices):
                        self._tell(device, ComeBack(5.0, "finished"))

    def _forget_uploads(self) -> None:
        self.uploads.forget_tasks(self.spool, unless={*self.engine.leases.values()})
        self.begun.forget(unless={*self.engine.leases.values()})

    def _tell(self, device: str, message: FromCoordinator) -> None:
        if device in self.devices:
            self.devices[device].conversation.tell(message)

    # The port

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack:
        if self.engine.phase is Phase.FINISHED:
            return ComeBack(1.0, "finished")
        return Admitted(self, Welcome("fuzz", 5.0, 16), 144, 2 * 4 * ELEMENTS)

    def leave(self, device: str, now: float) -> None:
        del self.devices[device]
        super().leave(device, now)

    def announce(self, device: str, report: Report, now: float) -> Announced:
        if self.has_counted(device, report.task):
            return Announced(wanted=False)
        self.carry_out(self.engine.announce(device, report.task, report.round, now))
        exact = all(part.encoding == "float32" for part in report.parts)
        check_parts(
            report,
            dict.fromkeys(self._asked, "float32") if exact else self._asked,
            partial(self.elements_of, report.task),
        )
        if self._secure is not None:
            check_masked(report, self._secure, self.engine.round_of(report.task), 1)
        return Announced(wanted=True, begun=self.begun.take(report.task, report.parts))

    def keep_upload(self, device: str, begun: BegunUpload) -> None:
        if self.engine.leases.get(device) == begun.task:
            self.begun.keep(begun)
        else:
            self.spool.free_spool_file(begun.spool_file)

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> None:
        if not self.engine.takes_report(device, report.task):
            raise ProtocolError(Code.STALE_ROUND, "too late")
        assert (device, report.task) not in self.saved, "an update was saved twice"
        begin = 0
        for part in report.parts:
            content = bytes(self.spool.files[spool][begin : begin + part.size])
            if part.encoding == "masked":
                assert len(content) == 4 * (ELEMENTS + 1)
                continue
            vector = find_encoding(part.encoding).decode(content, ELEMENTS)
            assert np.isfinite(vector).all()
            assert float(np.abs(vector).max()) == largest[part.name]
            begin += part.size
        self.saved.add((device, report.task))
        self.spool.free_spool_file(spool)

    # Steps

    def connect(self, actor: int) -> Peer:
        self.disconnect(actor)
        peer = self.connections[actor] = Peer(self, self.good[actor])
        return peer

    def disconnect(self, actor: int) -> None:
        peer = self.connections.pop(actor, None)
        if peer is not None:
            peer.good.disconnected()
            if peer.downloading:
                peer.conversation.fetched()
            peer.conversation.disconnected(self.now)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, as the alarm of the engine and the host's sweep see it."""
        until = self.now + seconds
        for _ in range(50):
            wake = self.engine.wake_at()
            if wake is None or wake > until:
                break
            self.now = max(self.now, wake)
            self._tick()
        self.now = until
        self.uploads.places.measure(until)
        self._tick()
        for actor, peer in list(self.connections.items()):
            if peer.conversation.overdue(until, 15.0) is not None:
                self.disconnect(actor)

    def _tick(self) -> None:
        self.carry_out(self.engine.tick(self.now))
        self.uploads.grant(self.now)

    def check(self) -> None:
        """What holds after every step."""
        for book in self.engine.books:
            running = [*book.tasks.values()]
            assert len({*running}) == len(running), "a task was given twice"
            assert not {*running} & ({*book.accepted} | {*book.early} | {*book.dropped}), (
                "a task runs and is over"
            )
            assert book.terms.keys() == book.tasks.keys()
            assert book.absent.keys() <= book.tasks.keys()
            assert not {*book.accepted} & {*book.early}
        measuring, training = self.engine.exchanges[EVALUATION].book.tasks, self.engine.book.tasks
        assert not measuring.keys() & training.keys(), "a device has two tasks"
        engine = self.engine
        if not engine.settings.asynchronous and not engine.settings.carry:
            assert len(engine.leases) + len(engine.accepted) <= engine.settings.cohort, (
                "more leases than slots"
            )
        places = self.uploads.places
        assert len(places.held) <= PLACES
        assert len(self.spool.files) <= 3 * PLACES + 1
        kept = {*places.held, *places.waiting, *self.uploads._without_place}
        files = [upload.spool_file for upload in kept if upload.spool_file is not None]
        files += [begun.spool_file for begun in self.begun._kept.values()]
        assert sorted(files) == sorted(self.spool.files), (
            "a spool file is nobody's, or belongs to two uploads"
        )
        for device, peer in self.devices.items():
            assert peer.conversation.device == device
        speaking = [
            peer.conversation.device
            for peer in self.connections.values()
            if peer.conversation.device
        ]
        assert sorted(speaking) == sorted(self.devices), "a device has two connections, or is gone"

    def state(self) -> tuple[Any, ...]:
        """Return what a refused message leaves as it was."""
        engine = self.engine
        book, measuring = engine.book, engine.exchanges[EVALUATION].book
        return (
            engine.round,
            engine.version,
            engine.phase,
            {*book.tasks.items()},
            {*book.accepted},
            {*book.early},
            {*book.dropped},
            {*measuring.tasks.items()},
            {*measuring.accepted},
            len(self.saved),
            {*self.devices},
        )


class Peer:
    """A connection: owns its conversation."""

    def __init__(self, room: Room, good: GoodDevice) -> None:
        self.room, self.good = room, good
        self.downloading = False
        self.refusals: list[Refused] = []
        self.tasks, self.since = 0, room.now
        self.ended = False
        self.conversation = Conversation(room.uploads, self, room.now)

    def perform(self, effect: Effect) -> None:
        match effect:
            case SendMessage(message):
                encode(message)  # what the protocol does not have cannot be sent
                self.good.hear(message)
                if isinstance(message, Refused):
                    self.refusals.append(message)
                self.tasks += isinstance(message, Task | Question)
            case CheckedIn(device):
                earlier = self.room.devices.get(device)
                if earlier is not None:
                    earlier.conversation.replaced()
                self.room.devices[device] = self
            case CloseConnection() | End():
                self.ended = True
            case StartDownload():
                assert not self.downloading
                self.downloading = True
            case StopDownload():
                assert self.downloading
                self.downloading = False

    def confirm(self, check_in: CheckIn) -> CheckIn:
        return check_in

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack:
        return self.room.admit(check_in)

    def arriving(self) -> int:
        return 0

    def say(self, frame: str | bytes) -> None:
        """Say this, and check that a refusal left the rest alone."""
        if self.ended:
            return
        before, said = self.room.state(), len(self.refusals)
        self.conversation.received(frame, self.room.now)
        if len(self.refusals) > said and self.refusals[-1].code in UNCHANGED:
            # announcing may give a lost task back
            told = frame if isinstance(frame, str) else ""
            revived = '"report"' in told or '"finished"' in told
            if not revived:
                assert self.room.state() == before, f"{self.refusals[-1]} changed something"
        forgotten = (self.room.now - self.since) / REFUSAL_FORGOTTEN
        assert len(self.refusals) <= 2 * MAX_REFUSALS + 1 + RACES_OF_A_TASK * self.tasks + forgotten
