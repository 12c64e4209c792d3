"""The devices of a run whose connections gateways hold: what the run sees of them in the engine
process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import CheckIn, FromCoordinator

from fleetlearn_coordinator.aggregation.partial_sum import Adders
from fleetlearn_coordinator.conversation.begun import BegunUpload, decode_begun
from fleetlearn_coordinator.conversation.limits import STOP_TIMEOUT
from fleetlearn_coordinator.conversation.port import Port, Spool
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.bus import Bus
from fleetlearn_coordinator.gateways.gateway_adders import CollectsSums, GatewayAdders
from fleetlearn_coordinator.gateways.gateway_link import GatewayLink, RemoteDevice
from fleetlearn_coordinator.gateways.lent_files import LentFiles, PutNumbers
from fleetlearn_coordinator.gateways.local_bus import listen_locally
from fleetlearn_coordinator.gateways.nats_listener import NatsListener
from fleetlearn_coordinator.gateways.nats_place import place_of
from fleetlearn_coordinator.gateways.published_files import PublishedFiles
from fleetlearn_coordinator.network.driver import ServedRun
from fleetlearn_coordinator.network.host import find_signer
from fleetlearn_coordinator.network.loop_lag import LoopLag
from fleetlearn_coordinator.network.output_gate import OutputGate
from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.network.run_host import ConnectionsNow, GatewayNow, UploadsNow
from fleetlearn_coordinator.network.transfers.contents import Contents, Older
from fleetlearn_coordinator.network.transfers.elsewhere import Elsewhere
from fleetlearn_coordinator.network.transfers.find_elsewhere import elsewhere_of
from fleetlearn_coordinator.network.transfers.store_publisher import StorePublisher
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings, share
from fleetlearn_coordinator.storage.lent_spool import ArrivedSpool, LendableSpool
from fleetlearn_coordinator.storage.served_objects import ServedObjects

if TYPE_CHECKING:
    from fleetlearn_coordinator.network.several.turns import Turns

SOCKET = "gateways.sock"
"""The bus's socket, in the run's data directory."""
CONTENTS = "served"
"""The folder with what devices fetch, in the run's data directory."""
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


@runtime_checkable
class GivesUpdatesAway(Protocol):
    """A run whose updates others may add."""

    def let_add(self, adders: Adders, count: int) -> CollectsSums | None:
        """Have these processes, of which there are ``count``, add the updates that they store.
        Returns whom they tell; None: they are to add none."""


@runtime_checkable
class ReleasesUploads(Protocol):
    """A run that keeps begun uploads."""

    def release_upload(self, spool_file: int) -> bool:
        """Part from the begun upload in this spool file, whose bytes go on coming. Returns whether
        the run had it."""


