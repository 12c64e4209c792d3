"""The engine process's end of the bus to one gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError, in_words
from fleetlearn_protocol.messages import (
    ROWS,
    UPDATE,
    CheckIn,
    ComeBack,
    FromCoordinator,
    Question,
    Task,
)
from fleetlearn_protocol.sparse_rows import with_row_elements
from msgspec import DecodeError

from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.port import Admitted, Port, RunPort
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.bus import Bus
from fleetlearn_coordinator.gateways.run_behind import RunBehind
from fleetlearn_coordinator.gateways.wire_version import WIRE, agreed_wire, why_refused
from fleetlearn_coordinator.network.driver import ServedRun
from fleetlearn_coordinator.network.gate import Gate, Offered, RefusalError
from fleetlearn_coordinator.network.host import SOFTWARE, admit_to_runs, spread
from fleetlearn_coordinator.network.output_gate import OutputGate, OutputOrder
from fleetlearn_coordinator.network.peer_log import logger, say_seldom
from fleetlearn_coordinator.network.several.turns import Turns
from fleetlearn_coordinator.rounds.participation_limits import PrivacyLimitError
from fleetlearn_coordinator.storage.arrived import arrived_key
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.identities import SecretHash
from fleetlearn_coordinator.storage.lent_spool import ArrivedSpool

LOOK_AGAIN = 1.0
"""Seconds until an object is looked for again, where the object store cannot be reached."""
NO_FIGURES = wire.GatewayFigures(0, 0, 0, {}, 0, 0, 0.0, None)


class RunsOfGateways(Protocol):
    """The runs, and the devices of all gateways: engine_host.py."""

    heartbeat: float
    runs: dict[str, RunBehind]
    """The runs that are served, by ``run`` of their messages."""
    turns: Turns | None
    """Which of several runs each device serves. None: there is one run."""
    devices: dict[str, RemoteDevice]
    ended: bool
    gate: Gate | None
    """Who may connect, where devices have to be enrolled."""
    most: int
    """Devices that may be connected."""
    asks: tuple[str, str | None]
    """The device that asked last to be admitted, and the region of its gateway."""

    def count_check_in(self, device: str) -> None:
        """Count a check-in at a gateway on another machine. Raises RefusalError: too many."""

    def said_hello(self, link: GatewayLink, hello: wire.GatewayHello) -> None:
        """A gateway is there, or is there again."""

    def lost(self, link: GatewayLink) -> None:
        """A gateway is gone."""

    def joined(self, device: RemoteDevice, check_in: CheckIn) -> None:
        """The device may stay: it joins the run."""

    def gone(self, device: RemoteDevice) -> None:
        """The device's connection is gone."""

    def grant(self) -> None:
        """Lend gateways the spool files that they lack."""

    def run_of(self, task: str) -> RunBehind | None:
        """Return the run of a task, if it is served here."""

    def failed(self, error: Exception, run: str | None) -> None:
        """End this run, or the whole host (None), by an error that no device caused."""


class KnownAs(NamedTuple):
    """What the bus knows of a gateway on another machine, whatever the gateway says of itself."""

    number: int
    name: str


@dataclass(slots=True, eq=False)
class RemoteDevice:
    """A device that is connected to a gateway, and has joined the run. A ``ServingConnection``,
    where there are several."""

    link: GatewayLink
    connection: int
    name: str
    address: str
    port: Port = field(init=False)
    """The run, or the one that the device serves, of several. Set once the device is admitted."""
    run: ServedRun | None = None
    """Of several runs, the one that the device serves, or served last."""
    uploading: str | None = None
    """Its gateway knows."""

    def serve(self, run: ServedRun, port: RunPort, *, is_first: bool) -> None:
        self.run = run
        name, download, upload = port.task_prefix, port.download, port.upload
        self.link.say(wire.ServesRun(self.connection, name, is_first, download, upload))


