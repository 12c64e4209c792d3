"""A gateway's end of the bus: what its conversations ask of the engine process, and what that tells
its devices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Container
from functools import partial
from typing import Any, NamedTuple, Protocol

from fleetlearn_protocol.errors import FleetError, ProtocolError, in_words
from fleetlearn_protocol.messages import CheckIn, ComeBack
from msgspec import DecodeError
from msgspec.structs import replace

from fleetlearn_coordinator.conversation.begun import Announced
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.port import Admitted, Spool
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.bus import Bus
from fleetlearn_coordinator.gateways.outbox import GatewayOutbox
from fleetlearn_coordinator.gateways.remote_port import RemotePort
from fleetlearn_coordinator.gateways.remote_spool import RemoteSpool
from fleetlearn_coordinator.gateways.run_there import RunThere
from fleetlearn_coordinator.gateways.wire_version import OLDEST, WIRE
from fleetlearn_coordinator.network.driver import ConnectionDriver, ServedRun
from fleetlearn_coordinator.network.host import SOFTWARE, spread
from fleetlearn_coordinator.network.output_gate import OutputGate
from fleetlearn_coordinator.network.peer_log import logger, say_seldom
from fleetlearn_coordinator.network.transfers.elsewhere import Elsewhere
from fleetlearn_coordinator.rounds.participation_limits import PrivacyLimitError

ADMISSION_PATIENCE = 20.0
"""Seconds that a device waits for its welcome while the engine process is away. Then it is told to
come back later: devices give up after 30 s or so."""
ENGINE_SILENT = 15.0
"""Seconds without a word of the engine process, which speaks once a second, after which it counts
as away: newcomers are told to come back later at once."""
MOST_WAITING = 2**16
"""Messages, or questions without an answer, that wait for the engine process. Above, nothing is
read from devices until half of them are through."""
AWAY = 3.0
"""Seconds without the engine process after which people are told: where the service ends, that ends
first, and this gateway soon after it."""


class GatewayConnections(Protocol):
    """The connections of the gateway: gateway_host.py."""

    address: str
    region: str | None
    """Of its devices. None: it has none."""
    connections: set[ConnectionDriver]
    devices: dict[str, ConnectionDriver]

    def replace(self, driver: ConnectionDriver, address: str) -> None:
        """The device has connected again, from this address."""

    def drop_uploads(self, spool: Spool, files: Collection[int] | None = None) -> None:
        """These files of this spool, or all of them, are others' now."""

    def forget_uploads(self, spool: Spool, unless: Container[str]) -> None:
        """The tasks of this spool are over, except those named by ``unless``."""

    def allow_page(self, port: int) -> None:
        """The coordinator's own page is served on this port: it may connect."""

    def grant(self) -> None:
        """Let uploads begin, as many as there is room for."""

    def elsewhere_of(self, run: RunThere) -> Elsewhere:
        """Return where devices can fetch the run's contents by HTTP."""

    def hold_devices(self) -> None:
        """Read nothing from devices for now."""

    def release_devices(self) -> None:
        """Read from devices again."""


class OpenQuestion(NamedTuple):
    """A question that is not answered yet."""

    message: Any
    pending: Pending[Any]
    port: RemotePort
    at: float
    """When it was asked, on the event loop's clock."""


