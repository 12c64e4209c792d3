"""The end of the bus of a gateway on another machine. Bytes do not travel on the bus: what devices
fetch comes from the run's object store, and complete updates are put there before the engine
process is asked to save them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.messages import CheckIn, Report

from fleetlearn_coordinator.conversation.begun import Announced, BegunUpload
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.bus import Bus
from fleetlearn_coordinator.gateways.engine_link import (
    EngineLink,
    GatewayConnections,
    OpenQuestion,
)
from fleetlearn_coordinator.gateways.own_spool import OwnSpool
from fleetlearn_coordinator.gateways.remote_gate import RemoteGate
from fleetlearn_coordinator.gateways.remote_port import RemotePort
from fleetlearn_coordinator.gateways.remote_spool import RemoteSpool
from fleetlearn_coordinator.gateways.stored_contents import StoredContents
from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.plan.service_settings import ServiceError
from fleetlearn_coordinator.storage.arrived import PUTS, arrived_key, partial_key
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_coordinator.storage.object_store import Objects
from fleetlearn_coordinator.storage.served_objects import ServedObjects

AT_A_TIME = 8
"""Updates that are put into the store at a time."""
WHOLE = 2**24
"""Bytes of an update that is read as a whole to be put. A longer one is read in parts."""
WHO_MAY_CONNECT = (
    wire.DeviceKnown,
    wire.DeviceUnknown,
    wire.EnrolledNow,
    wire.EnrolmentsChanged,
)
"""What is said to the gate."""
AGAIN = 1.0
"""Seconds until an update is put again, where the store could not be reached."""


REMIND = 30.0
"""Seconds between two warnings that updates wait."""


@dataclass(slots=True, eq=False)
class PendingSave:
    """A complete update in a spool file of this gateway, whose device waits."""

    port: RemotePort
    device: str
    report: Report
    spool_file: int
    largest: dict[str, float]
    pending: Pending[None]


class DistantPort(RemotePort):
    """A ``Port`` of a connection to this gateway."""

    __slots__ = ("_distant",)

    def __init__(self, link: DistantLink, connection: int, address: str, check_in: CheckIn) -> None:
        super().__init__(link, connection, address, check_in)
        self._distant = link

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> Pending[None]:
        saving = PendingSave(self, device, report, spool, {**largest}, Pending())
        self._distant.save(saving)
        return saving.pending

    def keep_upload(self, device: str, begun: BegunUpload) -> None:
        self._distant.own.keep(begun)


class DistantLink(EngineLink):
    """What a gateway on another machine has of the run."""

    def __init__(
        self,
        host: GatewayConnections,
        process: int,
        folder: Path,
        uploads: int,
        objects: str | None,
        gate: RemoteGate,
        *,
        open_to_all: bool,
    ) -> None:
        """``folder``: this gateway's own. ``uploads``: how many arrive at a time at most.
        ``objects``: the URL below which the run's objects are, as this machine reaches it; None: as
        the engine process does. ``gate``: the doorkeeper of this gateway's connections.
        ``open_to_all``: whether devices need not be enrolled, where the engine process knows none.
        Raises OSError."""
        super().__init__(host, -1, process)
        self.own = OwnSpool(folder, uploads)
        self.failure: asyncio.Future[None] = self._loop.create_future()
        """Gets an error that ends this gateway, and no other process."""
        self.apart = True
        self.gate, self._open_to_all = gate, open_to_all
        gate.engine = self
        self._url = objects
        self._sums = folder / "partial_sums"
        self._sums.mkdir(exist_ok=True)
        self._adds_up = False
        """Whether the engine process may have updates added up here."""
        self._names: tuple[str, ...] = ()
        """The bundles' SHA-256."""
        self._objects: Objects
        self._copies = StoredContents(folder)
        self._writers = ThreadPoolExecutor(AT_A_TIME, "objects")
        self._heard_of: deque[wire.ToGateway] = deque()
        """What the engine process said, and is not done yet: it waits for contents."""
        self._fetching: asyncio.Task[None] | None = None
        self._to_save: list[PendingSave] = []
        """They wait for an engine process."""
        self._said_away = -REMIND
        """When people were told that the store cannot be reached."""
        self._saving: dict[int, PendingSave] = {}
        """Number of an object that was put -> what the engine process is asked to save."""
        self._puts = range(0)
        """The numbers of objects that the engine process knows as this gateway's, and that are not
        used yet."""

    def number(self, gateway: int) -> None:
        """This is the gateway's number from now on."""
        self._gateway = gateway

    # The bus

    def speak_on(self, bus: Bus) -> EngineLink:
        # The engine process may be another one, for which those objects are nobody's: they are put
        # again, under other names.
        for number, asked in list(self._questions.items()):
            if isinstance(asked.message, wire.AskSave):
                del self._questions[number]
                self.own.not_saved(asked.message.file)
                self._to_save.append(self._saving.pop(asked.message.file))
        return super().speak_on(bus)

    def lost(self, why: str) -> None:
        self.gate.lost(self._loop.time())
        self._puts = range(0)
        self._heard_of.clear()
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None
        super().lost(why)

    def close(self) -> None:
        super().close()
        if self._fetching is not None:
            self._fetching.cancel()
        self._writers.shutdown(wait=False, cancel_futures=True)

    def new_spool(self) -> RemoteSpool:
        return self.own

    def fail(self, error: Exception, run: str = "") -> None:
        """This gateway cannot go on. The run can: its devices connect to another."""
        if not self.failure.done():
            self.failure.set_exception(error)

    # What the engine process says

    def take(self, messages: list[wire.ToGateway]) -> None:
        for message in messages:
            if isinstance(message, WHO_MAY_CONNECT):  # a revocation waits for no content
                self.do(message)
            else:
                self._heard_of.append(message)
        self._go_on()

    def _go_on(self) -> None:
        """Do what the engine process said, in order, up to what waits for contents."""
        while self._heard_of and self._fetching is None:
            message = self._heard_of.popleft()
            if isinstance(message, wire.Setup | wire.PublishContents | wire.PublishOlder):
                self._fetching = self._loop.create_task(self._fetch_for(message))
            else:
                self.do(message)

    async def _fetch_for(self, message: wire.ToGateway) -> None:
        try:
            match message:
                case wire.Setup():
                    await self._fetch_bundles(message)
                case wire.PublishContents(newest, older):
                    for sha256 in (*newest, *older):
                        await self._copies.fetch(sha256, partial(self._is_over, sha256))
                    self.do(message)
                    self._copies.keep((*newest, *older), self._names)
                case wire.PublishOlder(sha256):
                    await self._copies.fetch(sha256, partial(self._is_over, sha256))
                    self.do(message)
        except Exception as error:  # else this gateway would wait for ever
            self.fail(error)
            return
        self._fetching = None
        self._go_on()
        self._host.grant()

    def _is_over(self, sha256: str) -> bool:
        """Return whether others were published meanwhile, and this content is none of them."""
        later = [each for each in self._heard_of if isinstance(each, wire.PublishContents)]
        return bool(later) and sha256 not in (*later[-1].newest, *later[-1].older)

    async def _fetch_bundles(self, setup: wire.Setup) -> None:
        if not setup.knows_devices and not self._open_to_all:
            raise ServiceError(
                Code.BAD_MESSAGE,
                "other machines can connect to this gateway, and the engine process has no "
                "identities: whoever connects would be a device, under any name. Name a folder for "
                "identities in the engine's service file, or say open = true in this gateway's",
            )
        self._objects = await asyncio.to_thread(Objects, self._url or setup.objects)
        self._copies.served = ServedObjects(self._objects)
        folders = []
        for sha256 in setup.stored_bundles:
            folder = await self._copies.fetch_bundle(sha256, lambda: False)
            assert folder is not None
            folders.append(str(folder))
        self._names = setup.stored_bundles
        self._adds_up = setup.adds_up
        own = msgspec.structs.replace(
            setup,
            bundles=tuple(folders),
            contents=str(self._copies.folder),
            spool=str(self.own.folder),
            sums=str(self._sums),
        )
        self.do(own)
        self.gate.began(setup.knows_devices, self._let_in())
        self._puts = range(setup.first_put, setup.first_put + PUTS)
        waiting, self._to_save = self._to_save, []
        for saving in waiting:
            self.save(saving)

    # Updates

    def new_port(self, address: str, check_in: CheckIn) -> RemotePort:
        self._connection += 1
        port = DistantPort(self, self._connection, address, check_in)
        self._ports[port.connection] = port
        return port

    def _announced(self, message: wire.Announcement) -> None:
        asked = self._questions.pop(message.question, None)
        if asked is None:
            return
        assert isinstance(asked.message, wire.AskAnnounce)
        report = asked.message.report
        begun = self.own.take_begun(report.task, report.parts) if message.wanted else None
        asked.port.announced(report, message)
        asked.pending.answer(Announced(message.wanted, begun), self._loop.time())

    def save(self, saving: PendingSave) -> None:
        """Have this update saved: now, or when there is an engine process."""
        if not self._puts:
            self._to_save.append(saving)
            if self._bus is not None and self.is_set_up.is_set():
                self._bus.close()  # the next hello brings other numbers
            return
        number, self._puts = self._puts[0], self._puts[1:]
        put = self._loop.run_in_executor(self._writers, self._put, number, saving)
        put.add_done_callback(partial(self._was_put, number, saving, self._bus))

    def _put(self, number: int, saving: PendingSave) -> None:
        size = saving.report.size
        parts = map(bytes, self.own.files.read_spool_file(saving.spool_file, size))
        self._objects.put(arrived_key(number), b"".join(parts) if size <= WHOLE else parts)

    def _was_put(
        self, number: int, saving: PendingSave, bus: Bus | None, put: asyncio.Future[None]
    ) -> None:
        if put.cancelled():
            return
        error = put.exception()
        if isinstance(error, StoreUnavailableError):
            now = self._loop.time()
            if now - self._said_away > REMIND:
                self._said_away = now
                logger.warning("updates wait for the object store: %s", error.text)
            self._loop.call_later(AGAIN, self.save, saving)
        elif isinstance(error, Exception):
            self.fail(error)
        elif bus is not self._bus or bus is None:
            self.save(saving)  # whoever is the engine process now does not know this object
        else:
            self._saving[number] = saving
            if self._adds_up:
                self.own.name(saving.spool_file, number)
            self._question += 1
            message = wire.AskSave(
                self._question, saving.device, saving.report, number, saving.largest
            )
            self._questions[self._question] = OpenQuestion(
                message, saving.pending, saving.port, self._loop.time()
            )
            self.say(message)

    def _let_in(self) -> list[str]:
        """Return the devices that were let in because they are enrolled."""
        connections = (driver.connection for driver in self._host.connections)
        return [each.known.device for each in connections if each.known is not None]

    def do(self, message: wire.ToGateway) -> None:
        if isinstance(message, wire.DeviceKnown | wire.DeviceUnknown | wire.EnrolledNow):
            self.gate.heard(message, self._loop.time())
            return
        if isinstance(message, wire.EnrolmentsChanged):
            self.gate.changed(self._let_in())
            return
        if isinstance(message, wire.Answered | wire.QuestionRefused):
            asked = self._questions.get(message.question)
            if asked is not None and isinstance(asked.message, wire.AskSave):
                saving = self._saving.pop(asked.message.file)
                if isinstance(message, wire.Answered):
                    self.own.saved(saving.spool_file, asked.message.file)
                else:  # the conversation frees it
                    self.own.not_saved(asked.message.file)
                    self._writers.submit(self._remove, asked.message.file)
        super().do(message)

    def _say_soon(self, message: wire.PartialSumMade) -> None:
        """Put a partial sum into the store, and say so. In the thread that made it."""
        if message.made is not None:
            file = self._sums / str(message.number)
            try:
                self._objects.put(partial_key(message.number), file)
            except (FleetError, OSError) as error:
                text = in_words(error)
                message = msgspec.structs.replace(message, made=None, text=text)
            finally:
                file.unlink(missing_ok=True)
        super()._say_soon(message)

    def _remove(self, number: int) -> None:
        with suppress(FleetError):  # the engine process removes it later
            self._objects.remove([arrived_key(number)])

    def sweep(self, interval: float) -> None:
        super().sweep(interval)
        self.own.sweep()
