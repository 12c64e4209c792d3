"""The connections of one process: where they come in, who speaks for which device, and who is
overdue."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.errors import MAX_TEXT
from fleetlearn_protocol.frames import CHUNK_BYTES, Buffer
from fleetlearn_protocol.messages import (
    SILENT_HEARTBEATS,
    CheckIn,
    ComeBack,
    FromCoordinator,
    SharedModel,
    Welcome,
)
from fleetlearn_protocol.versions import agreed_version

from fleetlearn_coordinator.conversation.limits import STOP_TIMEOUT, TLS_NEWCOMERS
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.places import Places, Proven
from fleetlearn_coordinator.conversation.port import Admitted, Port, Spool
from fleetlearn_coordinator.conversation.uploads import Uploads
from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.network.driver import ConnectionDriver, ServedRun, Shared
from fleetlearn_coordinator.network.gate import Doorkeeper
from fleetlearn_coordinator.network.listener import Listener
from fleetlearn_coordinator.network.loop_lag import LoopLag
from fleetlearn_coordinator.network.output_gate import OutputGate
from fleetlearn_coordinator.network.run_host import ConnectionsNow, GatewayNow, UploadsNow
from fleetlearn_coordinator.network.several.shared_port import SharedPort
from fleetlearn_coordinator.network.several.turns import ServingConnection, SharedDevice, Turns
from fleetlearn_coordinator.network.tls import Certificates
from fleetlearn_coordinator.network.transfers.contents import (
    Contents,
    FramedContent,
    Older,
    StoredContent,
)
from fleetlearn_coordinator.network.transfers.downloads import Downloads
from fleetlearn_coordinator.network.transfers.find_elsewhere import elsewhere_of
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.storage.identities import Known
from fleetlearn_coordinator.storage.served_objects import ServedObjects

if TYPE_CHECKING:
    from fleetlearn_coordinator.network.signing import Signer

SOFTWARE = f"fleetlearn {version('fleetlearn')}"
"""What a `welcome` says. Looked up once: reading the installed metadata takes 0.1 ms."""


class Host:
    """The listener, the connections and the places for their transfers, within a running event
    loop.

    It serves one run, to whose port all conversations speak, or ``several``: then ``turns`` says
    which of them each device serves, and conversations speak to it through a ``SharedPort``.
    Connections, places for transfers and devices' names are the host's. Runs see it as a
    ``RunHost``.
    """

    def __init__(
        self,
        service: ServiceSettings,
        places: process_settings.DescriptorShares,
        gate: Doorkeeper | None = None,
        *,
        several: bool = False,
    ) -> None:
        """``places``: how many connections the process has descriptors for. ``gate``: who may
        connect, if not everybody. Raises FleetError where the files of TLS, or a signing key,
        cannot be used."""
        self._gate = gate
        proven = Proven(service.max_connections)
        self.heartbeat, self.region = service.heartbeat, service.region
        """Seconds between a device's signs of life."""
        self.uploads = Uploads(Places(service.uploads, service.least_rate, proven))
        self.downloads = Downloads(Places(service.downloads, service.least_rate, proven))
        self.address = ""
        """Where it listens, as a URL."""
        self._certificates = None if service.tls is None else Certificates(service.tls)
        self._listener = Listener(
            lambda connection: ConnectionDriver(connection, self.shared),
            origins=service.own_origins,
            newcomers=places.newcomers
            if service.tls is None
            else min(places.newcomers, TLS_NEWCOMERS),
            speaking=lambda: len(self.devices),
            heartbeat=service.heartbeat,
            certificates=self._certificates,
            gate=gate,
            limits=service.limits,
            proxies=service.proxies,
            ready=self.is_ready,
        )
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an error of the host itself, which neither a run nor a device caused."""
        self.turns = Turns(self.tell) if several else None
        """Which of several runs each device serves."""
        self.shared = Shared(
            self.admit,
            self.uploads,
            self.downloads,
            self.fail,
            self._listener.checked_in,
            self._listener.budgets,
            find_signer(service.signing_keys),
        )
        self.connections = self.shared.connections
        self.devices = self.shared.devices
        """Device -> the driver of its connection, of those that checked in."""
        self._content_settings = service.contents
        self._listens_on = service.host, service.port
        self._places = places.devices
        self._run: ServedRun
        self._loop = asyncio.get_running_loop()
        self.lag = LoopLag()
        """How late the process's event loop is."""
        self._swept = self._loop.time()
        """When ``sweep`` looked last."""

    def serve_run(
        self,
        port: Port,
        bundles: Iterable[Bundle],
        failed: Callable[[Exception], None],
        name: str = "",
        served: ServedObjects | None = None,
    ) -> ServedRun:
        """Serve a run, whose devices may fetch these bundles. Call once, before ``listen``, unless
        the host serves ``several``; those are then added to ``turns``. ``failed`` is called with
        errors that no device caused. ``name``: the run's, of several. ``served``: its object
        store's."""
        bundles = tuple(bundles)
        elsewhere = elsewhere_of(self._content_settings, served, bundles)
        run = ServedRun(port, Contents(*bundles), failed, name, OutputGate(), elsewhere)
        if self.turns is None:
            self._run = run
        return run

    async def listen(self, *, shared: bool = False, sockets: Sequence[socket.socket] = ()) -> None:
        """Begin to accept connections. ``shared``: other processes listen there too. ``sockets``:
        listen on these, which another process opened. Raises OSError."""
        scheme = "ws" if self._certificates is None else "wss"
        if sockets:
            address = self._listener.listen_on(sockets)
        else:
            address = await self._listener.listen(*self._listens_on, shared=shared)
        self.address = f"{scheme}://{address}"

    def is_ready(self) -> bool:
        """Return whether devices are to come here."""
        return True

    def accept_no_more(self) -> None:
        """Accept no more connections. Those that are here go on."""
        self._listener.accept_no_more()

    def allow_page(self, port: int) -> None:
        """The coordinator's own page is served on this port of the same host: it may connect."""
        self._listener.page_port = port

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._listener.close()

    def region_of(self, device: str) -> str | None:
        """As ``RunHost`` has it."""
        return self.region

    def admit(
        self, driver: ConnectionDriver, check_in: CheckIn
    ) -> Admitted | ComeBack | Pending[Admitted | ComeBack]:
        """Say what a device is told that checks in, and which port it has."""
        answer: Admitted | ComeBack | Pending[Admitted | ComeBack]
        if self.turns is None:
            driver.run = self._run
            answer = self._run.port.admit(check_in)
        else:
            answer = admit_to_runs(self.turns, driver, check_in, self.heartbeat)
        full = check_in.device not in self.devices and len(self.devices) >= self._places
        if full and not isinstance(answer, ComeBack):
            answer = ComeBack(spread(30.0), "busy")
        return answer

    def can_sign_for(self, check_in: CheckIn) -> bool:
        """Return whether the device, if it trusts keys, trusts one of the service's."""
        signer = self.shared.signer
        return not check_in.trusts or (
            signer is not None and signer.for_device(check_in) is not None
        )

    def fail(self, error: Exception) -> None:
        """End the only run, or the host of several, by an error that no device caused."""
        if self.turns is None:
            self._run.failed(error)
        elif not self.failure.done():
            self.failure.set_exception(error)

    @property
    def refused(self) -> Mapping[str, int]:
        """Cause of CAUSES (gate.py) -> connections that were refused before they were open."""
        return self._listener.refused

    @property
    def certificate_ends(self) -> float | None:
        """When the coordinator's certificate ends, in Unix time. None: there is none."""
        own = None if self._certificates is None else self._certificates.own
        return None if own is None else own.ends

    @property
    def ended(self) -> bool:
        """Whether nothing more may be done."""
        return self.shared.ended

    def end(self) -> None:
        """Do nothing more, whatever devices say."""
        self.shared.ended = True

    def connections_now(self) -> ConnectionsNow:
        """Return what the connections are like, for monitoring."""
        queues = [driver.connection.unsent for driver in self.connections]
        return ConnectionsNow(len(queues), sum(queues), max(queues, default=0), self.refused)

    def gateways_now(self) -> list[GatewayNow]:
        """Return nothing: the connections are here."""
        return []

    def drop_run(self, run: ServedRun) -> None:
        """The run is not served any more. Nothing of it is here."""

    # What a run says

    def devices_of(self, run: ServedRun) -> list[str]:
        """The connected devices that serve a run."""
        return [device for device, driver in self.devices.items() if driver.run is run]

    def tell(self, device: str, message: FromCoordinator) -> None:
        """Send to a device, if it is connected. Places that come free are given by ``grant``."""
        driver = self.devices.get(device)
        if driver is not None:
            driver.conversation.tell(message)

    def grant(self) -> None:
        """Let uploads begin, as many as there is room for."""
        self.uploads.grant(self._loop.time())

    def publish(
        self, run: ServedRun, newest: Mapping[str, Buffer], older: Mapping[str, Older]
    ) -> None:
        """Serve a run's newest vectors by their SHA-256, and the older ones that its tasks began
        from. Each download of another one would keep that one's bytes in memory."""
        run.elsewhere.publish(newest, older)
        for gone in run.contents.publish(newest, older):
            for device in self.devices_of(run):
                self.devices[device].conversation.withdrawn(gone)

    def serve_older(self, run: ServedRun, sha256: str, where: Older) -> None:
        """Serve an older vector of a run too, until newest ones are published without it."""
        run.elsewhere.add_older(sha256, where)
        run.contents.serve_older(sha256, where)

    def find_content(self, sha256: str) -> FramedContent | StoredContent | None:
        """Return a content of any run that is served now."""
        found = (run.contents.get(sha256) for run in self._runs())
        return next((content for content in found if content is not None), None)

    def _runs(self) -> list[ServedRun]:
        """Return the runs that are served."""
        return [self._run] if self.turns is None else [each.served for each in self.turns.runs]

    def forget_uploads(self, spool: Spool, unless: Container[str]) -> None:
        """The tasks of the run with this spool are over, except those named by ``unless``: forget
        which of their uploads arrived wrong."""
        self.uploads.forget_tasks(spool, unless)

    def uploads_of(self, spool: Spool) -> UploadsNow:
        """Return how many uploads there are of the run with this spool."""
        places = self.uploads.places
        arriving = sum(upload.spool is spool for upload in places.held)
        return UploadsNow(arriving, sum(upload.spool is spool for upload in places.waiting))

    # Time, and the end

    def sweep(self, interval: float) -> None:
        """End the connections that are overdue, and take places from those that hardly move while
        others wait.

        ``interval``: seconds between two calls. Where this one comes late, this process stood still
        itself (a slow disk, a suspended machine): what devices sent meanwhile was not read yet, and
        that time is nobody's silence."""
        now, silence = self._loop.time(), SILENT_HEARTBEATS * self.heartbeat
        since, self._swept = now - self._swept, now
        if since > 1.25 * interval:
            silence += since
        if self._certificates is not None:
            self._certificates.check()
            self._certificates.say_remarks(self._listens_on[0], time.time())
        if self._gate is not None and (is_known := self._gate.look()) is not None:
            self._end_revoked(is_known)
        self.uploads.places.measure(now)
        self.downloads.places.measure(now)
        self.grant()
        self.downloads.go_on(now)
        if self.turns is not None:
            self.turns.sweep()
        self._sweep_contents()
        for driver in self.connections:
            why = driver.overdue(now, silence)
            if why is not None:
                driver.log(f"connection ended: {why}")
                driver.connection.transport.abort()

    def _sweep_contents(self) -> None:
        for run in self._runs():
            run.elsewhere.sweep()

    def _end_revoked(self, is_known: Callable[[Known], bool]) -> None:
        """End the connections whose credentials were revoked."""
        for driver in list(self.connections):
            known = driver.connection.known
            if known is not None and not is_known(known):
                driver.log(
                    "connection ended: its credential was revoked, or its device was enrolled again"
                )
                driver.connection.end(1008, "the credential was revoked")

    async def empty(self) -> None:
        """Wait STOP_TIMEOUT seconds at most for all connections to end. Uploads of those that do
        not go on after the next start, where they are then."""
        until = self._loop.time() + STOP_TIMEOUT
        while self.connections and self._loop.time() < until:
            await asyncio.sleep(0.05)
        self.uploads.write_checkpoints(self._loop.time())