class EngineHost:
    """A ``RunHost`` within a running event loop, for one run, whose devices are connected to
    ``gateways`` gateways."""

    turns: Turns | None = None

    def __init__(
        self,
        service: ServiceSettings,
        gateways: int,
        folder: Path,
        stopping: Callable[[], bool] = lambda: False,
        name: str = "",
    ) -> None:
        """``folder``: the run's data directory. ``stopping``: returns whether the process was told
        to stop. ``name``: the plan's, by which the bus knows the run. Raises FleetError where a
        signing key cannot be used."""
        self.heartbeat, self.region = service.heartbeat, service.region
        self.address = ""
        self.lag = LoopLag()
        self.ended = False
        self.gateways: dict[int, GatewayLink] = {}
        """Number of a gateway that has said hello -> what is known of it."""
        self.devices: dict[str, RemoteDevice] = {}
        """Device -> its connection, once it has joined."""
        self.most = service.max_connections
        self.files: LentFiles
        self.adders: GatewayAdders
        self.spool: LendableSpool
        self._count, self._folder = gateways, folder
        # as many as a gateway's uploads with a place, and those that lost theirs
        self._each = 2 * share(service.uploads, max(1, gateways)) + 1
        self._service, self._name = service, name
        self._listener: NatsListener | None = None
        """Where gateways on other machines come in."""
        self._store: StorePublisher | None = None
        """What those fetch for their devices."""
        self._bundle_names: tuple[str, ...] = ()
        self._orphans = -ORPHANS
        """When ``sweep`` looked for objects that nobody needs."""
        self._buses: set[GatewayLink] = set()
        """All that are connected, with those that have not said hello."""
        self._content_settings = service.contents
        self._urls: dict[str, str] = {}
        """SHA-256 of a content -> where devices can fetch it in the object store."""
        self._stopping = stopping
        self._signer = find_signer(service.signing_keys)
        self._published: PublishedFiles
        self._page: int | None = None
        self._bundles: tuple[str, ...] = ()
        self.run: ServedRun
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
        if self._store is not None:
            self._store.close()

    def end(self) -> None:
        """Do nothing more, whatever gateways say."""
        self.ended = True
        if hasattr(self, "adders"):
            self.adders.close()

    def serve_run(
        self,
        port: Port,
        bundles: Iterable[Bundle],
        failed: Callable[[Exception], None],
        name: str = "",
        served: ServedObjects | None = None,
    ) -> ServedRun:
        """Serve the run. Raises FleetError where its spool files cannot be lent."""
        spool = port.spool
        if not isinstance(spool, LendableSpool):
            raise FleetError(
                Code.BAD_MESSAGE, "gateways need the run's spool files in a folder of this machine"
            )
        self.spool = spool
        releases = port.release_upload if isinstance(port, ReleasesUploads) else None
        self.files = LentFiles(spool, self._each, releases)
        bundles = tuple(bundles)
        self._bundles = tuple(str(bundle.path.absolute()) for bundle in bundles)
        self._published = PublishedFiles(self._folder / CONTENTS)
        self.adders = GatewayAdders(self.gateways, self._folder)
        if isinstance(port, GivesUpdatesAway):
            self.adders.run = port.let_add(self.adders, self._count)
        elsewhere = elsewhere_of(self._content_settings, served, bundles, self._urls_changed)
        if self._service.bus is not None:
            self._store = self._publisher(spool, bundles, elsewhere)
            self._bundle_names = tuple(bundle.sha256 for bundle in bundles)
        self.run = ServedRun(port, Contents(), failed, name, OutputGate(), elsewhere)
        return self.run

    def _publisher(
        self, spool: LendableSpool, bundles: Sequence[Bundle], elsewhere: Elsewhere
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
            spool = self.spool
            assert isinstance(spool, ArrivedSpool)
            self._listener = NatsListener(
                place, spool.generation, self._let_in, first=APART, may_speak=self._has_run
            )
            await self._listener.listen()
        if self._count or self._listener is None:
            self._server = await listen_locally(self._folder / SOCKET, self._let_in)
        while not self._first.is_set() and not self._stopping():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._first.wait(), LOOK)

    def _has_run(self) -> bool:
        """Return whether no other coordinator has the run, as far as this process knows."""
        assert isinstance(self.spool, ArrivedSpool)
        try:
            self.spool.check_owner()
        except FleetError:
            return False
        return not self.ended

    def _let_in(self, bus: Bus) -> GatewayLink:
        link = GatewayLink(self, bus)
        self._buses.add(link)
        return link

    # What links say

    def said_hello(self, link: GatewayLink, hello: wire.GatewayHello) -> None:
        """A gateway is there, or is there again."""
        earlier = self.gateways.get(hello.gateway)
        if earlier is not None:
            earlier.close()
            self.lost(earlier)
        self.gateways[hello.gateway] = link
        lost = self.files.claim(hello.gateway, hello.files + hello.asked)
        spool, where, first_put = self.spool, "", 0
        if hello.apart:
            if not isinstance(spool, ArrivedSpool):
                text = f"gateway {hello.gateway} is on another machine, and the run has no bus"
                raise FleetError(Code.BAD_MESSAGE, text)
            where, first_put = spool.where_objects, self.files.begin_puts(hello.gateway, spool)
        probe = "?"
        shown = self.run.port.shown(None, probe)
        link.say(
            wire.Setup(
                self._bundles,
                str(self._published.folder.absolute()),
                str(self.spool.folder.absolute()),
                tuple(lost),
                self._page,
                None if shown == probe else shown,
                str(self.adders.folder),
                link.wire,
                where,
                self._bundle_names if hello.apart else (),
                first_put,
            )
        )
        link.say(self._contents_now())
        self._lend(link)
        self.address = self.address or hello.address
        self._first.set()

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
        try:
            for number in self.files.take_back_all(link.number):
                self.keep(number)
            for device in list(link.devices.values()):
                self.gone(device)
            self.adders.lost(link.number)
            self.grant()
        except Exception as error:
            self.run.failed(error)

    def joined(self, device: RemoteDevice, check_in: CheckIn) -> None:
        """The device may stay: it joins the run. An earlier connection of it is over."""
        earlier = self.devices.get(device.name)
        if earlier is not None:
            del earlier.link.devices[earlier.connection]
            earlier.link.say(wire.ReplaceDevice(earlier.connection, device.address))
        self.devices[device.name] = device
        device.link.devices[device.connection] = device
        self.region = device.link.region
        self.run.port.join(check_in, self._loop.time())

    def gone(self, device: RemoteDevice) -> None:
        """The device's connection is gone. Harmless where the device has connected again."""
        device.link.devices.pop(device.connection, None)
        if self.devices.get(device.name) is device:
            del self.devices[device.name]
            self.run.port.leave(device.name, self._loop.time())

    def keep(self, number: int, begun: BegunUpload | None = None) -> None:
        """The run has this spool file again. ``begun``: what it holds; None: what its checkpoint
        says, if there is one."""
        content = self.spool.find_checkpoint(number)
        if begun is None and content is not None:
            begun = decode_begun(content)
        if begun is not None and begun.spool_file == number:
            self.run.port.keep_upload(begun.device, begun)
        else:
            self.spool.free_spool_file(number)

    def drop_checkpoint(self, number: int) -> None:
        """The upload in this spool file is complete."""
        if self.spool.find_checkpoint(number) is not None:
            self.spool.drop_checkpoint(number)

    # What the run asks

    def devices_of(self, run: ServedRun) -> list[str]:
        """Return all connected devices: there is one run."""
        return list(self.devices)

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
        if files := self.files.lend(link.number):
            link.say(wire.LendFiles(tuple(files)))

    def forget_uploads(self, spool: Spool, unless: Container[str]) -> None:
        """Have gateways forget what they remember of tasks that are over."""
        self._say_to_all(wire.TasksOver())

    def uploads_of(self, spool: Spool) -> UploadsNow:
        """Return how many uploads there are, as gateways said last."""
        figures = [link.figures for link in self.gateways.values()]
        return UploadsNow(
            sum(each.arriving for each in figures), sum(each.waiting for each in figures)
        )

    def publish(
        self, run: ServedRun, newest: Mapping[str, Buffer], older: Mapping[str, Older]
    ) -> None:
        """Serve the run's newest vectors by their SHA-256, and the older ones that its tasks began
        from. Raises OSError."""
        self._published.publish(newest, older)
        if self._store is not None:
            self._store.publish(newest, older)
        self.run.elsewhere.publish(newest, older)
        self._say_to_all(self._contents_now())

    def _contents_now(self) -> wire.PublishContents:
        return wire.PublishContents(self._published.newest, self._published.older, self._urls)

    def _urls_changed(self, urls: Mapping[str, str]) -> None:
        self._urls = {**urls}
        self._say_to_all(self._contents_now())

    def serve_older(self, run: ServedRun, sha256: str, where: Older) -> None:
        """Serve an older vector too, until newest ones are published without it. Raises OSError."""
        if sha256 not in self._published.newest + self._published.older:
            self._published.add_older(sha256, where)
            if self._store is not None:
                self._store.add_older(sha256, where)
            self.run.elsewhere.add_older(sha256, where)
            self._say_to_all(wire.PublishOlder(sha256))

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
        self.run.elsewhere.sweep()
        if self._store is not None:
            self._store.sweep()
        if self._listener is not None and now - self._orphans > ORPHANS:
            self._orphans = now
            self._loop.run_in_executor(None, self._drop_orphans, self.files.may_be_put())
        self.grant()

    def _drop_orphans(self, live: PutNumbers) -> None:
        """Remove objects that gateways put, and that nobody needs. In any thread."""
        assert isinstance(self.spool, ArrivedSpool)
        try:
            self.spool.drop_orphans(live)
        except FleetError as error:
            logger.debug("objects that nobody needs stay for now: %s", error.text)

    async def empty(self) -> None:
        """Wait STOP_TIMEOUT seconds at most for all devices to leave."""
        until = self._loop.time() + STOP_TIMEOUT
        while self.devices and self._loop.time() < until:
            await asyncio.sleep(0.05)