class GatewayLink:
    """A gateway, as the engine process sees it. A ``BusUser``.

    What the run decides is said in batches, one for each turn of the event loop. A batch whose
    promises are not stored yet waits for the run's output gate, and so do those after it.
    """

    def __init__(self, host: RunsOfGateways, bus: Bus, known: KnownAs | None = None) -> None:
        """``known``: of a gateway on another machine. None: it is on this one."""
        self._host, self._bus, self._known = host, bus, known
        self.name = "" if known is None else known.name
        self._loop = asyncio.get_running_loop()
        self.number = -1
        self.process = 0
        self.apart = False
        """Whether the gateway is on another machine."""
        self.wire = WIRE
        """The version that is spoken on this bus."""
        self.region: str | None = None
        """Of its devices, where a plan has regions. None: it has none."""
        self.devices: dict[int, RemoteDevice] = {}
        """Number of a connection -> its device, which has joined."""
        self.figures = NO_FIGURES
        self.bytes_up = self.bytes_down = 0
        self.heard = time.monotonic()
        """When the gateway last said something."""
        self._out: list[wire.ToGateway] = []
        self._flushing = False
        self._order = OutputOrder(self._cut)
        self._waits_for: dict[OutputGate, int] = {}
        """What was said since the last batch waits for these, and for how many of their batches."""
        self._is_cut = self._is_over = self._is_refused = False

    # What the engine process says

    def say(self, message: wire.ToGateway) -> None:
        """Say this, after what was said before."""
        if self._is_cut:
            return
        for run in self._host.runs.values():
            gate = run.served.gate
            # now: until the batch goes, the run may have failed, or be served here no more
            if not gate.is_open and self._waits_for.get(gate) != gate.begun:
                self._waits_for[gate] = gate.begun
                self._order.do(nothing, gate)
        self._out.append(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def tell(self, device: RemoteDevice, message: FromCoordinator) -> None:
        """Have the gateway send this to the device."""
        elements: dict[str, int] = {}
        if isinstance(message, Task | Question):
            parts = message.parts if isinstance(message, Task) else {UPDATE: FLOAT32.name}
            run = self._host.run_of(message.task)
            if run is not None:
                of = run.port.elements_of
                elements = {part: of(message.task, part) for part in with_row_elements(parts)}
        self.say(wire.TellDevice(device.connection, message, elements))

    def say_alive(self) -> None:
        """Say that this process does not stand still. That promises nothing, so that it waits for
        no store."""
        batch: list[wire.ToGateway] = [wire.EngineAlive()]
        self._bus.send(wire.encode_batch(batch))

    def _flush(self) -> None:
        self._flushing = False
        if self._out:
            batch = wire.encode_batch(self._out)
            self._out = []
            self._waits_for.clear()
            self._order.do(partial(self._bus.send, batch), None)

    def _cut(self) -> None:
        """What was said is lost with its run: the gateway says hello again, and asks again."""
        self._is_cut = True
        self._out.clear()
        self._bus.close()

    def writable(self) -> None:
        """Nothing waits here: all that was said is with the bus."""

    def close(self) -> None:
        """End the bus, once what was said is carried."""
        self._flush()
        self._bus.close()

    # What the gateway says

    def lost(self, why: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self.number >= 0 and not self._host.ended:
            logger.warning("%s is gone: %s", self._who, why)
        self._host.lost(self)

    def received(self, batch: bytes) -> None:
        if self._host.ended or self._is_refused:
            return
        self.heard = time.monotonic()
        try:
            messages = wire.decode_for_engine(batch)
        except DecodeError as error:
            logger.error("a gateway speaks another language: %s", error)
            self._bus.close()
            return
        for message in messages:
            if self.number < 0 and not isinstance(message, wire.GatewayHello):
                if message is messages[0]:  # else it is behind a hello that was refused
                    logger.error("a gateway did not say hello first: its bus ends")
                self._bus.close()
                return
            if not self._do(message, partial(self._handle, message)):
                return
        self._host.grant()

    def _do(self, message: wire.ToEngine, act: Callable[[], None]) -> bool:
        """Do what a message leads to. Returns whether more may be done for this gateway."""
        try:
            act()
        except Exception as error:
            if self._is_its_own_fault(error):
                logger.exception("%s: its bus ends", self._who)
                self._refuse_gateway(f"its messages cannot be handled: {in_words(error)}")
                return False
            self._host.failed(error, self._run_of(message))
        return not self._host.ended and not self._is_refused

    @property
    def _who(self) -> str:
        """The gateway, for people."""
        return f"gateway {self.name or self.number}"

    def _is_its_own_fault(self, error: Exception) -> bool:
        """Return whether a gateway on another machine said what no gateway of ours says: that must
        not end the run of all others. What the run's storage refuses is not the gateway's fault."""
        return self._known is not None and not isinstance(error, StoreError | OSError)

    def _refuse_gateway(self, why: str) -> None:
        """Tell the gateway why it is not let in, or not any more, and end its bus."""
        self._is_refused = True
        say_seldom(f"{self._who} was refused", why, logging.ERROR)
        self.say(wire.GatewayRefused(why))
        self.close()
        self._host.lost(self)

    def _run_of(self, message: Any) -> str | None:
        """Return which run a message is about; None: of several, this cannot be said."""
        if self._host.turns is None:
            return ""
        task = next((found for one in TASKS if (found := one(message)) is not None), None)
        run = None if task is None else self._host.run_of(task)
        return None if run is None else run.name

    def _handle(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.GatewayHello):
            self._hello(message)
        else:
            HANDLERS[type(message)](self, message)

    def _hello(self, hello: wire.GatewayHello) -> None:
        agreed = agreed_wire(hello.wire, hello.oldest)
        if agreed is None:
            name = f"gateway {hello.gateway} ({hello.software}, process {hello.process})"
            self._refuse_gateway(why_refused(name, SOFTWARE, hello.wire, hello.oldest))
            return
        if (known := self._known) is not None and (hello.gateway, hello.apart) != (
            known.number, True
        ):  # fmt: skip
            self._refuse_gateway(
                f"it says that it is gateway {hello.gateway}, and the bus knows it as gateway "
                f"{known.number}, {known.name}, on another machine"
            )
            return
        self.wire = agreed
        self.number, self.process, self.apart = hello.gateway, hello.process, hello.apart
        self.region = hello.region
        self._host.said_hello(self, hello)
        logger.info(
            "gateway %d (process %d) is there, with %d devices",
            self.number,
            self.process,
            len(hello.devices),
        )
        for ended in hello.ended:
            self._end(ended)
        for present in hello.devices:
            device = RemoteDevice(
                self, present.connection, present.check_in.device, present.address
            )
            answer = self._admit(device, present.check_in)
            if isinstance(answer, ComeBack):
                self.say(wire.TellDevice(present.connection, answer, {}))
                continue
            self._host.joined(device, present.check_in)
            if present.waits:
                device.port.wait(device.name, self._loop.time())

    def _admit(self, device: RemoteDevice, check_in: CheckIn) -> Admitted | ComeBack:
        host = self._host
        host.asks = check_in.device, self.region
        answer: Admitted | ComeBack
        if host.turns is not None:
            answer = admit_to_runs(host.turns, device, check_in, host.heartbeat)
        else:
            answer = here(host.runs[""].port.admit(check_in))
        if isinstance(answer, Admitted):
            device.port = answer.port
        if (
            isinstance(answer, Admitted)
            and check_in.device not in host.devices
            and len(host.devices) >= host.most
        ):
            return ComeBack(spread(30.0), "busy")
        return answer

    def _ask_admission(self, message: wire.AskAdmission) -> None:
        check_in = message.check_in
        device = RemoteDevice(self, message.connection, check_in.device, message.address)
        answer = self._admit(device, check_in)
        if isinstance(answer, ComeBack):
            self.say(wire.Dismissal(message.question, answer))
            return
        self.say(wire.Admission(message.question, answer.welcome, answer.download, answer.upload))
        self._host.joined(device, check_in)

    def _answer(self, message: Any, ask: Callable[[], Any]) -> bool:
        """Answer a question. Returns whether it was not refused. An error of one of several runs,
        which no device caused, ends the run, and for the device its task."""
        try:
            value = here(ask())
        except ProtocolError as error:
            self._refuse(message.question, error)
            return False
        except Exception as error:
            if self._host.turns is None:
                raise
            self._host.failed(error, self._run_of(message))
            text = "the task's run was stopped by an error of its coordinator"
            self._refuse(message.question, ProtocolError(Code.STALE_ROUND, text))
            return False
        self.say(wire.Answered(message.question, value))
        return True

    def _refuse(self, question: int, error: ProtocolError) -> None:
        is_limit = isinstance(error, PrivacyLimitError)
        self.say(wire.QuestionRefused(question, error.code, error.text, is_limit))

    def _current(self, connection: int) -> RemoteDevice:
        """Return the device of this connection. Raises ProtocolError where it has left
        meanwhile."""
        device = self.devices.get(connection)
        if device is None:
            raise ProtocolError(Code.NOT_WANTED, "the device has connected again")
        return device

    def _served(self, task: str) -> RunBehind:
        """Return the run of a task. Raises ProtocolError where it is not served here."""
        run = self._host.run_of(task)
        if run is None:
            raise ProtocolError(Code.STALE_ROUND, f"the run of task {task} is not served here now")
        return run

    def _announce(self, message: wire.AskAnnounce) -> None:
        report, elements = message.report, {}
        try:
            port = self._current(message.connection).port
            announced = here(port.announce(message.device, report, self._loop.time()))
            run = self._served(report.task)
            if announced.wanted:
                names = [part.name for part in report.parts]
                of = run.port.elements_of
                elements = {name: of(report.task, name) for name in with_row_elements(names)}
        except ProtocolError as error:
            self._refuse(message.question, error)
            return
        mark = 0
        begun = announced.begun
        if begun is not None and self.apart:  # those bytes are here: the device may come back
            port.keep_upload(message.device, begun)
            begun = None
        if begun is not None:
            mark = run.files.hand_over(self.number, begun.spool_file).mark
        self.say(wire.Announcement(message.question, announced.wanted, elements, begun, mark))

    def _factor(self, message: wire.AskFactor) -> None:
        def weigh() -> Any:
            port = self._current(message.connection).port
            return port.weigh(message.device, message.task, self._loop.time())

        self._answer(message, weigh)

    def _save(self, message: wire.AskSave) -> None:
        """Save an update. First see to it that it is there, where it did not come to this machine:
        the run could not go on without an update that it has accepted."""
        run = self._host.run_of(message.report.task)
        if not self.apart or run is None or not run.files.has(self.number, message.file):
            self._save_here(message)
            return
        assert isinstance(run.spool, ArrivedSpool)
        report = message.report
        fetch = any(part.name == ROWS for part in report.parts)  # they are read before it counts
        look = partial(run.spool.has_arrived, message.file, report.size, fetch=fetch)
        job = self._loop.run_in_executor(None, look)
        job.add_done_callback(partial(self._looked_for, message))

    def _looked_for(self, message: wire.AskSave, job: asyncio.Future[bool]) -> None:
        if job.cancelled() or self._is_gone:
            return  # a gateway that says hello again puts it again
        if isinstance(job.exception(), StoreUnavailableError):
            self._loop.call_later(LOOK_AGAIN, self._look_again, message)
            return

        def save() -> None:
            if job.result():
                self._save_here(message)
                return
            self._refuse_gateway(
                f"it says that it put an update of {message.report.size} bytes into the object "
                f"store, and the run's has no such object {arrived_key(message.file)}. If its "
                "service file has blobs, they must be the place of the engine process's blobs"
            )

        if self._do(message, save):
            self._host.grant()

    def _look_again(self, message: wire.AskSave) -> None:
        if not self._is_gone:
            self._do(message, partial(self._save, message))

    @property
    def _is_gone(self) -> bool:
        return self._is_over or self._is_refused or self._host.ended

    def _save_here(self, message: wire.AskSave) -> None:
        """Save an update and count its report, in one go: nothing comes between. Asked twice, the
        first answer got lost."""
        device, task, file = message.device, message.report.task, message.file
        run = self._host.run_of(task)
        if run is not None and here(run.port.has_counted(device, task)):
            self.say(wire.Answered(message.question, None))
            if run.files.has(self.number, file):  # a second copy of the same update
                run.files.take_back(file)
                run.drop_checkpoint(file)
                run.spool.free_spool_file(file)
            return

        def save() -> None:
            run = self._served(task)
            if not run.files.has(self.number, file):
                raise ProtocolError(
                    Code.STALE_ROUND, "the coordinator was started again, and lost these bytes"
                )
            run.stored(self, file)
            here(run.port.save_update(device, message.report, file, message.largest))

        if self._answer(message, save) and run is not None:
            run.files.take_back(file)
            run.drop_checkpoint(file)
            run.port.count_report(device, task, self._loop.time())

    def _counted(self, message: wire.AskCounted) -> None:
        run = self._host.run_of(message.task)
        if run is None:
            self.say(wire.Answered(message.question, False))
            return
        self._answer(message, lambda: run.port.has_counted(message.device, message.task))

    def _save_answer(self, message: wire.AskAnswered) -> None:
        device, reply = message.device, message.reply
        counts = False

        def save() -> None:
            nonlocal counts
            counts = here(self._served(reply.task).port.save_answer(device, reply))

        if self._answer(message, save) and counts:
            self._served(reply.task).port.count_answer(device, reply.task, self._loop.time())

    def _end(self, message: wire.AskEnd) -> None:
        now, run = self._loop.time(), self._host.run_of(message.task)
        self.say(wire.Answered(message.question, None))
        if run is not None:
            run.port.end_task(message.device, message.task, message.cause, now, message.text)

    def _keep(self, message: wire.AskKeep) -> None:
        self.say(wire.Answered(message.question, None))
        number, run = message.begun.spool_file, self._host.run_of(message.begun.task)
        if self.apart:
            raise ProtocolError(
                Code.BAD_MESSAGE, "a gateway on another machine may not keep an upload here"
            )
        if run is not None and run.files.has(self.number, number):
            run.files.take_back(number)
            run.keep(number, message.begun)

    def _gone(self, message: wire.DeviceGone) -> None:
        device = self.devices.get(message.connection)
        if device is not None:
            self._host.gone(device)

    def _refused(self, message: wire.DeviceRefused) -> None:
        device = self.devices.get(message.connection)
        if device is not None:
            device.port.refused(device.name, FleetError(message.code, message.text))

    def _steps(self, message: wire.StepsOf) -> None:
        device = self.devices.get(message.connection)
        if device is not None:
            now = self._loop.time()
            device.port.steps_done(device.name, message.task, message.steps, now)

    def _bytes_in(self, message: wire.BytesIn) -> None:
        device = self.devices.get(message.connection)
        self.bytes_up += message.size
        if device is not None:
            now = self._loop.time()
            device.port.received(device.name, message.task, message.end, message.size, now)

    def _bytes_out(self, message: wire.BytesOut) -> None:
        device = self.devices.get(message.connection)
        self.bytes_down += message.size
        if device is not None:
            now = self._loop.time()
            device.port.sent(device.name, message.sha256, message.end, message.size, now)

    def _turn(self, message: wire.TurnOfEngine) -> None:
        device = self.devices.get(message.connection)
        if device is not None:
            act = device.port.wait if message.waits else device.port.proceed
            act(device.name, self._loop.time())

    def _note_figures(self, message: wire.GatewayFigures) -> None:
        self.figures = message

    def _partial_sum(self, message: wire.PartialSumMade) -> None:
        run = self._host.runs.get(message.run)
        if run is not None:
            run.sum_made(self, message)

    # Who may connect to a gateway on another machine

    def _ask_known(self, message: wire.AskKnown) -> None:
        gate = self._host.gate
        offered = Offered(
            SecretHash(message.credential),
            message.device,
            SecretHash(message.token),
            SecretHash(message.next),
        )
        try:
            if gate is None:
                raise RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, "nobody has to be known here")
            known = gate.check_offered(offered, message.certified, self._host.count_check_in)
        except RefusalError as refusal:
            self.say(
                wire.DeviceUnknown(message.question, refusal.status, refusal.text, refusal.cause)
            )
        else:
            self.say(wire.DeviceKnown(message.question, known.device, known.tags, known.enrolled))

    def _ask_enrolled(self, message: wire.AskEnrolled) -> None:
        gate = self._host.gate
        enrolled = {} if gate is None else gate.identities.enrolled()
        found = {each: enrolled[each] for each in message.devices if each in enrolled}
        self.say(wire.EnrolledNow(message.devices, found))

    def _failed(self, message: wire.GatewayFailed) -> None:
        if self._known is not None:  # its disk, its network: the others go on
            self._refuse_gateway(f"it has failed: {message.text}")
            return
        error = FleetError(Code.BUSY, f"gateway {self.number}: {message.text}")
        several = self._host.turns is not None
        self._host.failed(error, None if several and not message.run else message.run)


HANDLERS: dict[type, Callable[[GatewayLink, Any], None]] = {
    wire.AskAdmission: GatewayLink._ask_admission,
    wire.AskAnnounce: GatewayLink._announce,
    wire.AskFactor: GatewayLink._factor,
    wire.AskSave: GatewayLink._save,
    wire.AskCounted: GatewayLink._counted,
    wire.AskAnswered: GatewayLink._save_answer,
    wire.AskEnd: GatewayLink._end,
    wire.AskKeep: GatewayLink._keep,
    wire.DeviceGone: GatewayLink._gone,
    wire.DeviceRefused: GatewayLink._refused,
    wire.StepsOf: GatewayLink._steps,
    wire.BytesIn: GatewayLink._bytes_in,
    wire.BytesOut: GatewayLink._bytes_out,
    wire.TurnOfEngine: GatewayLink._turn,
    wire.GatewayFigures: GatewayLink._note_figures,
    wire.GatewayFailed: GatewayLink._failed,
    wire.PartialSumMade: GatewayLink._partial_sum,
    wire.AskKnown: GatewayLink._ask_known,
    wire.AskEnrolled: GatewayLink._ask_enrolled,
}
"""What each message of a gateway that has said hello leads to."""


TASKS: tuple[Callable[[Any], str | None], ...] = (
    lambda message: getattr(message, "task", None),
    lambda message: getattr(getattr(message, "report", None), "task", None),
    lambda message: getattr(getattr(message, "reply", None), "task", None),
    lambda message: getattr(getattr(message, "begun", None), "task", None),
)
"""Where a message of a gateway names its task, if it does."""


def nothing() -> None:
    """Do nothing, in its turn."""


def here(answer: Any) -> Any:
    """Return the answer of a run in this process, which comes at once."""
    assert not isinstance(answer, Pending)
    return answer
