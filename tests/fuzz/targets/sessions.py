"""Target: what a coordinator says to a device, in any order and with time moving, before a session.

Its owner does all that the session commands, with a disk in memory, and a training that ends at
once or later.

Besides the steps of scripts.py: ``j2`` does the second of the jobs that wait (look up, file, save,
hang up), ``t0``, ``t1``, ``t2`` end the training well, stopped, or failed, ``u`` sends a chunk of
the upload, ``k`` kills the process, ``s`` stops the device, and ``c16`` serves the content that was
asked for in chunks of 16 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from fleetlearn_device.session.commands import (
    Close,
    Command,
    Commands,
    DropPending,
    FinishContent,
    Locate,
    Note,
    SavePending,
    Send,
    SendUpdate,
    StartAnswer,
    StartTraining,
    StopTraining,
    StopUpdate,
    StoreChunk,
    Wanted,
)
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.states import Closing, Idle, Offline, Online, Saving
from fleetlearn_protocol import ProtocolError
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import (
    Accepted,
    Cancel,
    Evaluation,
    Fetch,
    Question,
    Refused,
    Reply,
    Report,
    Task,
    Uploaded,
    Welcome,
    decode_from_coordinator,
    encode,
)

from tests.fuzz.targets.scripts import (
    LONGEST_WAIT,
    Step,
    binary,
    count,
    filled,
    integers,
    number,
    steps,
)

ELEMENTS = 10
CONTENT = bytes(range(40))
MODEL = hashlib.sha256(CONTENT).hexdigest()
ALGORITHMS = ("scaffold", "feddyn", "ditto")


class Owner:
    """A device's process and disk around a session."""

    def __init__(self) -> None:
        self.now = 0.0
        self.connected = False
        self.complete: set[str] = set()
        """The disk: it survives the process, as does what follows."""
        self.partial: dict[str, int] = {}
        self.pending: Report | None = None
        self.saved: set[str] = set()
        self.settled: set[str] = set()
        """Tasks whose updates the device may forget."""
        self.fetch: Fetch | None = None
        self.boot()

    def boot(self) -> None:
        """Begin as a new process."""
        self.session = Session("dev", 7, algorithms=ALGORITHMS, held=self.pending)
        self.jobs: list[Callable[[], None]] = []
        self.running: Task | Question | None = None
        self.stop_asked = False
        self.upload: SendUpdate | None = None
        self.fetch = None

    def perform(self, commands: Commands) -> None:
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Send(message):
                encode(message)  # what the protocol does not have cannot be sent
                if isinstance(message, Report):
                    assert self.pending == message, "reported before it was saved"
                if isinstance(message, Uploaded):
                    assert self.pending is not None
                    assert self.pending.task == message.task
                if isinstance(message, Fetch):
                    self.fetch = message
            case Locate(task):
                self._later(lambda: self._locate(task))
            case StoreChunk(wanted, offset, payload):
                assert offset == 0 or self.partial.get(wanted.sha256, 0) >= offset, (
                    "a content with a hole"
                )
                assert offset + len(payload) <= wanted.limit
                self.partial[wanted.sha256] = offset + len(payload)
            case FinishContent(wanted):
                self._later(lambda: self._finish(wanted))
            case StartTraining(task, seconds) | StartAnswer(task, seconds):
                assert self.running is None, "two trainings at once"
                assert seconds > 0
                assert all(vector.sha256 in self.complete for vector in task.vectors), (
                    "begun without its model"
                )
                self.running, self.stop_asked = task, False
            case StopTraining(task_id):
                assert self.running is not None
                assert self.running.task == task_id
                self.stop_asked = True
            case SavePending(report):
                self._later(lambda: self._save(report))
            case DropPending(task_id):
                self.upload = None
                if self.pending is not None and self.pending.task == task_id:
                    assert task_id in self.settled, "an update is forgotten that nobody took"
                    self.pending = None
            case SendUpdate():
                assert self.pending is not None
                assert self.pending.task == command.task_id
                assert 0 <= command.offset <= self.pending.size
                self.upload = command
            case StopUpdate():
                self.upload = None
            case Close():
                self.upload = None
                self._later(self.hang_up)
            case Note(text):
                assert len(text) < 20_000

    def _later(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def _locate(self, task: Task | Question) -> None:
        lacking = []
        for name, sha256, size in (
            (vector.name, vector.sha256, vector.size) for vector in task.vectors
        ):
            if sha256 not in self.complete:
                have = self.partial.get(sha256, 0)
                lacking.append(
                    Wanted(
                        sha256, name, f"models/{sha256}", size, size, have if have <= size else 0
                    )
                )
        self.perform(self.session.located(task.task, lacking, self.now))

    def _finish(self, wanted: Wanted) -> None:
        good = self.partial.pop(wanted.sha256, 0) == wanted.size and wanted.sha256 == MODEL
        if good:
            self.complete.add(wanted.sha256)
        self.perform(self.session.stored(wanted.sha256, good, self.now))

    def _save(self, report: Report) -> None:
        self.running, self.pending = None, report
        self.saved.add(report.task)
        if self.session.task_id != report.task or not isinstance(self.session.work, Saving):
            self.settled.add(report.task)
        self.perform(self.session.saved(report.task))

    def hang_up(self) -> None:
        if self.connected and isinstance(self.session.link, Closing):
            self.cut()

    def connect(self) -> None:
        if not self.connected:
            self.connected = True
            self.perform(self.session.connected(self.now))

    def cut(self) -> None:
        if self.connected:
            self.connected, self.upload, self.fetch = False, None, None
            self.perform(self.session.disconnected())

    def kill(self) -> None:
        self.connected = False
        self.boot()

    def hear(self, text: str) -> None:
        """The coordinator says this."""
        if not self.connected:
            return
        task_id = self.session.task_id
        try:
            message = decode_from_coordinator(text)
        except ProtocolError:
            pass
        else:
            if isinstance(self.session.link, Online) or isinstance(message, Refused):
                if isinstance(message, Task | Question) and task_id not in (None, message.task):
                    self.settled.add(str(task_id))
                if isinstance(message, Accepted | Cancel | Refused) and message.task is not None:
                    self.settled.add(message.task)
        self.perform(self.session.received(text, self.now))

    def hear_chunk(self, frame: bytes) -> None:
        if self.connected:
            self.perform(self.session.received_chunk(frame, self.now))

    def end_training(self, how: int) -> None:
        task = self.running
        if task is None or isinstance(self.session.work, Saving):
            return
        if self.stop_asked:
            how = 1 if how == 0 else how
        elif how == 1:
            return  # it stops only when told to
        if how != 0:
            self.running = None
            self.perform(self.session.ended(task.task, None if how == 1 else "diverged", "nan"))
        elif isinstance(task, Question):
            self.running = None
            self.perform(
                self.session.answered(Reply(task.task, "evaluation", fields_of(Evaluation(7, 3.5))))
            )
        else:
            sizes = {
                name: find_encoding(encoding).size(ELEMENTS)
                for name, encoding in task.parts.items()
            }
            parts = tuple(
                find_encoding(task.parts[name]).part(name, bytes(size))
                for name, size in sizes.items()
            )
            self.perform(
                self.session.trained(Report(task.task, task.round, parts, 7, 3, 1.0, True, 0.5))
            )

    def send_chunk(self) -> None:
        upload = self.upload
        if upload is None or self.pending is None:
            return
        if upload.offset >= self.pending.size:
            self.upload = None
            self.perform(self.session.update_sent(upload.transfer, self.now))
            return
        self.upload = replace(upload, offset=upload.offset + max(1, upload.chunk_bytes))

    def serve(self, chunk: int) -> None:
        """Answer the last fetch, if it is of the model."""
        fetch, self.fetch = self.fetch, None
        if fetch is None or fetch.sha256 != MODEL or fetch.offset > len(CONTENT):
            return
        head = {
            "type": "content",
            "transfer": 3,
            "sha256": MODEL,
            "size": len(CONTENT),
            "offset": fetch.offset,
        }
        self.hear(str(head).replace("'", '"'))
        for place in range(fetch.offset, len(CONTENT), chunk):
            self.hear_chunk(pack_chunk(3, place, CONTENT[place : place + chunk]))

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(100):
            due = self.session.due()
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            self.perform(self.session.tick(self.now, 1))
        self.now = until

    def next(self) -> None:
        """Do what a device that nothing disturbs does next."""
        if self.jobs:
            self.jobs.pop(0)()
        elif self.upload is not None:
            self.send_chunk()
        elif self.fetch is not None and self.fetch.sha256 == MODEL:
            self.serve(16)
        elif not self.connected:
            self.connect()
        elif self.running is not None:
            self.end_training(0)

    def check(self) -> None:
        """What holds after every step."""
        session = self.session
        for name in self.saved - self.settled:
            assert self.pending is not None, "an update is gone that nobody took"
            assert self.pending.task == name
        assert (self.running.task if self.running else None) == session.running_task_id
        assert self.connected != isinstance(session.link, Offline)
        assert len(self.jobs) < 500
        if session.running_task_id is None and isinstance(session.work, Idle):
            assert self.pending is None, "an update is kept that nobody will send"


def sessions(data: bytes) -> None:
    """A coordinator talks to a device. In the end one that does its part can give it another
    task."""
    owner = Owner()
    for step in steps(data):
        _do(owner, step)
        owner.check()
    _bring_to_rest(owner)


def _do(owner: Owner, step: Step) -> None:
    session = owner.session
    match step.sign:
        case "~":
            owner.pass_time(number(step.text, LONGEST_WAIT))
        case "+":
            owner.connect()
        case "-":
            owner.cut()
        case "j":
            if owner.jobs:
                owner.jobs.pop(count(step.text, 1000) % len(owner.jobs))()
        case "t":
            owner.end_training(count(step.text, 2))
        case "u":
            owner.send_chunk()
        case "c":
            owner.serve(1 + count(step.text, 100))
        case "k":
            owner.kill()
        case "s":
            owner.perform(session.stop())
        case ">":
            for _ in range(count(step.text, 30)):
                owner.next()
                owner.check()
        case "^":
            transfer, offset, size, fill = integers(step.text, 4)
            frame = pack_chunk(
                (3 + transfer) % 2**32, offset % 2**64, bytes([fill % 256]) * (1 + abs(size) % 300)
            )
            owner.hear_chunk(frame)
        case "#":
            owner.hear_chunk(binary(step.text))
        case _:
            owner.hear(filled(step.text, _told(owner)).decode("utf-8", "replace"))


def _told(owner: Owner) -> dict[bytes, bytes]:
    return {
        b"$task": (owner.session.task_id or "none").encode(),
        b"$model": MODEL.encode(),
        b"$report": b"null",
        b"$device": b"dev",
        b"$size": b"%d" % len(CONTENT),
        b"$bundle": b"b" * 64,
    }


def _bring_to_rest(owner: Owner) -> None:
    """Whatever came before, a coordinator that cancels the device's task finds it idle and
    online."""
    for _ in range(60):
        if owner.session.over or owner.session.error is not None or owner.session.stopping:
            return
        while owner.jobs:
            owner.jobs.pop(0)()
            owner.check()
        owner.end_training(1 if owner.stop_asked else 2)
        if not owner.connected:
            owner.connect()
        elif not isinstance(owner.session.link, Online):
            owner.hear(encode(Welcome("fuzz", 5.0, 16)))
        elif (task := owner.session.task_id) is not None:
            owner.hear(f'{{"type":"cancel","task":"{task}","code":"round-over"}}')
        elif not owner.jobs:
            break
    assert isinstance(owner.session.link, Online)
    assert isinstance(owner.session.work, Idle)
    assert owner.pending is None