class EngineLink:
    """What a gateway has of the engine process. A ``BusUser``, of one bus after another: where one
    is lost the gateway's devices stay, questions wait, and all that counts is said again on the
    next one."""

    def __init__(self, host: GatewayConnections, gateway: int, process: int) -> None:
        self._host, self._gateway, self._process = host, gateway, process
        self._loop = asyncio.get_running_loop()
        self.runs: dict[str, RunThere] = {}
        """The runs that the engine process serves, by ``run`` of their messages. Empty at first."""
        self.several = False
        """Whether it serves several."""
        self._gate = OutputGate()
        """Open: what a device is told was stored before it came over the bus."""
        self.is_set_up = asyncio.Event()
        """Set while the engine process knows this gateway."""
        self.over = asyncio.Event()
        """Set while there is no bus."""
        self.over.set()
        self.apart = False
        """Whether this gateway is on another machine: distant_link.py."""
        self.refused = False
        """Whether the engine process refused this gateway on the newest bus: they are of releases
        that cannot work together."""
        self._bus: Bus | None = None
        self._heard = self._loop.time()
        """When the engine process last said something, or the bus was there."""
        self._away_since: float | None = self._heard
        """Since when the engine process says nothing. None: it is there."""
        self._swept = self._heard
        """When ``sweep`` looked last."""
        self._holding = False
        """Too much waits for the engine process: nothing is read from devices."""
        self._failures: dict[str, wire.GatewayFailed] = {}
        """Run -> the first error of this gateway that must end it. Each engine process is told."""
        self._warning: asyncio.TimerHandle | None = None
        """Tells people that the engine process is away."""
        self._out = GatewayOutbox()
        self._flushing = False
        self._questions: dict[int, OpenQuestion] = {}
        """The order is the order in which they were asked."""
        self._question = self._connection = 0
        self._given_up: dict[int, RemotePort] = {}
        """Number of a question -> the port of a device that was told to come back later."""
        self._ports: dict[int, RemotePort] = {}
        """Number of a connection -> its port, once the device asked to check in."""

    # What the gateway's conversations ask and say

    def new_port(self, address: str, check_in: CheckIn) -> RemotePort:
        """Return the port of a connection that asks to check in."""
        self._connection += 1
        port = RemotePort(self, self._connection, address, check_in)
        self._ports[port.connection] = port
        return port

    def ask(self, make: Callable[[int], Any], port: RemotePort) -> Pending[Any]:
        """Ask something of the engine process, now or when it is back. ``make``: returns the
        message, from the question's number."""
        self._question += 1
        message, pending = make(self._question), Pending[Any]()
        self._questions[self._question] = OpenQuestion(message, pending, port, self._loop.time())
        self.say(message)
        return pending

    def say(self, message: wire.ToEngine) -> None:
        """Say something that is not answered. Where there is no bus it is dropped: what counts of
        it is in the next hello."""
        if self._bus is not None:
            self._out.add(message)
            self._flush_soon()
        self._look_at_bound()

    def _look_at_bound(self) -> None:
        """Read nothing from devices while too much of what they said waits."""
        waiting = max(len(self._out), len(self._questions))
        if waiting > MOST_WAITING and not self._holding:
            self._holding = True
            logger.warning("%d messages wait for the engine process: devices wait, too", waiting)
            self._host.hold_devices()
        elif waiting <= MOST_WAITING // 2 and self._holding:
            self._holding = False
            self._host.release_devices()

    def is_away(self) -> bool:
        """Return whether the engine process was away for so long that nobody should wait for it who
        is not connected yet."""
        since = self._away_since
        return since is not None and self._loop.time() - since > ENGINE_SILENT

    def _say_soon(self, message: wire.PartialSumMade) -> None:
        """Say this, from another thread."""
        self._loop.call_soon_threadsafe(self.say, message)

    def left(self, port: RemotePort) -> None:
        """The connection is gone."""
        self._ports.pop(port.connection, None)
        self.say(wire.DeviceGone(port.connection))

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._bus is not None and self._out and not self._bus.full:
            self._bus.send(wire.encode_batch(self._out.take()))
            self._look_at_bound()

    def writable(self) -> None:
        self._flush()

    # The bus

    def speak_on(self, bus: Bus) -> EngineLink:
        """Speak on this bus from now on, beginning with a hello. Returns self."""
        self._bus = bus
        self.refused = False
        self._heard = self._loop.time()
        self.warn_no_more()
        self.over.clear()
        self._out.take()
        self._given_up.clear()  # the engine process does not know their connections
        drivers = self._host.devices.values()
        present = [port for port in map(port_of, drivers) if port is not None]
        asked = [each.message for each in self._questions.values()]
        self._ports = {port.connection: port for port in present}
        self._ports |= {
            each.port.connection: each.port
            for each in self._questions.values()
            if isinstance(each.message, wire.AskAdmission)
        }
        saves = [each for each in asked if isinstance(each, wire.AskSave)]
        begun = [each.begun for each in asked if isinstance(each, wire.AskKeep)]
        given = {(self.name_of(each.report.task), each.file) for each in saves}
        given |= {(self.name_of(each.task), each.spool_file) for each in begun}
        held = [file for run in self.runs.values() for file in run.held()]
        self._out.add(
            wire.GatewayHello(
                self._gateway,
                self._process,
                SOFTWARE,
                self._host.address,
                tuple(file for file in held if (file.run, file.number) not in given),
                tuple(file for file in held if (file.run, file.number) in given),
                tuple(each for each in asked if isinstance(each, wire.AskEnd)),
                tuple(
                    wire.PresentDevice(
                        port.connection,
                        replace(port.check_in, held=port.held),
                        port.address,
                        port.waits,
                    )
                    for port in present
                ),
                WIRE,
                OLDEST,
                self.apart,
                self._host.region,
            )
        )
        for message in asked:
            if not isinstance(message, wire.AskEnd):
                self._out.add(message)
        for failure in self._failures.values():
            self._out.add(failure)
        self._flush()
        return self

    def lost(self, why: str) -> None:
        if self._bus is None:
            return
        self._bus = None
        self._away_since = self._away_since or self._loop.time()
        self.is_set_up.clear()
        self.over.set()
        self._out.take()
        self._look_at_bound()
        self.warn_no_more()
        text = "the engine process is away (%s): devices stay connected and wait for it"
        self._warning = self._loop.call_later(AWAY, logger.warning, text, why)

    def warn_no_more(self) -> None:
        """The engine process is there, or this gateway ends, too."""
        if self._warning is not None:
            self._warning.cancel()
            self._warning = None

    def close(self) -> None:
        """End the bus, once what was said is carried, and add up nothing more."""
        self.warn_no_more()
        for run in self.runs.values():
            run.sums.close()
        self._flush()
        if self._bus is not None:
            self._bus.close()

    def close_runs(self) -> None:
        """Write nothing any more."""
        for run in self.runs.values():
            run.close()

    def received(self, batch: bytes) -> None:
        self._heard = self._loop.time()
        if self._away_since is not None and self.is_set_up.is_set():
            self._away_since = None
            logger.warning("the engine process speaks again")
        try:
            messages = wire.decode_for_gateway(batch)
        except DecodeError as error:
            logger.error("the engine process speaks another language: %s", error)
            if self._bus is not None:
                self._bus.close()
            return
        self.take(messages)
        self._look_at_bound()
        self._host.grant()

    def take(self, messages: list[wire.ToGateway]) -> None:
        """Do what the engine process says, in order."""
        for message in messages:
            self.do(message)

    def do(self, message: wire.ToGateway) -> None:
        """Do what the engine process says in one message."""
        try:
            self._handle(message)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception, run: str = "") -> None:
        """Something that no device is to blame for: the run must end, at the latest when there is
        an engine process again."""
        expected = isinstance(error, FleetError | OSError)
        text = in_words(error, file=True)
        logger.error("the gateway failed: %s", text, exc_info=None if expected else error)
        self.say(self._failures.setdefault(run, wire.GatewayFailed(text, run)))

    def sweep(self, interval: float) -> None:
        """Look whether the engine process stands still, and send away whoever has waited for a
        welcome for too long. Called each ``interval`` seconds."""
        now, silent = self._loop.time(), ENGINE_SILENT
        since, self._swept = now - self._swept, now
        if since > 1.25 * interval:  # this process stood still itself: that is nobody's silence
            silent += since
        if self._away_since is None and now - self._heard > silent:
            self._away_since = self._heard
            logger.warning(
                "the engine process has said nothing for %.0f s: devices stay connected and wait "
                "for it; newcomers are told to come back later",
                now - self._heard,
            )
        for number, asked in list(self._questions.items()):
            is_late = now - asked.at > ADMISSION_PATIENCE
            if is_late and isinstance(asked.message, wire.AskAdmission):
                del self._questions[number]
                if self._bus is None:
                    self._ports.pop(asked.port.connection, None)
                else:
                    self._given_up[number] = asked.port
                asked.pending.answer(ComeBack(spread(30.0), "busy"), now)

    # What the engine process says

    def _handle(self, message: wire.ToGateway) -> None:
        match message:
            case wire.Setup():
                self._set_up(message)
            case wire.GatewayRefused(text):
                self.refused = True
                say_seldom("this gateway was refused", text, logging.ERROR)
            case wire.Admission(number, welcome, download, upload):
                self._admitted(number, lambda port: Admitted(port, welcome, download, upload))
            case wire.Dismissal(number, come_back):
                port = self._answer(number, lambda port: come_back)
                port = port or self._given_up.pop(number, None)
                if port is not None:
                    self._ports.pop(port.connection, None)
            case wire.Announcement():
                self._announced(message)
            case wire.Answered(number, value):
                self._answered(number, value)
            case wire.QuestionRefused(number, code, text, is_limit):
                error = PrivacyLimitError(text) if is_limit else ProtocolError(code, text)
                asked = self._questions.pop(number, None)
                if asked is not None:
                    asked.pending.fail(error, self._loop.time())
            case wire.TellDevice(connection, told, elements):
                self._tell(connection, told, elements)
            case wire.ReplaceDevice(connection, address):
                driver = self._driver_of(self._ports.pop(connection, None))
                if driver is not None:
                    self._host.replace(driver, address)
            case wire.PublishContents(newest, older, urls, run):
                self._publish(self.runs[run], newest, older)
                self.runs[run].in_store.say(urls)
            case wire.PublishOlder(sha256, run):
                self.runs[run].publish_older(sha256)
            case wire.LendFiles(files, run):
                self.runs[run].spool.lend(files)
            case wire.TasksOver(run):
                self._host.forget_uploads(self.runs[run].files, unless=self._tasks())
            case wire.PageMayConnect(port_number):
                self._host.allow_page(port_number)
            case wire.BeginSums() | wire.AddToSums() | wire.CollectSums() | wire.ForgetSums():
                self.runs[message.run].sums.do(message)
            case wire.ServesRun():
                self._serves(message)
            case wire.SeveralRuns():
                self._are_several()
            case wire.RunOver(run):
                self._run_over(run)

    def _set_up(self, setup: wire.Setup) -> None:
        run = self.runs.get(setup.run)
        if run is None:
            failed = partial(self.fail, run=setup.run)
            spool = self.new_spool()
            run = RunThere(setup.run, setup.name, spool, self._say_soon, failed)
            self.runs[setup.run] = run
        run.set_up(setup)
        self._host.drop_uploads(run.files, setup.lost)
        if setup.page is not None:
            self._host.allow_page(setup.page)
        self._is_there()

    def new_spool(self) -> RemoteSpool:
        """Return the spool of a run that is served from now on."""
        return RemoteSpool()

    def _are_several(self) -> None:
        self.several = True
        self._is_there()

    def _is_there(self) -> None:
        self._away_since = None
        self.is_set_up.set()

    def _run_over(self, name: str) -> None:
        run = self.runs.pop(name, None)
        self._failures.pop(name, None)
        if run is None:
            return
        self._host.drop_uploads(run.files)
        self._host.forget_uploads(run.files, unless=())
        for gone in run.publish((), ()):
            self._withdraw(gone)
        run.close()

    def name_of(self, task: str) -> str:
        """Return the run of a task, as ``run`` of its messages."""
        return task.partition("-")[0] if self.several else ""

    def _driver_of(self, port: RemotePort | None) -> ConnectionDriver | None:
        """Return the connection with this port; None: it is gone, or was sent away."""
        driver = None if port is None else self._host.devices.get(port.device)
        return driver if driver is not None and port_of(driver) is port else None

    def _serves(self, message: wire.ServesRun) -> None:
        port = self._ports.get(message.connection)
        driver = self._driver_of(port)
        if port is None or driver is None:
            return
        self._give(driver, port, message.run)
        if message.is_first:
            driver.allow_first_task(message.run, message.download, message.upload)

    def _give(self, driver: ConnectionDriver, port: RemotePort, name: str) -> None:
        """From now on the device serves this run."""
        run = self.runs[name]
        port.run = name
        failed = partial(self.fail, run=name)
        elsewhere = self._host.elsewhere_of(run)
        driver.run = ServedRun(port, run.contents, failed, run.title, self._gate, elsewhere)

    def _answer(self, number: int, answer_for: Callable[[RemotePort], object]) -> RemotePort | None:
        """Hand on an answer. Returns the port of whoever asked; None: nobody waits for it."""
        asked = self._questions.pop(number, None)
        if asked is None:
            return None
        asked.pending.answer(answer_for(asked.port), self._loop.time())
        return asked.port

    def _admitted(self, number: int, answer_for: Callable[[RemotePort], object]) -> None:
        port = self._answer(number, answer_for) or self._given_up.pop(number, None)
        if port is None:
            return
        driver = self._driver_of(port)
        if driver is None:  # it is gone, or was sent away
            self.left(port)
        elif not self.several:
            self._give(driver, port, "")

    def _announced(self, message: wire.Announcement) -> None:
        asked = self._questions.pop(message.question, None)
        if asked is None:
            return
        assert isinstance(asked.message, wire.AskAnnounce)
        begun = message.begun
        if begun is not None:
            file = wire.LentFile(begun.spool_file, message.mark)
            if not self.runs[self.name_of(begun.task)].spool.adopt(file):
                begun = None
        asked.port.announced(asked.message.report, message)
        asked.pending.answer(Announced(message.wanted, begun), self._loop.time())

    def _answered(self, number: int, value: bool | float | None) -> None:
        asked = self._questions.pop(number, None)
        if asked is None:
            return
        match asked.message:
            case wire.AskSave(report=report, file=file):
                self._gave(report.task, file)
                asked.port.saved(report.task)
            case wire.AskAnswered(reply=reply):
                asked.port.saved(reply.task)
            case wire.AskKeep(begun=begun):
                self._gave(begun.task, begun.spool_file)
        asked.pending.answer(value, self._loop.time())

    def _gave(self, task: str, file: int) -> None:
        run = self.runs.get(self.name_of(task))
        if run is not None:
            run.spool.gave(file)

    def _tell(self, connection: int, message: Any, elements: dict[str, int]) -> None:
        port = self._ports.get(connection)
        driver = self._driver_of(port)
        if port is not None and driver is not None:
            port.heard(message, elements)
            driver.conversation.tell(message)

    def _tasks(self) -> set[str]:
        """Return the tasks of the connected devices."""
        held = (port.held for port in self._ports.values())
        return {each.task for each in held if each is not None}

    # Contents

    def _publish(self, run: RunThere, newest: tuple[str, ...], older: tuple[str, ...]) -> None:
        for gone in run.publish(newest, older):
            self._withdraw(gone)

    def _withdraw(self, sha256: str) -> None:
        for driver in list(self._host.devices.values()):
            driver.conversation.withdrawn(sha256)


def port_of(driver: ConnectionDriver) -> RemotePort | None:
    """Return the port of a connection whose device has checked in; None: it has not."""
    conversation = driver.conversation
    if conversation.device is None:
        return None
    assert isinstance(conversation.port, RemotePort)
    return conversation.port