def welcome(
    check_in: CheckIn,
    heartbeat: float,
    ineligible: str = "",
    waits: str = "",
    newest: SharedModel | None = None,
    warning: str = "",
) -> Welcome:
    """Return the welcome for a device that may stay. ``ineligible``: why it gets no task, for its
    owner. ``waits``: why nobody gets one now. ``newest``: the model, for one that takes no part.
    ``warning``: what went wrong with its last update, for its owner."""
    version = agreed_version(check_in)
    return Welcome(SOFTWARE, heartbeat, CHUNK_BYTES, ineligible, version, waits, newest, warning)


def admit_to_runs(
    turns: Turns, driver: ServingConnection, check_in: CheckIn, heartbeat: float
) -> Admitted:
    """Return what a device is told that checks in at a host with several runs."""
    unfit = {run: run.port.unfit(check_in) for run in turns.runs}
    fits = {run for run, why in unfit.items() if not why}
    why = (
        "; ".join(f"{run.port.name}: {why}" for run, why in unfit.items())
        or "no run is served here now"
    )
    device = SharedDevice(driver, msgspec.structs.replace(check_in, held=None), fits)
    port = SharedPort(turns, device)
    ineligible = "" if fits else why[:MAX_TEXT]
    said = {run.port.name: run.port.warning_for(check_in.device) for run in turns.runs}
    warning = "; ".join(f"{name}: {text}" for name, text in said.items() if text)[:MAX_TEXT]
    welcomed = welcome(check_in, heartbeat, ineligible, warning=warning)
    return Admitted(port, welcomed, 0, 0)


def find_signer(files: Sequence[Path]) -> Signer | None:
    """Return what signs with these keys; None: there are none. Raises FleetError where one cannot
    be used."""
    if not files:
        return None
    # its import takes 30 ms and 10 MB, for few services
    from fleetlearn_coordinator.network.signing import Signer

    return Signer(files)


def spread(longest: float) -> float:
    """A random wait, so that those who are told to come back do not come all at once (full
    jitter)."""
    return round(random.uniform(0.0, longest), 3)
