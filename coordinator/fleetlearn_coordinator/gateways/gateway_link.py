"""The engine process's end of the bus to one gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.messages import (
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
from fleetlearn_coordinator.network.gate import Gate
from fleetlearn_coordinator.network.host import SOFTWARE, admit_to_runs, spread
from fleetlearn_coordinator.network.output_gate import OutputGate, OutputOrder
from fleetlearn_coordinator.network.peer_log import logger, say_seldom
from fleetlearn_coordinator.network.several.turns import Turns
from fleetlearn_coordinator.storage.errors import StoreError

Handlers: TypeAlias = "Mapping[type, Callable[[GatewayLink, Any], None]]"
"""Type of a message -> what it leads to."""
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

    def __init__(
        self, host: RunsOfGateways, bus: Bus, handlers: Handlers, known: KnownAs | None = None
    ) -> None:
        """``handlers``: what messages lead to (gateway_messages.py). ``known``: of a gateway on
        another machine. None: it is on this one."""
        self.host, self._bus, self._handlers, self.known = host, bus, handlers, known
        self.name = "" if known is None else known.name
        self.loop = asyncio.get_running_loop()
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
        for run in self.host.runs.values():
            gate = run.served.gate
            # now: until the batch goes, the run may have failed, or be served here no more
            if not gate.is_open and self._waits_for.get(gate) != gate.begun:
                self._waits_for[gate] = gate.begun
                self._order.do(nothing, gate)
        self._out.append(message)
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def tell(self, device: RemoteDevice, message: FromCoordinator) -> None:
        """Have the gateway send this to the device."""
        elements: dict[str, int] = {}
        if isinstance(message, Task | Question):
            parts = message.parts if isinstance(message, Task) else {UPDATE: FLOAT32.name}
            run = self.host.run_of(message.task)
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
        if self.number >= 0 and not self.host.ended:
            logger.warning("%s is gone: %s", self._who, why)
        self.host.lost(self)

    def received(self, batch: bytes) -> None:
        if self.host.ended or self._is_refused:
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
            if not self.do(message, partial(self._handle, message)):
                return
        self.host.grant()

    def do(self, message: wire.ToEngine, act: Callable[[], None]) -> bool:
        """Do what a message leads to. Returns whether more may be done for this gateway."""
        try:
            act()
        except Exception as error:
            if self._is_its_own_fault(error):
                logger.exception("%s: its bus ends", self._who)
                self.refuse_gateway(f"its messages cannot be handled: {in_words(error)}")
                return False
            self.host.failed(error, self.run_of(message))
        return not self.host.ended and not self._is_refused

    @property
    def _who(self) -> str:
        """The gateway, for people."""
        return f"gateway {self.name or self.number}"

    def _is_its_own_fault(self, error: Exception) -> bool:
        """Return whether a gateway on another machine said what no gateway of ours says: that must
        not end the run of all others. What the run's storage refuses is not the gateway's fault."""
        return self.known is not None and not isinstance(error, StoreError | OSError)

    def refuse_gateway(self, why: str) -> None:
        """Tell the gateway why it is not let in, or not any more, and end its bus."""
        self._is_refused = True
        say_seldom(f"{self._who} was refused", why, logging.ERROR)
        self.say(wire.GatewayRefused(why))
        self.close()
        self.host.lost(self)

    def run_of(self, message: Any) -> str | None:
        """Return which run a message is about; None: of several, this cannot be said."""
        if self.host.turns is None:
            return ""
        task = next((found for one in TASKS if (found := one(message)) is not None), None)
        run = None if task is None else self.host.run_of(task)
        return None if run is None else run.name

    def _handle(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.GatewayHello):
            self._hello(message)
        else:
            self._handlers[type(message)](self, message)

    def _hello(self, hello: wire.GatewayHello) -> None:
        agreed = agreed_wire(hello.wire, hello.oldest)
        if agreed is None:
            name = f"gateway {hello.gateway} ({hello.software}, process {hello.process})"
            self.refuse_gateway(why_refused(name, SOFTWARE, hello.wire, hello.oldest))
            return
        if (known := self.known) is not None and (hello.gateway, hello.apart) != (
            known.number, True
        ):  # fmt: skip
            self.refuse_gateway(
                f"it says that it is gateway {hello.gateway}, and the bus knows it as gateway "
                f"{known.number}, {known.name}, on another machine"
            )
            return
        self.wire = agreed
        self.number, self.process, self.apart = hello.gateway, hello.process, hello.apart
        self.region = hello.region
        self.host.said_hello(self, hello)
        logger.info(
            "gateway %d (process %d) is there, with %d devices",
            self.number,
            self.process,
            len(hello.devices),
        )
        for ended in hello.ended:
            self._handle(ended)
        for present in hello.devices:
            device = RemoteDevice(
                self, present.connection, present.check_in.device, present.address
            )
            answer = self.admit(device, present.check_in)
            if isinstance(answer, ComeBack):
                self.say(wire.TellDevice(present.connection, answer, {}))
                continue
            self.host.joined(device, present.check_in)
            if present.waits:
                device.port.wait(device.name, self.loop.time())

    def admit(self, device: RemoteDevice, check_in: CheckIn) -> Admitted | ComeBack:
        host = self.host
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

    @property
    def is_gone(self) -> bool:
        return self._is_over or self._is_refused or self.host.ended


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
