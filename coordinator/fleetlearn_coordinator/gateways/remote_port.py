"""The run, as the conversations of a gateway see it: a port whose questions go to the engine
process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.messages import Cancel, CheckIn, ComeBack, Held, Question, Reply, Report
from fleetlearn_protocol.messages import Task as GivenTask

from fleetlearn_coordinator.conversation.begun import Announced, BegunUpload
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.port import Admitted, Spool
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.run_there import RunThere


class RunFarAway(Protocol):
    """What a gateway has of the run: engine_link.py."""

    runs: dict[str, RunThere]
    """The runs that the engine process serves, by ``run`` of their messages."""

    def name_of(self, task: str) -> str:
        """Return the run of a task."""

    def ask(self, make: Callable[[int], Any], port: RemotePort) -> Pending[Any]:
        """Ask something of the engine process. ``make``: returns the message, from the question's
        number."""

    def say(self, message: wire.ToEngine) -> None:
        """Say something that is not answered."""

    def left(self, port: RemotePort) -> None:
        """The connection is gone."""


class RemotePort:
    """A ``Port``, of one connection. What it asks and tells has the connection's number."""

    __slots__ = (
        "_elements",
        "_link",
        "_task",
        "address",
        "check_in",
        "connection",
        "held",
        "joined",
        "run",
        "waits",
    )

    def __init__(self, link: RunFarAway, connection: int, address: str, check_in: CheckIn) -> None:
        self._link, self.connection, self.address = link, connection, address
        self.check_in = check_in
        """What the device said of itself."""
        self._task: str | None = None
        """The task that the device has, of a round or an exchange."""
        self.held: Held | None = None
        """The same, if it is a round's."""
        self.joined = False
        """Whether the engine process said that the device may stay."""
        self.run: str | None = None
        """The run that the device serves, or served last, as ``run`` of its messages. None before
        the first."""
        self.waits = False
        """Whether it is the coordinator's turn to act."""
        self._elements: dict[str, dict[str, int]] = {}
        """Task -> name of each part of its report -> its elements."""

    @property
    def device(self) -> str:
        """The device's name."""
        return self.check_in.device

    def heard(self, message: Any, elements: dict[str, int]) -> None:
        """The device is about to be told this."""
        match message:
            case GivenTask():
                self._has(message.task, elements, Held(message.task, message.round))
            case Question():
                self._has(message.task, elements)
            case Cancel():
                self._over(message.task)

    def _has(self, task: str, elements: dict[str, int], held: Held | None = None) -> None:
        self._task, self.held = task, held
        self._elements = {task: elements}

    def _over(self, task: str) -> None:
        if self._task == task:
            self._task = self.held = None

    # As conversations see it

    @property
    def spool(self) -> Spool:
        run = self._run_of(self.run)
        if run is None:
            raise ProtocolError(Code.UNKNOWN_TASK, "the device has no task")
        return run.files

    def _run_of(self, name: str | None) -> RunThere | None:
        return None if name is None else self._link.runs.get(name)

    def elements_of(self, task: str, part: str) -> int:
        return self._elements[task][part]

    def admit(self, check_in: CheckIn) -> Pending[Admitted | ComeBack]:
        return self._link.ask(
            lambda number: wire.AskAdmission(number, self.connection, self.address, check_in), self
        )

    def join(self, check_in: CheckIn, now: float) -> None:
        """The engine process knows: it let the device join with the answer of ``admit``."""

    def leave(self, device: str, now: float) -> None:
        self._link.left(self)

    def announce(self, device: str, report: Report, now: float) -> Pending[Announced]:
        return self._link.ask(
            lambda number: wire.AskAnnounce(number, self.connection, device, report), self
        )

    def announced(self, report: Report, answer: wire.Announcement) -> None:
        """The engine process answered what was announced."""
        if answer.wanted:
            self._has(report.task, answer.elements, Held(report.task, report.round))

    def weigh(self, device: str, task: str, now: float) -> Pending[float | None]:
        return self._link.ask(
            lambda number: wire.AskFactor(number, self.connection, device, task), self
        )

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> Pending[None]:
        return self._link.ask(
            lambda number: wire.AskSave(number, device, report, spool, dict(largest)), self
        )

    def saved(self, task: str) -> None:
        """The engine process has the update, or the answer, of this task."""
        self._over(task)

    def count_report(self, device: str, task: str, now: float) -> None:
        """The engine process counted the report when it saved its update."""

    def has_counted(self, device: str, task: str) -> Pending[bool]:
        return self._link.ask(lambda number: wire.AskCounted(number, device, task), self)

    def save_answer(self, device: str, message: Reply) -> Pending[bool]:
        return self._link.ask(lambda number: wire.AskAnswered(number, device, message), self)

    def count_answer(self, device: str, task: str, now: float) -> None:
        """The engine process counted the answer when it saved it."""

    def end_task(
        self, device: str, task: str, cause: str, now: float, text: str | None = None
    ) -> None:
        self._over(task)
        self._link.ask(lambda number: wire.AskEnd(number, device, task, cause, text), self)

    def shown(self, task: str | None, text: str) -> str:
        run = None if task is None else self._run_of(self._link.name_of(task))
        run = run or self._run_of(self.run)
        return text if run is None or run.shown is None else run.shown

    def refused(self, device: str, error: FleetError) -> None:
        self._link.say(wire.DeviceRefused(self.connection, error.code, error.text))

    def steps_done(self, device: str, task: str | None, steps: int, now: float) -> None:
        self._link.say(wire.StepsOf(self.connection, task, steps))

    def received(self, device: str, task: str, end: int, size: int, now: float) -> None:
        self._link.say(wire.BytesIn(self.connection, task, end, size))

    def sent(self, device: str, sha256: str, end: int, size: int, now: float) -> None:
        self._link.say(wire.BytesOut(self.connection, sha256, end, size))

    def wait(self, device: str, now: float) -> bool:
        self.waits = True
        self._link.say(wire.TurnOfEngine(self.connection, True))
        return self._task is not None

    def proceed(self, device: str, now: float) -> None:
        if self.waits:
            self.waits = False
            self._link.say(wire.TurnOfEngine(self.connection, False))

    def find(self, sha256: str, offset: int) -> int:
        run = self._run_of(self.run)
        if run is None:
            raise ProtocolError(
                Code.UNKNOWN_CONTENT, f"nothing with SHA-256 {sha256} is served to this device now"
            )
        return run.contents.find(sha256, offset).size

    def keep_upload(self, device: str, begun: BegunUpload) -> None:
        self._link.ask(lambda number: wire.AskKeep(number, begun), self)
