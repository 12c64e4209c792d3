"""The devices whose connections gateways hold: what runs see of them in the engine process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import CheckIn, FromCoordinator

from fleetlearn_coordinator.conversation.limits import STOP_TIMEOUT
from fleetlearn_coordinator.conversation.port import Port, Spool
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.bus import Bus
from fleetlearn_coordinator.gateways.gateway_link import GatewayLink, KnownAs, RemoteDevice
from fleetlearn_coordinator.gateways.gateway_messages import HANDLERS
from fleetlearn_coordinator.gateways.lent_files import PutNumbers
from fleetlearn_coordinator.gateways.local_bus import listen_locally
from fleetlearn_coordinator.gateways.nats_listener import NatsListener
from fleetlearn_coordinator.gateways.nats_place import place_of
from fleetlearn_coordinator.gateways.run_behind import Gateways, RunBehind, name_of
from fleetlearn_coordinator.network.device_budgets import DeviceBudgets
from fleetlearn_coordinator.network.driver import ServedRun
from fleetlearn_coordinator.network.gate import Gate, too_often
from fleetlearn_coordinator.network.host import find_signer
from fleetlearn_coordinator.network.loop_lag import LoopLag
from fleetlearn_coordinator.network.output_gate import OutputGate
from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.network.run_host import ConnectionsNow, GatewayNow, UploadsNow
from fleetlearn_coordinator.network.several.turns import Turns
from fleetlearn_coordinator.network.transfers.contents import Contents, Older
from fleetlearn_coordinator.network.transfers.elsewhere import Elsewhere
from fleetlearn_coordinator.network.transfers.find_elsewhere import elsewhere_of
from fleetlearn_coordinator.network.transfers.store_publisher import StorePublisher
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings, share
from fleetlearn_coordinator.storage.lent_spool import ArrivedSpool
from fleetlearn_coordinator.storage.served_objects import ServedObjects

SOCKET = "gateways.sock"
"""The bus's socket, in the run's data directory."""
LOOK = 0.1
"""Seconds between looks whether the process was told to stop, before the first gateway is there."""
APART = 1000
"""Gateways on other machines have numbers from here on."""
URL_SECONDS = 3600.0
"""For which the URL of an object can be used."""
ORPHANS = 600.0
"""Seconds between looks for objects that nobody needs."""
GATEWAY_SILENT = 15.0
"""Seconds without a word of a gateway, after which it is lost: its devices connect to another."""


class EngineHost:
    """A ``RunHost`` within a running event loop, for one run or ``several``, whose devices are
    connected to ``gateways`` gateways."""

    def __init__(
        self,
        service: ServiceSettings,
        gateways: int,
        folder: Path,
        stopping: Callable[[], bool] = lambda: False,
        name: str = "",
        *,
        several: bool = False,
        gate: Gate | None = None,
        socket: Path | None = None,
    ) -> None:
        """``folder``: the run's data directory, or that of several runs, with the socket.
        ``stopping``: returns whether the process was told to stop. ``name``: the plan's, by which
        the bus knows the run. ``gate``: who may connect to gateways on other machines, if not
        everybody. ``socket``: where gateways of this machine come in; by default in the folder.
        Raises FleetError where a signing key cannot be used."""
        self.heartbeat = service.heartbeat
        self.asks: tuple[str, str | None] = "", service.region
        self.address = ""
        self.lag = LoopLag()
        self.ended = False
        self.gateways: dict[int, GatewayLink] = {}
        """Number of a gateway that has said hello -> what is known of it."""
        self.devices: dict[str, RemoteDevice] = {}
        """Device -> its connection, once it has joined."""
        self.most = service.max_connections
        self.turns = Turns(self.tell) if several else None
        """Which of several runs each device serves."""
        self.runs: dict[str, RunBehind] = {}
        """The runs that are served, by ``run`` of their messages."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an error that none of several runs, and no device, caused."""
        self._socket = socket or folder / SOCKET
        # as many as a gateway's uploads with a place, and those that lost theirs
        each = 2 * share(service.uploads, max(1, gateways)) + 1
        self._behind = Gateways(self.gateways, gateways, each)
        self._service, self._name = service, name
        self.gate = gate
        self._budgets = DeviceBudgets(service.limits.device_check_ins)
        self._listener: NatsListener | None = None
        """Where gateways on other machines come in."""
        self._orphans = -ORPHANS
        """When ``sweep`` looked for objects that nobody needs."""
        self._buses: set[GatewayLink] = set()
        """All that are connected, with those that have not said hello."""
        self._content_settings = service.contents
        self._stopping = stopping
        self._signer = find_signer(service.signing_keys)
        self._page: int | None = None
        self._server: asyncio.AbstractServer | None = None
        self._first: asyncio.Event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._swept = time.monotonic()
        """When ``sweep`` looked last."""
        self._refused: dict[str, int] = {}
        """Of gateways that are gone."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._buses):
            link.close()
        if self._listener is not None:
            await self._listener.close()
        for run in self.runs.values():
            run.close()
            if run.store is not None:
                run.store.close()

    def end(self) -> None:
        """Do nothing more, whatever gateways say."""
        self.ended = True
        for run in self.runs.values():
            run.adders.close()

    def fail(self, error: Exception) -> None:
        """End the only run, or the host of several, by an error that no device caused."""
        self.failed(error, "" if self.turns is None else None)

    def failed(self, error: Exception, run: str | None) -> None:
        """End this run, or the whole host (None), by an error that no device caused."""
        found = None if run is None else self.runs.get(run)
        if found is not None:
            found.served.failed(error)
        elif run is None and not self.failure.done():
            self.failure.set_exception(error)

    def serve_run(
        self,
        port: Port,
        bundles: Iterable[Bundle],
        failed: Callable[[Exception], None],
        name: str = "",
        served: ServedObjects | None = None,
    ) -> ServedRun:
        """Serve a run, whose devices may fetch these bundles: the only one, or one of several.
        Raises FleetError where its spool files cannot be lent."""
        key, bundles = name_of(port, several=self.turns is not None), tuple(bundles)
        changed = partial(self._urls_changed, key)
        elsewhere = elsewhere_of(self._content_settings, served, bundles, changed)
        of_run = ServedRun(port, Contents(), failed, name, OutputGate(), elsewhere)
        run = RunBehind(of_run, bundles, self._behind, key)
        if self._service.bus is not None:
            run.store = self._publisher(run.spool, bundles, elsewhere)
            run.stored_bundles = tuple(bundle.sha256 for bundle in bundles)
        self.runs[key] = run
        for link in self.gateways.values():
            run.set_up(link, [], self._page)
        return of_run

    def _urls_changed(self, key: str, urls: Mapping[str, str]) -> None:
        run = self.runs.get(key)
        if run is not None:
            run.urls = {**urls}
            self._say_to_all(run.contents())

    def drop_run(self, served: ServedRun) -> None:
        """The run, of several, is not served any more. Its devices were told."""
        run = self._behind_of(served)
        del self.runs[run.name]
        run.close()
        self._say_to_all(wire.RunOver(run.name))

    def _behind_of(self, served: ServedRun) -> RunBehind:
        return next(run for run in self.runs.values() if run.served is served)

    def run_of(self, task: str) -> RunBehind | None:
        """Return the run of a task, if it is served here."""
        return self.runs.get("" if self.turns is None else task.partition("-")[0])

    def _publisher(
        self, spool: object, bundles: Sequence[Bundle], elsewhere: Elsewhere
    ) -> StorePublisher | None:
        """Return what publishes for gateways on other machines; None: ``elsewhere`` does. Raises
        ServiceError."""
        if not isinstance(spool, ArrivedSpool):
            raise ServiceError(
                Code.BAD_MESSAGE,
                "bus: this run began in its data directory, without an object store, and gateways "
                "on other machines need one. Leave bus out, or begin a run with blobs",
            )
        if isinstance(elsewhere, StorePublisher):
            return None
        return StorePublisher(spool.served, bundles, URL_SECONDS)

    async def listen(self) -> None:
        """Let gateways in, and wait for the first of them, or until the process is told to stop:
        where gateways cannot start, none comes. Raises OSError, BusError."""
        if (place := place_of(self._service, self._name)) is not None:
            spool = self._arrived()
            self._listener = NatsListener(
                place, spool.generation, self._let_in_distant, first=APART, may_speak=self._has_run
            )
            await self._listener.listen()
        if self._behind.wanted or self._listener is None:
            self._server = await listen_locally(self._socket, self._let_in_at_once)
        while not self._first.is_set() and not self._stopping():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._first.wait(), LOOK)

    def _has_run(self) -> bool:
        """Return whether no other coordinator has the run, as far as this process knows."""
        try:
            self._arrived().check_owner()
        except FleetError:
            return False
        return not self.ended

    def _arrived(self) -> ArrivedSpool:
        """Return the spool of the only run, which has its bytes in an object store."""
        spool = self.runs[""].spool
        assert isinstance(spool, ArrivedSpool)
        return spool

    def _let_in_distant(self, bus: Bus, number: int, name: str) -> GatewayLink:
        return self._let_in(bus, KnownAs(number, name))

    def _let_in(self, bus: Bus, known: KnownAs | None = None) -> GatewayLink:
        link = GatewayLink(self, bus, HANDLERS, known)
        self._buses.add(link)
        return link

    def _let_in_at_once(self, bus: Bus) -> GatewayLink:
        """Let in who is on this machine, and say that this process has the run: the supervisor
        looks whether it does."""
        link = self._let_in(bus)
        link.say_alive()
        return link

    # What links say

    def said_hello(self, link: GatewayLink, hello: wire.GatewayHello) -> None:
        """A gateway is there, or is there again."""
        earlier = self.gateways.get(hello.gateway)
        if earlier is not None:
            earlier.close()
            self.lost(earlier)
        self.gateways[hello.gateway] = link
        if self.turns is not None:
            link.say(wire.SeveralRuns())
            if self._page is not None:
                link.say(wire.PageMayConnect(self._page))
        held: dict[str, list[wire.LentFile]] = {}
        for file in hello.files + hello.asked:
            held.setdefault(file.run, []).append(file)
        for gone in held.keys() - self.runs.keys():
            link.say(wire.RunOver(gone))
        for run in self.runs.values():
            files = held.get(run.name, [])
            # one on another machine has files of its own alone, whatever it says
            lost = [] if link.apart else run.files.claim(hello.gateway, files)
            run.set_up(link, lost, self._page, knows_devices=self.gate is not None)
        self._lend(link)
        self.address = self.address or hello.address
        self._first.set()

    def count_check_in(self, device: str) -> None:
        """Count a check-in at a gateway on another machine. Raises RefusalError: too many."""
        if self._budgets.check_in(device, self._loop.time()):
            raise too_often(device)

    def lost(self, link: GatewayLink) -> None:
        """A gateway is gone, and with it its devices' connections."""
        self._buses.discard(link)
        if self.gateways.get(link.number) is not link:
            return
        del self.gateways[link.number]
        for cause, count in link.figures.refused.items():
            self._refused[cause] = self._refused.get(cause, 0) + count
        if self.ended:
            return
        for run in list(self.runs.values()):
            try:
                run.gateway_lost(link.number)
            except Exception as error:
                run.served.failed(error)
        try:
            for device in list(link.devices.values()):
                self.gone(device)
            self.grant()
        except Exception as error:
            self.fail(error)

    def joined(self, device: RemoteDevice, check_in: CheckIn) -> None:
        """The device may stay: it joins the run. An earlier connection of it is over."""
        earlier = self.devices.get(device.name)
        if earlier is not None:
            del earlier.link.devices[earlier.connection]
            earlier.link.say(wire.ReplaceDevice(earlier.connection, device.address))
        self.devices[device.name] = device
        device.link.devices[device.connection] = device
        device.port.join(check_in, self._loop.time())

    def region_of(self, device: str) -> str | None:
        if device == self.asks[0]:
            return self.asks[1]
        found = self.devices.get(device)
        return None if found is None else found.link.region

    def gone(self, device: RemoteDevice) -> None:
        """The device's connection is gone. Harmless where the device has connected again."""
        device.link.devices.pop(device.connection, None)
        if self.devices.get(device.name) is device:
            del self.devices[device.name]
            device.port.leave(device.name, self._loop.time())

    # What the run asks

    def devices_of(self, run: ServedRun) -> list[str]:
        """Return the connected devices that serve a run."""
        if self.turns is None:
            return list(self.devices)
        return [name for name, device in self.devices.items() if device.run is run]

    def can_sign_for(self, check_in: CheckIn) -> bool:
        """Return whether the device, if it trusts keys, trusts one of the service's."""
        return not check_in.trusts or (
            self._signer is not None and self._signer.for_device(check_in) is not None
        )

    def tell(self, device: str, message: FromCoordinator) -> None:
        """Send to a device, if it is connected."""
        connected = self.devices.get(device)
        if connected is not None:
            connected.link.tell(connected, message)

    def grant(self) -> None:
        """Lend gateways the spool files that they lack."""
        for link in self.gateways.values():
            self._lend(link)

    def _lend(self, link: GatewayLink) -> None:
        for run in list(self.runs.values()):
            try:
                files = run.files.lend(link.number)
            except Exception as error:
                run.served.failed(error)
                continue
            if files:
                link.say(wire.LendFiles(tuple(files), run.name))

    def forget_uploads(self, spool: Spool, unless: Container[str]) -> None:
        """Have gateways forget what they remember of tasks of this run that are over."""
        run = self._run_with(spool)
        if run is not None:
            self._say_to_all(wire.TasksOver(run.name))

    def _run_with(self, spool: Spool) -> RunBehind | None:
        return next((run for run in self.runs.values() if run.port.spool is spool), None)

    def uploads_of(self, spool: Spool) -> UploadsNow:
        """Return how many uploads there are, as gateways said last."""
        figures = [link.figures for link in self.gateways.values()]
        found = [(each.arriving, each.waiting) for each in figures]
        if self.turns is not None:
            run = self._run_with(spool)
            name = "" if run is None else run.name
            found = [each.of_runs.get(name, (0, 0)) for each in figures]
        return UploadsNow(sum(each[0] for each in found), sum(each[1] for each in found))

    def publish(
        self, run: ServedRun, newest: Mapping[str, Buffer], older: Mapping[str, Older]
    ) -> None:
        """Serve the run's newest vectors by their SHA-256, and the older ones that its tasks began
        from. Raises OSError."""
        behind = self._behind_of(run)
        behind.publish(newest, older)
        if behind.store is not None:
            behind.store.publish(newest, older)
        run.elsewhere.publish(newest, older)
        self._say_to_all(behind.contents())

    def serve_older(self, run: ServedRun, sha256: str, where: Older) -> None:
        """Serve an older vector too, until newest ones are published without it. Raises OSError."""
        behind = self._behind_of(run)
        if sha256 not in behind.published.newest + behind.published.older:
            behind.add_older(sha256, where)
            if behind.store is not None:
                behind.store.add_older(sha256, where)
            run.elsewhere.add_older(sha256, where)
            self._say_to_all(wire.PublishOlder(sha256, behind.name))

    def allow_page(self, port: int) -> None:
        """The coordinator's own page is served on this port: it may connect."""
        self._page = port
        self._say_to_all(wire.PageMayConnect(port))

    def _say_to_all(self, message: wire.ToGateway) -> None:
        for link in self.gateways.values():
            link.say(message)

    # The process

    @property
    def certificate_ends(self) -> float | None:
        """When the first of the gateways' certificates ends, in Unix time."""
        ends = [link.figures.certificate_ends for link in self.gateways.values()]
        return min((each for each in ends if each is not None), default=None)

    def connections_now(self) -> ConnectionsNow:
        """Return what the gateways' connections are like, as they said last."""
        figures = [link.figures for link in self.gateways.values()]
        refused = dict(self._refused)
        for each in figures:
            for cause, count in each.refused.items():
                refused[cause] = refused.get(cause, 0) + count
        return ConnectionsNow(
            sum(each.open for each in figures),
            sum(each.unsent for each in figures),
            max((each.longest for each in figures), default=0),
            refused,
        )

    def gateways_now(self) -> list[GatewayNow]:
        """Return what each gateway is like, in order of their numbers."""
        return [
            GatewayNow(
                number,
                link.process,
                link.figures.open,
                len(link.devices),
                link.bytes_up,
                link.bytes_down,
                link.figures.lag,
                link.name,
            )
            for number, link in sorted(self.gateways.items())
        ]

    def sweep(self, interval: float) -> None:
        """Tell gateways that this process does not stand still, and end those that say nothing any
        more: their process does."""
        now, longest = time.monotonic(), GATEWAY_SILENT
        since, self._swept = now - self._swept, now
        if since > 1.25 * interval:  # this process stood still itself: that is nobody's silence
            longest += since
        for link in list(self.gateways.values()):
            link.say_alive()
            if now - link.heard > longest:
                link.close()
                self.lost(link)
        for run in self.runs.values():
            run.served.elsewhere.sweep()
            if run.store is not None:
                run.store.sweep()
        if self.gate is not None and self.gate.look() is not None:
            for link in self.gateways.values():
                if link.apart:
                    link.say(wire.EnrolmentsChanged())
        if self._listener is not None and now - self._orphans > ORPHANS:
            self._orphans = now
            live = self.runs[""].files.may_be_put()
            self._loop.run_in_executor(None, self._drop_orphans, live)
        self.grant()
        if self.turns is not None:
            self.turns.sweep()

    def _drop_orphans(self, live: PutNumbers) -> None:
        """Remove objects that gateways put, and that nobody needs. In any thread."""
        try:
            self._arrived().drop_orphans(live, self.runs[""].adders.awaited)
        except FleetError as error:
            logger.debug("objects that nobody needs stay for now: %s", error.text)

    async def empty(self) -> None:
        """Wait STOP_TIMEOUT seconds at most for all devices to leave."""
        until = self._loop.time() + STOP_TIMEOUT
        while self.devices and self._loop.time() < until:
            await asyncio.sleep(0.05)
