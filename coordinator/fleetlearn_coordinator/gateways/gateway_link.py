"""The engine process's end of the bus to one gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.messages import (
    UPDATE,
    CheckIn,
    ComeBack,
    FromCoordinator,
    Question,
    Report,
    Task,
)
from msgspec import DecodeError

from fleetlearn_coordinator.conversation.begun import BegunUpload
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.port import Admitted
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.bus import Bus
from fleetlearn_coordinator.gateways.gateway_adders import GatewayAdders
from fleetlearn_coordinator.gateways.lent_files import LentFiles
from fleetlearn_coordinator.gateways.wire_version import WIRE, agreed_wire, why_refused
from fleetlearn_coordinator.network.driver import ServedRun
from fleetlearn_coordinator.network.host import SOFTWARE, spread
from fleetlearn_coordinator.network.output_gate import OutputOrder
from fleetlearn_coordinator.network.peer_log import logger, say_seldom
from fleetlearn_coordinator.rounds.participation_limits import PrivacyLimitError

NO_FIGURES = wire.GatewayFigures(0, 0, 0, {}, 0, 0, 0.0, None)


class RunOfGateways(Protocol):
    """The run, and the devices of all its gateways: engine_host.py."""

    run: ServedRun
    files: LentFiles
    adders: GatewayAdders
    devices: dict[str, RemoteDevice]
    ended: bool
    most: int
    """Devices that may be connected."""
    region: str | None
    """As in ``RunHost``."""

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

    def keep(self, number: int, begun: BegunUpload | None = None) -> None:
        """The run has this spool file again, with what is begun there."""

    def drop_checkpoint(self, number: int) -> None:
        """The upload in this spool file is complete."""


@dataclass(slots=True, eq=False)
class RemoteDevice:
    """A device that is connected to a gateway, and has joined the run."""

    link: GatewayLink
    connection: int
    name: str
    address: str


class GatewayLink:
    """A gateway, as the engine process sees it. A ``BusUser``.

    What the run decides is said in batches, one for each turn of the event loop. A batch whose
    promises are not stored yet waits for the run's output gate, and so do those after it.
    """

    def __init__(self, host: RunOfGateways, bus: Bus) -> None:
        self._host, self._bus = host, bus
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
        self._order = OutputOrder(self.close)
        self._is_over = False

    # What the engine process says

    def say(self, message: wire.ToGateway) -> None:
        """Say this, after what was said before."""
        self._out.append(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def tell(self, device: RemoteDevice, message: FromCoordinator) -> None:
        """Have the gateway send this to the device."""
        elements: dict[str, int] = {}
        if isinstance(message, Task | Question):
            parts = message.parts if isinstance(message, Task) else {UPDATE: FLOAT32.name}
            of = self._host.run.port.elements_of
            elements = {part: of(message.task, part) for part in parts}
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
            self._order.do(partial(self._bus.send, batch), self._host.run.gate)

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
            logger.warning("gateway %d is gone: %s", self.number, why)
        self._host.lost(self)

    def received(self, batch: bytes) -> None:
        if self._host.ended:
            return
        self.heard = time.monotonic()
        try:
            messages = wire.decode_for_engine(batch)
        except DecodeError as error:
            logger.error("a gateway speaks another language: %s", error)
            self._bus.close()
            return
        for message in messages:
            try:
                self._handle(message)
            except Exception as error:
                self._host.run.failed(error)
                return
        self._host.grant()

    def _handle(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.GatewayHello):
            self._hello(message)
        elif self.number < 0:
            raise FleetError(Code.OUT_OF_TURN, "a gateway says hello first")
        else:
            HANDLERS[type(message)](self, message)

    def _hello(self, hello: wire.GatewayHello) -> None:
        agreed = agreed_wire(hello.wire, hello.oldest)
        if agreed is None:
            name = f"gateway {hello.gateway} ({hello.software}, process {hello.process})"
            why = why_refused(name, SOFTWARE, hello.wire, hello.oldest)
            say_seldom(f"gateway {hello.gateway} was refused", why, logging.ERROR)
            self.say(wire.GatewayRefused(why))
            self.close()
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
            answer = self._admit(present.check_in)
            if isinstance(answer, ComeBack):
                self.say(wire.TellDevice(present.connection, answer, {}))
                continue
            self._host.joined(device, present.check_in)
            if present.waits:
                self._host.run.port.wait(device.name, self._loop.time())

    def _admit(self, check_in: CheckIn) -> Admitted | ComeBack:
        host = self._host
        host.region = self.region
        answer: Admitted | ComeBack = here(host.run.port.admit(check_in))
        if (
            isinstance(answer, Admitted)
            and check_in.device not in host.devices
            and len(host.devices) >= host.most
        ):
            return ComeBack(spread(30.0), "busy")
        return answer

    def _ask_admission(self, message: wire.AskAdmission) -> None:
        check_in = message.check_in
        answer = self._admit(check_in)
        if isinstance(answer, ComeBack):
            self.say(wire.Dismissal(message.question, answer))
            return
        self.say(wire.Admission(message.question, answer.welcome, answer.download, answer.upload))
        device = RemoteDevice(self, message.connection, check_in.device, message.address)
        self._host.joined(device, check_in)

    def _answer(self, question: int, ask: Callable[[], Any]) -> bool:
        """Answer a question. Returns whether it was not refused."""
        try:
            value = here(ask())
        except ProtocolError as error:
            is_limit = isinstance(error, PrivacyLimitError)
            self.say(wire.QuestionRefused(question, error.code, error.text, is_limit))
            return False
        self.say(wire.Answered(question, value))
        return True

    def _check_current(self, connection: int) -> None:
        """Raise ProtocolError where the device has left this connection meanwhile."""
        if connection not in self.devices:
            raise ProtocolError(Code.NOT_WANTED, "the device has connected again")

    def _announce(self, message: wire.AskAnnounce) -> None:
        port, report = self._host.run.port, message.report
        try:
            self._check_current(message.connection)
            announced = here(port.announce(message.device, report, self._loop.time()))
            elements = self._elements(report) if announced.wanted else {}
        except ProtocolError as error:
            is_limit = isinstance(error, PrivacyLimitError)
            self.say(wire.QuestionRefused(message.question, error.code, error.text, is_limit))
            return
        mark = 0
        begun = announced.begun
        if begun is not None and self.apart:  # those bytes are here: the device may come back
            port.keep_upload(message.device, begun)
            begun = None
        if begun is not None:
            mark = self._host.files.hand_over(self.number, begun.spool_file).mark
        self.say(wire.Announcement(message.question, announced.wanted, elements, begun, mark))

    def _elements(self, report: Report) -> dict[str, int]:
        of = self._host.run.port.elements_of
        return {part.name: of(report.task, part.name) for part in report.parts}

    def _factor(self, message: wire.AskFactor) -> None:
        def weigh() -> Any:
            self._check_current(message.connection)
            return self._host.run.port.weigh(message.device, message.task, self._loop.time())

        self._answer(message.question, weigh)

    def _save(self, message: wire.AskSave) -> None:
        """Save an update and count its report, in one go: nothing comes between. Asked twice, the
        first answer got lost."""
        port, device, task = self._host.run.port, message.device, message.report.task
        if here(port.has_counted(device, task)):
            self.say(wire.Answered(message.question, None))
            if self._host.files.has(self.number, message.file):  # a second copy of the same update
                self._host.files.take_back(message.file)
                self._host.drop_checkpoint(message.file)
                port.spool.free_spool_file(message.file)
            return

        def save() -> None:
            if not self._host.files.has(self.number, message.file):
                raise ProtocolError(
                    Code.STALE_ROUND, "the coordinator was started again, and lost these bytes"
                )
            if not self.apart:
                self._host.adders.stored(self.number, message.file)
            here(port.save_update(device, message.report, message.file, message.largest))

        if self._answer(message.question, save):
            self._host.files.take_back(message.file)
            self._host.drop_checkpoint(message.file)
            port.count_report(device, task, self._loop.time())

    def _counted(self, message: wire.AskCounted) -> None:
        port = self._host.run.port
        self._answer(message.question, lambda: port.has_counted(message.device, message.task))

    def _save_answer(self, message: wire.AskAnswered) -> None:
        port, device, reply = self._host.run.port, message.device, message.reply
        counts = False

        def save() -> None:
            nonlocal counts
            counts = here(port.save_answer(device, reply))

        if self._answer(message.question, save) and counts:
            port.count_answer(device, reply.task, self._loop.time())

    def _end(self, message: wire.AskEnd) -> None:
        now = self._loop.time()
        port, device, task = self._host.run.port, message.device, message.task
        port.end_task(device, task, message.cause, now, message.text)
        self.say(wire.Answered(message.question, None))

    def _keep(self, message: wire.AskKeep) -> None:
        self.say(wire.Answered(message.question, None))
        number = message.begun.spool_file
        if self._host.files.has(self.number, number):
            self._host.files.take_back(number)
            self._host.keep(number, message.begun)

    def _gone(self, message: wire.DeviceGone) -> None:
        device = self.devices.get(message.connection)
        if device is not None:
            self._host.gone(device)

    def _refused(self, message: wire.DeviceRefused) -> None:
        device = self.devices.get(message.connection)
        if device is not None:
            error = FleetError(message.code, message.text)
            self._host.run.port.refused(device.name, error)

    def _steps(self, message: wire.StepsOf) -> None:
        device = self.devices.get(message.connection)
        if device is not None:
            self._host.run.port.steps_done(
                device.name, message.task, message.steps, self._loop.time()
            )

    def _bytes_in(self, message: wire.BytesIn) -> None:
        device = self.devices.get(message.connection)
        self.bytes_up += message.size
        if device is not None:
            now = self._loop.time()
            self._host.run.port.received(device.name, message.task, message.end, message.size, now)

    def _bytes_out(self, message: wire.BytesOut) -> None:
        device = self.devices.get(message.connection)
        self.bytes_down += message.size
        if device is not None:
            now = self._loop.time()
            self._host.run.port.sent(device.name, message.sha256, message.end, message.size, now)

    def _turn(self, message: wire.TurnOfEngine) -> None:
        device = self.devices.get(message.connection)
        if device is None:
            return
        port = self._host.run.port
        act = port.wait if message.waits else port.proceed
        act(device.name, self._loop.time())

    def _note_figures(self, message: wire.GatewayFigures) -> None:
        self.figures = message

    def _partial_sum(self, message: wire.PartialSumMade) -> None:
        self._host.adders.made(message)

    def _failed(self, message: wire.GatewayFailed) -> None:
        self._host.run.failed(FleetError(Code.BUSY, f"gateway {self.number}: {message.text}"))


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
}
"""What each message of a gateway that has said hello leads to."""


def here(answer: Any) -> Any:
    """Return the answer of a run in this process, which comes at once."""
    assert not isinstance(answer, Pending)
    return answer
